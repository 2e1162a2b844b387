"""Creates fine-tuning jobs: a request in OpenAI's terms becomes one for a run."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.methods import METHODS, TrainingMethod, method_of
from anneal.contracts.schemas.openai.graders import to_rewards
from anneal.contracts.schemas.openai.hyperparameters import (
    DEFAULT_COMPLETIONS,
    MOST_COMPLETIONS,
    completions_per_prompt,
    learning_rate,
    micro_batches,
)
from anneal.contracts.schemas.openai.jobs import Hyperparameters, JobCreate, ReinforcementOptions
from anneal.contracts.schemas.runs.requests import RunCreate
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.raw_config import named_fields
from app.api.errors import ApiError, invalid
from app.openai.ids import to_native_id
from app.runs.creating.creation import RunTransaction
from app.runs.dependencies import Backend
from app.tables.datasets import Dataset
from app.tables.runs import Run

_RENAMED = {"dataset_id": "training_file", "eval_dataset_id": "validation_file", "": ""}
"""Parameters of a job by the field of a run's request that they become."""
_METHODS = {"dpo": TrainingMethod.dpo, "reinforcement": TrainingMethod.rlhf}
"""Methods of training by the types of jobs that determine them."""
_REWARDS = "config.rlhf.rewards"
_DEFAULT_PROMPTS = 2
"""Prompts of a step on a device if no `batch_size` says how many."""


class _Derived(NamedTuple):
    """Field of the configuration that a parameter of the job determines."""

    field: str
    value: Any
    parameter: str


async def create_job(transaction: RunTransaction, backend: Backend, body: JobCreate) -> Run:
    """Create the first run of a job, or raise 422 with all errors by the parameters of the job."""
    session = transaction.session
    errors = list(_contradictory_options(body))
    files = {
        name: await _find_dataset(session, name, file_id, errors)
        for name, file_id in (("training_file", body.training_file), ("validation_file", body.validation_file))
        if file_id is not None
    }
    derived = list(_derive_fields(body, errors))
    errors += _contradictions(body.anneal.config, derived)
    if errors:
        raise invalid(errors)
    request = RunCreate(
        **{name: value for name, value in body.anneal if name != "grader_url"},
        name=body.suffix,
        dataset_id=files["training_file"],
        eval_dataset_id=files.get("validation_file"),
    )
    request.config = _merge_fields(body, derived)
    dataset = await session.get(Dataset, request.dataset_id)
    if dataset is not None and dataset.format == "chat" and method_of(request.config).is_supervised:
        request.config.setdefault("loss_on", "assistant")  # as OpenAI does; `all` is the default of this service
    try:
        run = await backend.create_run(transaction, request)
    except ApiError as error:
        raise _about_job(error, derived) from None
    await _store_description(session, run, body)
    return run


async def _store_description(session: AsyncSession, run: Run, body: JobCreate) -> None:
    """Store what only jobs have with a run, unless it has that already because the request is a repeated one."""
    values: dict[str, Any] = {}
    if body.metadata:
        values["job_metadata"] = body.metadata
    if (options := _reinforcement_options(body)) is not None:
        values["job_grader"] = options.grader.model_dump(exclude_unset=True)
    if values:
        unset = (Run.id == run.id, *(getattr(Run, name).is_(None) for name in values))
        await session.execute(update(Run).where(*unset).values(values))


def _contradictory_options(body: JobCreate) -> Iterator[FieldError]:
    """Yield errors of options that contradict the type of the method."""
    method = body.method
    if "grader_url" in body.anneal.model_fields_set and _reinforcement_options(body) is None:
        message = "has no effect without `method.reinforcement`; leave it out"
        yield FieldError(field="anneal.grader_url", code="conflict", message=message)
    if method is None:
        return
    others = [name for name in ("supervised", "dpo", "reinforcement") if name != method.type]
    for name in others:
        if getattr(method, name) is not None:
            message = f"has options of another type than `method.type`, which is `{method.type}`; leave it out"
            yield FieldError(field=f"method.{name}", code="conflict", message=message)
    if method.type == "reinforcement" and method.reinforcement is None:
        message = "is required, with a `grader` for the completions"
        yield FieldError(field="method.reinforcement", code="missing", message=message)
    own = method_of(body.anneal.config)
    if method.type == "supervised" and "method" in body.anneal.config and not own.is_supervised:
        message = f"is `{own.name}`, which is not of the type `supervised`; leave `method` out of the job"
        yield FieldError(field="anneal.config.method", code="conflict", message=message)


def _reinforcement_options(body: JobCreate) -> ReinforcementOptions | None:
    """Return the options of a job of the type `reinforcement`; None for others."""
    return body.method.reinforcement if body.method is not None and body.method.type == "reinforcement" else None


def _hyperparameters(body: JobCreate, errors: list[FieldError]) -> tuple[str, Hyperparameters]:
    """Return the hyperparameters of a job and where they are in it."""
    options = getattr(body.method, body.method.type) if body.method else None
    of_method: Hyperparameters | None = options.hyperparameters if options else None
    if of_method is not None and body.hyperparameters is not None:
        place = f"method.{body.method.type}.hyperparameters" if body.method else ""
        message = f"is deprecated and cannot be set together with `{place}`; leave it out"
        errors.append(FieldError(field="hyperparameters", code="conflict", message=message))
    if of_method is not None and body.method is not None:
        return f"method.{body.method.type}.hyperparameters", of_method
    return "hyperparameters", body.hyperparameters or Hyperparameters()


def _derive_fields(body: JobCreate, errors: list[FieldError]) -> Iterator[_Derived]:
    """Yield the fields of the configuration that the parameters of a job determine."""
    yield _Derived("base_model", body.model, "model")
    if body.seed is not None:
        yield _Derived("seed", body.seed, "seed")
    if body.method is not None and body.method.type in _METHODS:
        yield _Derived("method", _METHODS[body.method.type].value, "method.type")
    if (options := _reinforcement_options(body)) is not None:
        place = "method.reinforcement.grader"
        rewards, problems = to_rewards(options.grader, body.anneal.grader_url, place)
        errors += problems
        yield _Derived("rlhf.rewards", rewards, place)
    for integration in body.integrations or ():
        yield _Derived("report_to", ["wandb"], "integrations.0.type")
        for name, value in integration.wandb.model_dump(exclude_none=True).items():
            yield _Derived(f"wandb_{name}", value, f"integrations.0.wandb.{name}")
    place, hyperparameters = _hyperparameters(body, errors)
    values = {name: value for name, value in hyperparameters.model_dump(exclude_none=True).items() if value != "auto"}
    if (epochs := values.get("n_epochs")) is not None:
        yield _Derived("epochs", epochs, f"{place}.n_epochs")
    if (multiplier := values.get("learning_rate_multiplier")) is not None:
        yield _Derived("learning_rate", _scaled_rate(body, multiplier), f"{place}.learning_rate_multiplier")
    if (beta := values.get("beta")) is not None:
        yield _Derived("dpo.beta", beta, f"{place}.beta")
    if (steps := values.get("eval_interval")) is not None:
        yield _Derived("eval_steps", steps, f"{place}.eval_interval")
    yield from _derive_batch(body, values, place, errors)


def _scaled_rate(body: JobCreate, multiplier: float) -> float:
    config = body.anneal.config
    name = _METHODS.get(body.method.type) if body.method is not None else None
    method = METHODS[name] if name is not None else method_of(config)
    return learning_rate(multiplier, method, config.get("lora_r", TrainingConfig.model_fields["lora_r"].default))


def _derive_batch(
    body: JobCreate, values: Mapping[str, Any], place: str, errors: list[FieldError]
) -> Iterator[_Derived]:
    """Yield micro-batches that together have the rows of a step on all devices; of prompts, all their completions."""
    completions = 1
    if _reinforcement_options(body) is not None:
        completions = _completions(body.anneal.config)
    if (multiplier := values.get("compute_multiplier")) is not None:
        completions = completions_per_prompt(multiplier)
        yield _Derived("rlhf.num_generations", completions, f"{place}.compute_multiplier")
    rows, parameter = values.get("batch_size"), f"{place}.batch_size"
    if rows is None:
        if multiplier is None:
            return
        # The default has so many completions that other numbers of a prompt may not divide it.
        rows_of_device, parameter = _DEFAULT_PROMPTS, f"{place}.compute_multiplier"
    else:
        devices = body.anneal.resources.devices
        shares = 0 if devices == "all" else max(devices // body.anneal.resources.sequence_parallel, 1)
        if not shares or rows % shares:
            message = f"is {rows} rows on all devices, and must be a multiple of the {shares} that share them"
            if not shares:
                message = (
                    "is of all devices, whose number `all` leaves open; set a number in `anneal.resources.devices`"
                )
            errors.append(FieldError(field=parameter, code="does_not_divide", message=message))
            return
        rows_of_device = rows // shares
    for field, value in micro_batches(rows_of_device * completions).items():
        yield _Derived(field, value, parameter)


def _completions(config: Mapping[str, Any]) -> int:
    """Return the number of completions of a prompt in a configuration, whose errors are reported elsewhere."""
    options = config.get("rlhf")
    number = options.get("num_generations") if isinstance(options, Mapping) else None
    return number if isinstance(number, int) and 0 < number <= MOST_COMPLETIONS else DEFAULT_COMPLETIONS


def _contradictions(config: Mapping[str, Any], derived: list[_Derived]) -> Iterator[FieldError]:
    """Yield errors of fields of the configuration that parameters of the job determine too."""
    named = named_fields(config)
    for field, _, parameter in derived:
        if field in named:
            message = f"is determined by `{parameter}` of the job too; leave one of them out"
            yield FieldError(field=f"anneal.config.{field}", code="conflict", message=message)


def _merge_fields(body: JobCreate, derived: list[_Derived]) -> dict[str, Any]:
    config = dict(body.anneal.config)
    if body.validation_file is not None:
        config.setdefault("eval_steps", "epoch")  # evaluation data without an interval is an error
    for field, value, _ in derived:
        group, _, member = field.partition(".")
        if not member:
            config[field] = value
        elif isinstance(config.setdefault(group, {}), Mapping):  # another value is refused with the other errors
            config[group] = {**config[group], member: value}
    return config


def _about_job(error: ApiError, derived: list[_Derived]) -> ApiError:
    """Return an error of the request for a run by the parameters of the job."""
    if error.status != 422 or not error.errors:
        return error
    parameters = _RENAMED | {f"config.{field}": parameter for field, _, parameter in derived}
    errors = []
    for item in error.errors:
        # A grader becomes the rewards as a whole.
        field = _REWARDS if item.field.startswith(f"{_REWARDS}.") else item.field
        errors.append(item.model_copy(update={"field": parameters.get(field, f"anneal.{item.field}")}))
    return invalid(errors, code=error.code)


async def _find_dataset(session: AsyncSession, name: str, file_id: str, errors: list[FieldError]) -> str:
    """Return the id of the dataset of a file; add an error if there is none."""
    id = to_native_id(file_id, "ds")
    if id is None or await session.get(Dataset, id) is None:
        message = f"there is no file {file_id[:60]!r}; upload it with POST /openai/v1/files"
        errors.append(FieldError(field=name, code="file_not_found", message=message))
        return ""
    return id
