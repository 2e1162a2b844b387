"""Events of a run: one model per event type, and the registry of all of them.

The server's list of types, the client's parser, the worker's record handler and the OpenAPI document derive from
`EVENTS`. Events are stored and sent as the writer built them: nothing validates the path of metrics field by field.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict

from anneal.contracts.device_telemetry import DeviceTelemetry
from anneal.contracts.field_types import JsonObject, Timestamp
from anneal.contracts.run_status import TrainingStatus
from anneal.contracts.schemas.runs.common import RUN_ID
from anneal.contracts.schemas.runs.reads import TrainingMetrics
from anneal.contracts.schemas.short_repr import ShortRepr

CHECKPOINT_ID = "ckpt_01k3x9m6q2v8s4t0w7y5z1a3b8"


def _event_example(type: str, **payload: Any) -> JsonDict:
    event: JsonDict = {"type": type, "run_id": RUN_ID, "seq": 41, "ts": "2026-01-02T03:04:05.678Z"}
    return {"example": {**event, **payload}}


class Event(ShortRepr):
    """Fields of every event. Events of unknown types are parsed as `Event`, with their data as extra fields."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    is_trainer_record: ClassVar[bool] = False
    """True if the trainer's record of this type is stored as the event, without any other effect on the run."""

    type: str = Field(description="Type of the event; the `event` field of server-sent events.")
    run_id: str = Field(description="ID of the run.")
    seq: int = Field(
        description="Position in the run's log, from 1 without gaps; the `id` and cursor of server-sent events."
    )
    cursor: int | None = Field(
        default=None,
        exclude_if=lambda cursor: cursor is None,
        description="Position in the stream of all runs, `GET /v1/events`; absent in the stream of one run.",
    )
    ts: Timestamp | None = Field(
        default=None, description="Time of the event in UTC, in milliseconds; null for placeholders of pruned events."
    )


class TrainerEvent(Event):
    """Fields of every event that the trainer reports."""

    non_finite: list[str] = Field(
        default_factory=list, description="Dotted names of the values that were NaN or infinite and are null here."
    )
    truncated: bool = Field(default=False, description="True if long values were cut so that the record could be sent.")


class StatusEvent(Event):
    """Status change of the run."""

    model_config = ConfigDict(
        json_schema_extra=_event_example(
            "status", attempt=1, reason="training", to="running", **{"from": "initializing"}
        )
    )

    type: Literal["status"]
    from_: TrainingStatus | None = Field(
        default=None, alias="from", description="Previous status; null for the run's first event."
    )
    to: TrainingStatus = Field(description="New status.")
    reason: str | None = Field(default=None, description="Cause of the change; the error code of a failure.")
    attempt: int = Field(default=0, description="Number of attempts so far; 0 before the first one.")


class PendingEvent(Event):
    """Change of the reason for which a pending run cannot start."""

    model_config = ConfigDict(
        json_schema_extra=_event_example(
            "pending", code="no_worker",
            message="No worker of backend `celery` is online. Start one with `anneal worker` on a machine that shares "
            "database, Redis and storage, or restart `anneal up`.",
        )
    )  # fmt: skip

    type: Literal["pending"]
    code: str = Field(
        description="`no_worker`, `no_device_of_kind`, `no_worker_with_labels`, `no_gguf_converter`, "
        "`too_few_hosts`, `no_device_fits`, `devices_paused`, `reserved`, `quota`, `budget`, `queue_paused`, or of "
        "backend `ray` one that begins with `ray_`; `queued`: a worker can take the run again."
    )
    message: str = Field(description="The reason in a sentence, with what to do.")


class LogEvent(Event):
    """Line printed by the training process, or a message of the service."""

    model_config = ConfigDict(
        json_schema_extra=_event_example("log", line="step 10 loss 2.31", stream="stdout", level="info")
    )

    type: Literal["log"]
    line: str = Field(description="Text without line end; cut if it is very long.")
    stream: str = Field(
        default="stdout", description="`stdout` or `stderr` of the training process; `anneal`: message of the service."
    )
    level: str = Field(default="info", description="`info`, `warning` or `error`.")
    left_out: int | None = Field(
        default=None,
        exclude_if=lambda left_out: left_out is None,
        description="Lines that the stream leaves out here, because there were too many; the complete log has them. "
        "Absent for every other line.",
    )


class MetricEvent(TrainerEvent, TrainingMetrics):
    """Training metrics at one step."""

    model_config = ConfigDict(
        json_schema_extra=_event_example(
            "metric", step=10, epoch=0.5, loss=2.31, learning_rate=0.0002, grad_norm=0.9, gpu_memory_mb=15210.4,
            samples_per_second=12.5, extra={"tokens_per_second": 7031.0},
        )
    )  # fmt: skip

    type: Literal["metric"]


class EvalEvent(TrainerEvent):
    """Result of an evaluation."""

    model_config = ConfigDict(
        json_schema_extra=_event_example("eval", step=20, epoch=1.0, metrics={"eval_loss": 2.4, "eval_rows": 64})
    )
    is_trainer_record = True

    type: Literal["eval"]
    step: int = Field(description="Optimizer steps before the evaluation.")
    epoch: float | None = Field(default=None, description="Passes over the data before the evaluation.")
    metrics: JsonObject = Field(
        default_factory=dict,
        description="Metrics by name, such as `eval_loss` in nats per token; those of an extra "
        "evaluation set begin with `eval_<name>_`.",
    )


class CheckpointEvent(Event):
    """Checkpoint that a run can resume from."""

    model_config = ConfigDict(
        json_schema_extra=_event_example(
            "checkpoint", checkpoint_id=CHECKPOINT_ID, step=40, kind="periodic", bytes=1048576
        )
    )

    type: Literal["checkpoint"]
    checkpoint_id: str = Field(description="ID of the checkpoint.")
    step: int = Field(description="Optimizer steps that it contains.")
    kind: str = Field(
        description="`periodic` (`save_steps` or an action), `stop`, `best` (an evaluation) or `final` (the last step)."
    )
    bytes: int | None = Field(default=None, description="Size of its files in bytes.")


class ConfigEvent(TrainerEvent):
    """Effective configuration of the trainer, the defaults it replaced, and facts known before the first step."""

    model_config = ConfigDict(
        json_schema_extra=_event_example(
            "config",
            effective={"base_model": "my-model", "method": "lora", "optim": "adamw_torch"},
            replaced=[
                {"field": "optim", "requested": "paged_adamw_8bit", "used": "adamw_torch", "reason": "no GPU"},
            ],
            facts={"parameters_total": 135_000_000, "parameters_trainable": 460_800, "total_steps": 200},
        )
    )

    type: Literal["config"]
    effective: JsonObject = Field(default_factory=dict, description="Configuration fields with the values in use.")
    replaced: list[JsonObject] = Field(
        default_factory=list,
        description="Defaults that the device cannot honor: `field`, `requested`, `used` and `reason`.",
    )
    facts: JsonObject = Field(
        default_factory=dict,
        description="Parameter counts, device, library versions, `attention`, `kernels`, `step_plan`, `total_steps`, "
        "FLOPs per token and further facts.",
    )

    @property
    def total_steps(self) -> int | None:
        """Planned number of optimizer steps, if known."""
        total = self.facts.get("total_steps")
        return total if isinstance(total, int) else None


class ProgressEvent(TrainerEvent):
    """Progress of a phase other than the steps of training."""

    model_config = ConfigDict(
        json_schema_extra=_event_example("progress", phase="tokenizing", done=12000, total=52000, message=None)
    )
    is_trainer_record = True

    type: Literal["progress"]
    phase: str = Field(
        description="Phase, such as `loading`, `tokenizing`, `training`, `evaluating`, `predicting`, `serving`, "
        "`saving`, `exporting`, `pushing`, `fetching` or `copying`."
    )
    done: float | None = Field(
        default=None, description="Completed part in the phase's unit: rows, batches, texts, or bytes for transfers."
    )
    total: float | None = Field(default=None, description="Whole in the same unit; null if it is not known.")
    message: str | None = Field(default=None, description="Description for users.")


class SampleEvent(TrainerEvent):
    """Completion generated by the model."""

    model_config = ConfigDict(
        json_schema_extra=_event_example(
            "sample", step=40, prompt="2 + 2 =", completion=" 4", rewards={"exact_match": 1.0}, advantage=0.7
        )
    )
    is_trainer_record = True

    type: Literal["sample"]
    step: int = Field(description="Optimizer steps before the text was generated.")
    prompt: str = Field(description="Prompt as text.")
    completion: str = Field(description="Generated text.")
    action_id: str | None = Field(
        default=None, description="Action that requested it; null for samples of `rlhf` and of `sample_prompts`."
    )
    rewards: dict[str, float | None] | None = Field(
        default=None, description="Value of each reward function by name; null outside `rlhf`."
    )
    advantage: float | None = Field(
        default=None, description="Advantage of the completion in its group; null outside `rlhf`."
    )


class SkippedRowsEvent(TrainerEvent):
    """Rows of the data that are left out, cut, or teach nothing; reported by every attempt before the first step."""

    model_config = ConfigDict(
        json_schema_extra=_event_example(
            "skipped_rows", data="training", count=2, total=1000, examples=[7, 19],
            reason="2 of 1000 rows were left out: no token to learn remains after truncation.",
        )
    )  # fmt: skip
    is_trainer_record = True

    type: Literal["skipped_rows"]
    data: str = Field(description="`training`, `evaluation`, or `evaluation.<name>` for an extra evaluation set.")
    count: int = Field(description="Number of these rows.")
    total: int = Field(description="Number of rows that were considered.")
    reason: str = Field(description="Sentence for users; also a line of the log.")
    examples: list[int] = Field(default_factory=list, description="First ten of the rows, counted from 0.")


class DistributionEvent(TrainerEvent):
    """Histograms of weights and gradients just before an optimizer step, if `extra.distributions_steps` is set."""

    model_config = ConfigDict(
        json_schema_extra=_event_example(
            "distribution", step=40, edges=[None, -1.0, 0.0, 1.0],
            groups={"layers.*.q_proj.lora_A": {"weights": {
                "count": 4, "mean": 0.1, "std": 0.2, "min": -0.1, "max": 0.4, "bins": [0, 1, 3, 0]}}},
        )
    )  # fmt: skip
    is_trainer_record = True

    type: Literal["distribution"]
    step: int = Field(description="Optimizer step.")
    edges: list[float | None] = Field(
        default_factory=list, description="Lower edges of the bins; null for minus infinity."
    )
    groups: JsonObject = Field(
        default_factory=dict,
        description="`weights` and `gradients` of each kind of parameter, each with `count`, `mean`, `std`, `min`, "
        "`max` and `bins`.",
    )


class ExportEvent(TrainerEvent):
    """Output of the run: the weights that it contains, and why these were chosen."""

    model_config = ConfigDict(
        json_schema_extra=_event_example(
            "export", weights="best", step=40, reason="with the best `eval_loss`, 2.4", output="adapter"
        )
    )
    is_trainer_record = True

    type: Literal["export"]
    weights: str = Field(
        description="`best` (best evaluation), `last` (end of training) or `checkpoint` (a requested one)."
    )
    step: int = Field(description="Optimizer steps that the weights were trained for.")
    reason: str = Field(description="Reason of the choice.")
    output: str = Field(default="adapter", description="`adapter` or `merged`, as in the configuration.")


class ActionEvent(Event):
    """Result of an action."""

    model_config = ConfigDict(
        json_schema_extra=_event_example(
            "action", action_id="act_01k3x9m6q2v8s4t0w7y5z1a3d0", action="set_learning_rate", step=41, status="done",
            result={"before": 0.0002, "learning_rate": 0.0001}, message=None,
        )
    )  # fmt: skip

    type: Literal["action"]
    action_id: str = Field(description="ID of the action.")
    action: str = Field(description="`checkpoint`, `evaluate`, `sample`, `set_learning_rate` or `extend`.")
    step: int = Field(description="Optimizer step after which the action took effect.")
    status: str = Field(description="`done`, `refused` (not attempted) or `failed` (attempted without success).")
    result: JsonObject | None = Field(default=None, description="Result; its fields depend on the action.")
    message: str | None = Field(default=None, description="Reason of a refusal or failure.")


class RepairEvent(Event):
    """Automatic retry of a failed run with a change: smaller micro-batches, or skipping the step that failed."""

    model_config = ConfigDict(
        json_schema_extra=_event_example(
            "repair", kind="non_finite", step=41, rows=[7, 19], singled_out=[19], changes={}, instead_of={},
            reason="loss or gradients were non-finite at step 41: back to the checkpoint of step 40, skipping that "
            "step", back_to=CHECKPOINT_ID, corrupt_checkpoint=None,
        )
    )  # fmt: skip

    type: Literal["repair"]
    kind: str = Field(description="`out_of_memory`, `non_finite` or `loss_spike`.")
    reason: str = Field(description="Sentence for users.")
    step: int | None = Field(default=None, description="Optimizer step that is skipped from now on.")
    rows: list[int] = Field(default_factory=list, description="Rows of the dataset in that step, counted from 0.")
    singled_out: list[int] = Field(
        default_factory=list, description="Those of the rows that fail alone: no later step contains one."
    )
    changes: JsonObject = Field(
        default_factory=dict, description="Changed configuration fields (`extra.…` within that group) and their values."
    )
    instead_of: JsonObject = Field(default_factory=dict, description="Previous values of the changed fields.")
    back_to: str | None = Field(
        default=None, description="Checkpoint to which the run goes back; null: its newest one, or the start."
    )
    corrupt_checkpoint: str | None = Field(
        default=None, description="Checkpoint from which no run resumes any more, because anomalies followed it twice."
    )


class DeviceEvent(Event, DeviceTelemetry):
    """Telemetry of the GPU on which the run trains, every ten seconds."""

    model_config = ConfigDict(
        json_schema_extra=_event_example(
            "device", index=0, uid="GPU-6f1c0a52", seconds=10.0, utilization_percent=97.4, memory_mb=61_204,
            temperature_celsius=63, power_watts=512.3, sm_clock_mhz=1845.0, ecc_uncorrected=0,
        )
    )  # fmt: skip

    type: Literal["device"]
    index: int = Field(description="Index of the device on its worker.")
    uid: str = Field(description="Hardware id, such as a GPU UUID.")


class ErrorEvent(Event):
    """Cause of the run's failure."""

    model_config = ConfigDict(
        json_schema_extra=_event_example(
            "error", code="bad_data", message="Row 3 has no messages; correct the dataset."
        )
    )

    type: Literal["error"]
    code: str = Field(description="Stable error code, in snake_case.")
    message: str = Field(description="Cause, and a possible remedy.")


class EndEvent(Event):
    """Last event of a run."""

    model_config = ConfigDict(json_schema_extra=_event_example("end", status="completed"))

    type: Literal["end"]
    status: TrainingStatus = Field(description="Final status: `completed`, `failed` or `cancelled`.")


class TruncatedEvent(Event):
    """Placeholder for older events that were pruned; it is sent, but not stored.

    In the stream of all runs it has only `cursor`, and stands in the place of the newest event that was pruned.
    """

    model_config = ConfigDict(json_schema_extra=_event_example("truncated", first_seq=42))

    type: Literal["truncated"]
    run_id: str = Field(default="", description="ID of the run; absent in the stream of all runs.")
    first_seq: int | None = Field(
        default=None, description="`seq` of the oldest stored event; absent in the stream of all runs."
    )


class CursorEvent(Event):
    """Position of a reader that chose types, when none of them came for 15 seconds; it is sent, but not stored.

    In the stream of all runs it has only `cursor`, and is also the first event of a reader that starts now.
    """

    model_config = ConfigDict(json_schema_extra=_event_example("cursor"))

    type: Literal["cursor"]


AnyEvent = (
    StatusEvent | PendingEvent | LogEvent | MetricEvent | EvalEvent | CheckpointEvent | ConfigEvent | ProgressEvent
    | SampleEvent | SkippedRowsEvent | DistributionEvent | ExportEvent | ActionEvent | RepairEvent | DeviceEvent
    | ErrorEvent | EndEvent | TruncatedEvent | CursorEvent
)  # fmt: skip
"""Event of a known type; type checkers distinguish the members by `type`."""

EVENTS: Mapping[str, type[Event]] = MappingProxyType(
    {get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(AnyEvent)}
)
"""Model of each event type."""

EVENT_TYPES = tuple(kind for kind, model in EVENTS.items() if model not in (TruncatedEvent, CursorEvent))
"""Types of stored events, of which a reader can choose."""

FEED_TYPES = ("status", "progress", "end")
"""Types of the events in the stream of all runs; a trigger of the table queues them."""

TRAINER_RECORDS = frozenset(kind for kind, model in EVENTS.items() if model.is_trainer_record)
"""Types of which the trainer's record is stored as the event."""
