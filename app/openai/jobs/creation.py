"""Creates fine-tuning jobs: a request in OpenAI's terms becomes one for a run."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.methods import METHODS, TrainingMethod, method_of
from anneal.contracts.schemas.openai.hyperparameters import learning_rate, micro_batches
from anneal.contracts.schemas.openai.jobs import Hyperparameters, JobCreate
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


class _Derived(NamedTuple):
    """Field of the configuration that a parameter of the job determines."""

    field: str
    value: Any
    parameter: str


async def create_job(transaction: RunTransaction, backend: Backend, body: JobCreate) -> Run:
    """Create the first run of a job, or raise 422 with all errors by the parameters of the job."""
    session = transaction.session
    errors = list(_unsupported_options(body))
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
        **dict(body.anneal),
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
    if body.metadata:
        unset = (Run.id == run.id, Run.job_metadata.is_(None))
        await session.execute(update(Run).where(*unset).values(job_metadata=body.metadata))
    return run


def _unsupported_options(body: JobCreate) -> Iterator[FieldError]:
    """Yield errors of methods and of hyperparameters that contradict each other."""
    method = body.method
    if method is None:
        return
    if method.type == "reinforcement":
        message = (
            "`reinforcement` is not supported, because its graders have no counterpart; leave `method` out and set "
            '`anneal.config` to {"method": "rlhf", "rlhf": {"rewards": […]}} to train on rewards'
        )
        yield FieldError(field="method.type", code="not_supported", message=message)
        return
    others = [name for name in ("supervised", "dpo", "reinforcement") if name != method.type]
    for name in others:
        if getattr(method, name) is not None:
            message = f"has options of another type than `method.type`, which is `{method.type}`; leave it out"
            yield FieldError(field=f"method.{name}", code="conflict", message=message)
    own = method_of(body.anneal.config)
    if method.type == "supervised" and "method" in body.anneal.config and not own.is_supervised:
        message = f"is `{own.name}`, which is not of the type `supervised`; leave `method` out of the job"
        yield FieldError(field="anneal.config.method", code="conflict", message=message)


def _hyperparameters(body: JobCreate, errors: list[FieldError]) -> tuple[str, Hyperparameters]:
    """Return the hyperparameters of a job and where they are in it."""
    options = getattr(body.method, body.method.type) if body.method and body.method.type != "reinforcement" else None
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
    if body.method is not None and body.method.type == "dpo":
        yield _Derived("method", TrainingMethod.dpo.value, "method.type")
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
    if (rows := values.get("batch_size")) is not None:
        yield from _derive_batch(body, rows, f"{place}.batch_size", errors)
    if (beta := values.get("beta")) is not None:
        yield _Derived("dpo.beta", beta, f"{place}.beta")


def _scaled_rate(body: JobCreate, multiplier: float) -> float:
    config = body.anneal.config
    is_dpo = body.method is not None and body.method.type == "dpo"
    method = METHODS[TrainingMethod.dpo] if is_dpo else method_of(config)
    return learning_rate(multiplier, method, config.get("lora_r", TrainingConfig.model_fields["lora_r"].default))


def _derive_batch(body: JobCreate, rows: int, parameter: str, errors: list[FieldError]) -> Iterator[_Derived]:
    """Yield micro-batches that together have so many rows on all devices."""
    devices = body.anneal.resources.devices
    shares = 0 if devices == "all" else max(devices // body.anneal.resources.sequence_parallel, 1)
    if not shares or rows % shares:
        message = f"is {rows} rows on all devices, and must be a multiple of the {shares} that share them"
        if not shares:
            message = "is of all devices, whose number `all` leaves open; set a number in `anneal.resources.devices`"
        errors.append(FieldError(field=parameter, code="does_not_divide", message=message))
        return
    for field, value in micro_batches(rows // shares).items():
        yield _Derived(field, value, parameter)


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
    errors = [
        item.model_copy(update={"field": parameters.get(item.field, f"anneal.{item.field}")}) for item in error.errors
    ]
    return invalid(errors, code=error.code)


async def _find_dataset(session: AsyncSession, name: str, file_id: str, errors: list[FieldError]) -> str:
    """Return the id of the dataset of a file; add an error if there is none."""
    id = to_native_id(file_id, "ds")
    if id is None or await session.get(Dataset, id) is None:
        message = f"there is no file {file_id[:60]!r}; upload it with POST /openai/v1/files"
        errors.append(FieldError(field=name, code="file_not_found", message=message))
        return ""
    return id
