"""Wire models of requests about runs."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from anneal.contracts.errors import FieldError
from anneal.contracts.field_types import EvaluationSetName, ModelName
from anneal.contracts.human_numbers import COUNT, SECONDS
from anneal.contracts.methods import METHODS, OPTION_GROUPS
from anneal.contracts.prompts import PredictOptions
from anneal.contracts.schemas.runs.common import CHECKPOINT_ID, CONFIG, DATASET_ID, RUN_ID, Body, Config, Label
from anneal.contracts.schemas.runs.placement import ResourceChanges, ResourceRequest
from anneal.contracts.schemas.short_repr import ShortRepr
from anneal.contracts.stop import StopMode
from anneal.contracts.training_config.fields import REVISION, Attention, ChatTemplate, DType, Steps

MOST_TAGS = 50


MOST_EXTRA_EVAL_DATASETS = 16


def limit_size(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration unchanged, if it is not too long."""
    size = len(json.dumps(config, ensure_ascii=False))
    if size > _MOST_CONFIG_CHARACTERS:
        message = "has {size} characters as JSON, and may have {most}: shorten its patterns, schemas and options"
        raise PydanticCustomError(
            "config_too_large", message, {"size": f"{size:,}", "most": f"{_MOST_CONFIG_CHARACTERS:,}"}
        )
    return config


_MOST_CONFIG_CHARACTERS = 64 * 1024
"""Length of a configuration as JSON; a page of a list has two hundred of them."""


class RunOptions(Body):
    """Fields of a request for a run that do not depend on how it names its data."""

    experiment_id: str | None = Field(
        default=None, max_length=100, description="ID of the experiment; null: the experiment `default`."
    )
    backend: str = Field(default="celery", max_length=100, description="Training backend; GET /v1/backends lists them.")
    config: Annotated[Config, AfterValidator(limit_size)] = Field(
        description="Training configuration; at most 65,536 characters of JSON."
    )
    priority: int = Field(default=0, ge=-1000, le=1000, description="Runs with higher priority start first.")
    max_restarts: int = Field(
        default=3, ge=0, le=100, description="Maximum restarts after losses, counted since the last new checkpoint."
    )
    resources: ResourceRequest = Field(default_factory=ResourceRequest, description="Device that the run needs.")
    tags: list[Label] = Field(default_factory=list, max_length=MOST_TAGS)


class RunCreate(RunOptions):
    """Request to create a run."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "name": "docstrings", "dataset_id": DATASET_ID, "backend": "celery", "config": CONFIG,
                "tags": ["demo"],
            }
        }
    )  # fmt: skip

    name: Label | None = Field(default=None, description="Name of the run; null: method and base model.")
    dataset_id: str = Field(max_length=100, description="ID of the dataset to train on.")
    eval_dataset_id: str | None = Field(
        default=None, max_length=100, description="ID of the dataset to evaluate on, every `eval_steps`."
    )
    extra_eval_datasets: dict[EvaluationSetName, Annotated[str, StringConstraints(max_length=100)]] = Field(
        default_factory=dict,
        max_length=MOST_EXTRA_EVAL_DATASETS,
        description="IDs of further datasets to evaluate on, by a name of `a-z`, `0-9` and `_`: each evaluation also "
        "reports `eval_<name>_loss` and the other metrics of each. `eval_dataset_id` or `eval_split` must be set too, "
        "and alone decides about the best checkpoint and early stopping.",
    )


class InferenceCreate(Body):
    """Request for a run that uses a model without training it."""

    model: str = Field(
        min_length=1,
        max_length=300,
        description="Model to use: `run_…` for the output of a run, `ckpt_…` for a checkpoint, otherwise a base "
        "model as in `config.base_model` of a run.",
    )
    dataset_id: str | None = Field(default=None, max_length=100, description="ID of the dataset to use it on.")
    experiment_id: str | None = Field(
        default=None,
        max_length=100,
        description="ID of the experiment; null: that of the run, for a base model the experiment `default`.",
    )
    name: Label | None = Field(default=None, description="Name of the new run; null: it names the model.")
    resources: ResourceRequest = Field(default_factory=ResourceRequest, description="Device that the new run needs.")
    priority: int = Field(default=0, ge=-1000, le=1000, description="Runs with higher priority start first.")
    tags: list[Label] = Field(default_factory=list, max_length=MOST_TAGS)


class EvaluationCreate(InferenceCreate):
    """Request to evaluate a model."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"model": RUN_ID, "dataset_id": DATASET_ID, "config": {"max_eval_rows": 500}, "tags": ["demo"]}
        }
    )

    dataset_id: str = Field(max_length=100, description="ID of the dataset to evaluate on.")
    config: Annotated[dict[str, Any], AfterValidator(limit_size)] = Field(
        default_factory=dict,
        description="Fields of the training configuration. For a run or checkpoint only `max_eval_rows`, `seed`, "
        "`loss_on`, `extra.eval_batch_size`, `extra.metrics` and the options of the loss ("
        + ", ".join(f"`{name}`" for name in OPTION_GROUPS)
        + "): the others are those of the run. For a base model also `method`. The dataset determines the loss: that "
        "of the run if its method trains on such data, otherwise that of the method that does.",
    )


class PredictionConfig(PredictOptions):
    """Configuration of a prediction: its options, and fields of the training configuration about the model."""

    seed: int = Field(
        default=42, ge=0, le=2**32 - 1, description="Random seed of sampled answers, together with the row's number."
    )
    chat_template: ChatTemplate | None = Field(
        default=None,
        description="Chat template: Jinja text, or the name of an installed plugin; null: that of the model.",
    )
    dtype: DType | None = Field(
        default=None, description="Data type of the computation; null: as in training, for a base model of the device."
    )
    attn_implementation: Attention | None = Field(
        default=None, description="Attention implementation; null: as in training, for a base model the best one."
    )
    revision: str | None = Field(
        default=None, max_length=200, pattern=REVISION, description="Branch, tag or commit of a base model of the hub."
    )
    tokenizer: ModelName | None = Field(
        default=None, description="Model whose tokenizer is used with a base model; null: its own."
    )


MODEL_FIELDS = frozenset(PredictionConfig.model_fields.keys() - PredictOptions.model_fields.keys())
"""Fields of the configuration of a prediction that are those of the same names in a training configuration."""


class PredictionCreate(InferenceCreate):
    """Request to answer the rows of a dataset."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "model": RUN_ID, "dataset_id": DATASET_ID, "config": {"max_new_tokens": 64, "stop": ["\n\n"]},
                "tags": ["demo"],
            }
        }
    )  # fmt: skip

    dataset_id: str = Field(
        max_length=100,
        description="ID of the dataset: `chat` (an answer at the end of a chat is its reference), `prompt_completion` "
        "or `prompt` (with its `answer`).",
    )
    config: PredictionConfig = Field(default_factory=PredictionConfig, description="How the model answers.")


_OF_PAIRS = ", ".join(f"`{method.name}`" for method in METHODS.values() if method.has_pairs)


class DatasetSize(Body):
    """Size of a dataset that is not uploaded yet."""

    rows: Annotated[int, Field(ge=1, le=10**12), COUNT]
    mean_tokens: float | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description=f"Mean number of tokens of a row (of {_OF_PAIRS}: of a prompt with either answer); null: "
        "`max_seq_length`.",
    )


class RunToEstimate(RunCreate):
    """Request to estimate a run."""

    dataset_id: str | None = Field(  # type: ignore[assignment]
        default=None, max_length=100, description="ID of the dataset; null: `dataset_size` says how large it is."
    )
    dataset_size: DatasetSize | None = Field(default=None, description="Instead of `dataset_id`, without an upload.")
    device: str | None = Field(
        default=None,
        max_length=100,
        description="GPU to estimate for, such as `H100`, `A100 80GB` or `RTX 4090`, also if no worker has one; null: "
        "the devices of online workers that `resources` allows.",
    )
    probe: bool = Field(default=False, description="Also measure two steps on its longest rows, on a worker.")

    @property
    def uploaded_dataset(self) -> str:
        """ID of the dataset of a request that has one, as each with `probe`."""
        if self.dataset_id is None:
            raise ValueError("the request has the size of a dataset, and none that is uploaded")
        return self.dataset_id


class RunEdit(Body):
    """Changes to a run; omitted fields stay unchanged."""

    model_config = ConfigDict(json_schema_extra={"example": {"name": "rank 8", "tags": ["demo"], "pinned": True}})

    name: Label | None = None
    tags: Annotated[list[Label], Field(max_length=MOST_TAGS)] | None = Field(
        default=None, description="Replaces all tags."
    )
    pinned: bool | None = Field(default=None, description="A pinned run is never deleted, not even by retention.")
    priority: int | None = Field(
        default=None,
        ge=-1000,
        le=1000,
        description="Runs with higher priority start first. A change applies whenever the run waits; 409 if it has "
        "ended, or answers questions.",
    )


GraceSeconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False), SECONDS]


class RunStop(Body):
    """Request to stop a run."""

    model_config = ConfigDict(json_schema_extra={"example": {"mode": "checkpoint"}})

    mode: StopMode | None = Field(
        default=None,
        description="`checkpoint` (default): save and end. `epoch_end`: train to the end of the epoch, save and end; a "
        "later stop with another mode ends it at once. `best`: end at once if an evaluation has found a best "
        "checkpoint, from which the run can be resumed; otherwise like `checkpoint`. `discard`: end without saving.",
    )
    save_checkpoint: bool | None = Field(default=None, description="False: mode `discard`.")
    deadline_seconds: GraceSeconds | None = Field(
        default=None,
        description="Seconds that the trainer has to finish its step and to save before it is killed; null: the grace "
        "period of the service. Not with `epoch_end`. A later request may set another one.",
    )

    @model_validator(mode="after")
    def _check_agreement(self) -> "RunStop":
        if self.mode == "epoch_end" and self.deadline_seconds is not None:
            raise ValueError("`deadline_seconds` has no effect with the mode `epoch_end`; leave it out")
        if None not in (self.mode, self.save_checkpoint) and self.save_checkpoint is (self.mode == "discard"):
            raise ValueError(f"`save_checkpoint` contradicts the mode `{self.mode}`; leave `save_checkpoint` out")
        return self

    @property
    def how(self) -> StopMode:
        """Stop mode that the request asks for."""
        return self.mode or ("discard" if self.save_checkpoint is False else "checkpoint")


class RunResume(Body):
    """Request to resume a run."""

    model_config = ConfigDict(json_schema_extra={"example": {"config": {"epochs": 2}}})

    checkpoint_id: str | None = Field(
        default=None,
        max_length=100,
        description="Checkpoint to resume from; null: the newest good one.",
        examples=[CHECKPOINT_ID],
    )
    checkpoint_path: str | None = Field(
        default=None,
        max_length=4096,
        description="Checkpoint to resume from, by its folder as in `checkpoint_path` of a run; instead of its id.",
    )
    from_: Literal["start"] | None = Field(
        default=None, alias="from", description="`start`: train from the first step, without a checkpoint."
    )
    config: Annotated[dict[str, Any], AfterValidator(limit_size)] = Field(
        default_factory=dict, description="Fields to change; the others stay unchanged."
    )
    stop_after_steps: Steps | None = Field(
        default=None,
        description="Save and stop after so many further steps; sets `stop_at_step`, counted from the checkpoint.",
    )
    resources: ResourceChanges | None = Field(
        default=None,
        description="Changes of the resources that the resumed run asked for; what they leave out stays, and null "
        "resets a field to its default.",
    )

    @model_validator(mode="after")
    def _check_agreement(self) -> "RunResume":
        if self.stop_after_steps is not None and self.config.get("stop_at_step") is not None:
            raise ValueError("`stop_after_steps` and `config.stop_at_step` say the same; leave one of them out")
        return self


class RunCheck(ShortRepr):
    """Result of validating a run: errors, warnings and the effective configuration."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "valid": True,
                "errors": [],
                "warnings": [
                    {
                        "field": "config.optim",
                        "code": "replaced",
                        "message": "`optim` will be `adamw_8bit` instead of `paged_adamw_8bit`: "
                        "Paging optimizer state needs a GPU.",
                    }
                ],
                "effective_config": {**CONFIG, "load_in_4bit": True, "optim": "adamw_8bit"},
            }
        }
    )

    valid: bool
    errors: list[FieldError]
    warnings: list[FieldError]
    effective_config: Config | None = Field(description="Effective configuration; null if there are errors.")
