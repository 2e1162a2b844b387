"""Validation of a request for a run: reports all errors at once, before anything is written."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from app.backends.base import Rules
from app.config import Settings
from app.datasets.models import Dataset
from app.errors import ApiError, FieldError, invalid
from app.experiments.models import Experiment
from app.runs import base_models
from app.runs.config import (
    Machine,
    Problem,
    TrainingConfig,
    TrainingMethod,
    given_fields,
    in_numbers,
    problems,
    resolve,
)
from app.runs.data_checks import Place, data_problems, rewards_of
from app.runs.destinations import destination_problems
from app.runs.installed import plugin_problems
from app.runs.models import Run
from app.runs.schemas import RunCreate
from app.runs.transitions import seconds
from app.storage import Storage
from app.workers.models import Device, Worker
from app.workers.service import FRESH_LEASES


@dataclass
class Examined:
    """Result of validating a request; `config` is set if there are no errors."""

    errors: list[FieldError] = field(default_factory=list)
    warnings: list[FieldError] = field(default_factory=list)
    config: TrainingConfig | None = None
    given: list[str] = field(default_factory=list)
    effective: TrainingConfig | None = None
    base_run_id: str | None = None
    reward_run_ids: list[str] = field(default_factory=list)

    def refuse(self, name: str, code: str, message: str) -> None:
        """Add an error."""
        self.errors.append(FieldError(field=name, code=code, message=message))


def refusal(errors: list[FieldError]) -> ApiError:
    """Build a 422 with all errors; its code is that of the errors if they all have the same."""
    codes = {error.code for error in errors}
    return invalid(errors, code=codes.pop() if len(codes) == 1 else "invalid_request")


async def examine(
    session: AsyncSession,
    settings: Settings,
    storage: Storage,
    known: Mapping[str, Rules],
    request: RunCreate,
    *,
    needs_weights: bool = True,
) -> Examined:
    """Validate a whole request; the rows that it refers to stay locked against deletion until the commit.

    Without `needs_weights`, the weights of the base model may be missing.
    """
    found = Examined()
    rules = known.get(request.backend)
    if rules is None:
        names = ", ".join(f"`{name}`" for name in sorted(known))
        found.refuse("backend", "unknown_backend", f"unknown backend; choose one of {names}")
    if request.experiment_id is not None:
        await _check_experiment(session, request.experiment_id, found)
    dataset = await _dataset(session, "dataset_id", request.dataset_id, found)
    evaluation = None
    if request.eval_dataset_id is not None:
        evaluation = await _dataset(session, "eval_dataset_id", request.eval_dataset_id, found)
    places: tuple[tuple[Place, Dataset | None], ...] = (("dataset_id", dataset), ("eval_dataset_id", evaluation))
    for name, item in places:
        found.errors += data_problems(request.config, name, item, splits=rules is None or rules.loads_model)
    machines = await online_machines(session, settings, request.backend, rules)
    data_format = dataset.format if dataset else None
    # In a thread, here and below: a long schema takes a second, which must not block other requests.
    wrong, machine = await asyncio.to_thread(
        config_problems, rules, request.config, request.eval_dataset_id is not None, data_format, machines
    )
    reported = {problem.field for problem in wrong}
    wrong += [one for one in await destination_problems(session, settings, request.config) if one.field not in reported]
    if rules is not None and rules.options is None:
        refused, warned = await plugin_problems(session, _online(settings, request.backend), request.config)
        wrong += [one for one in refused if one.field not in reported]
        found.warnings += [_about_config(problem) for problem in warned]
    found.errors += [_about_config(problem) for problem in wrong]
    loads_model = rules is None or rules.loads_model
    config = in_numbers(request.config)
    await _check_base_model(session, settings, storage, config, loads_model, found, needs_weights=needs_weights)
    await _check_reward_models(session, settings, storage, request.config, loads_model, found)
    if rules is not None and not await _worker_online(session, settings, request.backend):
        found.warnings.append(
            FieldError(
                field="backend",
                code="no_worker_online",
                message=f"No worker of backend `{request.backend}` is online: the run waits until one starts, "
                "and settings that depend on its device are checked then.",
            )
        )
    if not found.errors:
        await asyncio.to_thread(_resolve, request.config, machine, found)
    return found


def config_problems(
    rules: Rules | None,
    config: Mapping[str, Any],
    has_eval_dataset: bool = False,
    dataset_format: str | None = None,
    machines: Iterable[Machine] = (),
) -> tuple[list[Problem], Machine | None]:
    """Return a backend's errors for a configuration, and the first machine that supports it."""

    def judge(machine: Machine | None) -> list[Problem]:
        return problems(plain, has_eval_dataset=has_eval_dataset, dataset_format=dataset_format, machine=machine)

    options = rules.options if rules else None
    plain = config if options is None else {name: value for name, value in config.items() if name != "extra"}
    found = judge(None)
    fitting = None
    refused: list[Problem] = []
    for machine in machines:
        only_here = [problem for problem in judge(machine) if problem not in found]
        if not only_here:
            fitting, refused = machine, []
            break
        refused = refused or only_here
    found += refused
    if options is not None:
        found += _option_problems(options, config.get("extra", {}))
    if rules is not None and all(problem.field != "method" for problem in found):
        found += _capability_problems(rules, config)
    return found, fitting


def _option_problems(options: Any, extra: Any) -> list[Problem]:
    try:
        options.model_validate(extra)
    except ValidationError as error:
        known = ", ".join(options.model_fields)
        found = []
        for item in error.errors(include_url=False, include_input=False):
            name = ".".join(["extra", *(str(part) for part in item["loc"])])[:200]
            unknown = item["type"] == "extra_forbidden"
            reason = f"is not an option of this backend; its options are {known}" if unknown else item["msg"]
            code = "unknown_field" if unknown else "invalid"
            found.append(Problem(field=name, code=code, message=f"`{name}`: {reason}."))
        return found
    return []


def _capability_problems(rules: Rules, config: Mapping[str, Any]) -> list[Problem]:
    found = []
    can = rules.capabilities
    method = config.get("method", TrainingMethod.qlora)
    if method in list(TrainingMethod) and method not in can.supported_methods:
        methods = ", ".join(f"`{name}`" for name in can.supported_methods)
        found.append(
            Problem(
                field="method",
                code="not_supported_by_backend",
                message=f"Backend `{can.name}` does not support method `{method}`; use one of {methods}.",
            )
        )
    return found


def requirements(rules: Rules, config: TrainingConfig, given: Iterable[str]) -> dict[str, Any]:
    """Return the requirements on a worker that follow from the configuration alone."""
    wanted = set(given)
    needs_gpu = (
        ("optim" in wanted and config.optim.startswith("paged_"))
        or (config.attn_implementation or "").startswith("flash_attention")
        or ("bnb_4bit_compute_dtype" in wanted and config.bnb_4bit_compute_dtype == "float16")
    )
    return {"kind": "cuda"} if rules.machine_matters and needs_gpu else {}


async def _check_experiment(session: AsyncSession, experiment_id: str, found: Examined) -> None:
    query = select(Experiment.id).where(Experiment.id == experiment_id)
    if await session.scalar(query.with_for_update(read=True, key_share=True)) is None:
        found.refuse(
            "experiment_id",
            "experiment_not_found",
            "there is no such experiment; create one with POST /v1/experiments, or leave the field out to use the "
            "default one",
        )


async def _dataset(session: AsyncSession, name: str, dataset_id: str, found: Examined) -> Dataset | None:
    query = select(Dataset).where(Dataset.id == dataset_id).with_for_update(read=True, key_share=True)
    dataset = await session.scalar(query)
    if dataset is None:
        found.refuse(
            name,
            "dataset_not_found",
            f"there is no dataset {dataset_id[:60]!r}; upload one with POST /v1/datasets",
        )
    return dataset


async def _check_base_model(
    session: AsyncSession,
    settings: Settings,
    storage: Storage,
    config: Mapping[str, Any],
    loads_model: bool,
    found: Examined,
    *,
    needs_weights: bool,
) -> None:
    name = config.get("base_model")
    if not isinstance(name, str) or any(error.field == "config.base_model" for error in found.errors):
        return
    if not loads_model and not base_models.is_run(name):
        return
    try:
        output_attempt = await _output_attempt(session, name, "base") if base_models.is_run(name) else None
        # In a thread: a storage that hangs must not block the event loop.
        located = await asyncio.to_thread(base_models.locate, settings, storage, name, output_attempt)
    except base_models.BaseModelError as error:
        found.refuse("config.base_model", error.code, error.message)
        return
    if loads_model and located["path"] is not None:
        folder, given = Path(located["path"]), given_fields(config)
        wrong = await asyncio.to_thread(base_models.conflicts, folder, config, given, needs_weights=needs_weights)
        for conflict in wrong:
            found.refuse(f"config.{conflict.code}", "conflict", conflict.message)
    if base_models.is_run(name):
        found.base_run_id = name


async def _check_reward_models(
    session: AsyncSession,
    settings: Settings,
    storage: Storage,
    config: Mapping[str, Any],
    loads_model: bool,
    found: Examined,
) -> None:
    refused = {error.field for error in found.errors}
    for at, reward in rewards_of(config):
        name, place = reward.get("model"), f"config.rlhf.rewards.{at}.model"
        if reward.get("type") != "model" or not isinstance(name, str) or place in refused:
            continue
        is_run = base_models.is_run(name)
        if not loads_model and not is_run:
            continue
        try:
            output_attempt = await _output_attempt(session, name, "reward") if is_run else None
            located = await asyncio.to_thread(base_models.locate, settings, storage, name, output_attempt)
        except base_models.BaseModelError as error:
            found.refuse(place, error.code, error.message)
            continue
        folder = located["path"]
        if folder is not None and await asyncio.to_thread(base_models.is_reward_model, Path(folder)) is False:
            found.refuse(
                place,
                "not_a_reward_model",
                f"{name[:100]!r} generates text and returns no score; use a run of method `reward`, or a model for "
                "sequence classification",
            )
        elif is_run and name not in found.reward_run_ids:
            found.reward_run_ids.append(name)


async def _output_attempt(session: AsyncSession, run_id: str, role: Literal["base", "reward"]) -> int | None:
    query = select(Run.status, Run.output_attempt, Run.config["method"].astext.label("method")).where(Run.id == run_id)
    run = (await session.execute(query.with_for_update(read=True, key_share=True))).one_or_none()
    if run is None:
        raise base_models.BaseModelError(
            f"{role}_run_not_found", f"There is no run {run_id}; GET /v1/runs?status=completed lists usable runs."
        )
    if run.status != "completed":
        raise base_models.BaseModelError(
            f"{role}_run_not_completed",
            f"Run {run_id} is {run.status}, not completed; "
            + ("resume it, or" if run.status in ("failed", "cancelled") else "wait until it is, or")
            + " use another model.",
        )
    if role == "reward" and run.method != TrainingMethod.reward:
        raise base_models.BaseModelError(
            "not_a_reward_model",
            f"Run {run_id} was trained with method `{run.method}`; use a run of method `reward`.",
        )
    attempt: int | None = run.output_attempt
    return attempt


async def online_machines(
    session: AsyncSession, settings: Settings, backend: str, rules: Rules | None
) -> list[Machine]:
    """Return the kinds of devices of a backend's online workers, best first; none if devices do not matter."""
    if rules is None or not rules.machine_matters:
        return []
    query = select(Device.kind).distinct().join(Worker, Worker.id == Device.worker_id)
    kinds = (await session.scalars(query.where(*_online(settings, backend)))).all()
    # The features of a GPU are known only on its worker; here all are assumed to be present.
    return [
        Machine(kind="cuda", bf16=True, flash_attention=True, flash_attention_3=True)
        if kind == "cuda"
        else Machine(kind="cpu")
        for kind in sorted(kinds, reverse=True)
    ]


async def _worker_online(session: AsyncSession, settings: Settings, backend: str) -> bool:
    return await session.scalar(select(Worker.id).where(*_online(settings, backend)).limit(1)) is not None


def _online(settings: Settings, backend: str) -> tuple[Any, ...]:
    fresh = func.clock_timestamp() - seconds(settings.lease_seconds * FRESH_LEASES)
    return (Worker.state == "online", Worker.heartbeat_at > fresh, Worker.backends.contains([backend]))


def _resolve(config: Mapping[str, Any], machine: Machine | None, found: Examined) -> None:
    given = given_fields(config)
    found.config = TrainingConfig.model_validate(dict(config))
    found.given = sorted(given)
    effective = resolve(found.config, given, machine)
    found.effective = effective.config
    found.warnings += [
        FieldError(
            field=f"config.{item.field}",
            code="replaced",
            message=f"`{item.field}` will be {_shown(item.used)} instead of {_shown(item.requested)}: {item.reason}",
        )
        for item in effective.replaced
    ]


def _shown(value: Any) -> str:
    return f"`{value}`" if isinstance(value, str) else str(value).lower()


def _about_config(problem: Problem) -> FieldError:
    name = "config" if problem.field == "config" else f"config.{problem.field}"
    return FieldError(field=name, code=problem.code, message=problem.message)
