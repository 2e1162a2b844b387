"""Messages between a supervisor and its training process.

A training process sends records, each a JSON object in one datagram, with `ts`, the Unix time in seconds at which it
was sent; a supervisor sends control messages. Records are TypedDicts: the sender is checked by mypy and builds a plain
dictionary. The supervisor treats them as untrusted input and validates them when it reads them, except the frequent
ones that it only stores: metrics, evaluations, progress and samples and skipped rows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal, NotRequired

from annotated_types import Ge
from typing_extensions import TypedDict  # pydantic reads no TypedDict of `typing` before Python 3.12

from anneal.contracts.stop import StopRequest

MAX_RECORD_BYTES = 128 * 1024
"""Size limit of a record, which is one datagram and must fit into the socket's send buffer, and of its event."""

# Control messages


class ActionParameters(TypedDict, total=False):
    """Parameters of a live action; `anneal.contracts.schemas.actions` says which action has which."""

    pin: bool
    prompts: list[str]
    max_new_tokens: int
    temperature: float
    learning_rate: float
    max_steps: int | None
    epochs: float | None


@dataclass(frozen=True)
class ActionRequest:
    """Live action to be done between two optimizer steps."""

    id: str
    action: str
    parameters: ActionParameters
    step: int | None = None
    """Step after which an earlier attempt did the action, and after which it is repeated; None for a new request."""


@dataclass(frozen=True)
class QuestionPart:
    """Part of a question to a serving process: a whole one may be longer than a message."""

    text: str
    """Characters of a `QuestionEnvelope` as JSON, after those of the part before."""
    is_last: bool


class QuestionEnvelope(TypedDict):
    """Question to a serving process."""

    question: Mapping[str, object]
    """A `anneal.contracts.attempt.answers.Question`."""
    adapter_folder: str | None
    """Folder of the adapter that the question names; None without one."""


@dataclass(frozen=True)
class ControlMessage:
    """Message to a training process; fields that are not set mean nothing."""

    renew_until: float | None = None
    """Seconds since boot at which the process ends unless another renewal arrives."""
    checkpoint: bool = False
    """True: save a checkpoint and continue."""
    stop: StopRequest | None = None
    action: ActionRequest | None = None
    question: QuestionPart | None = None
    cancelled_question: str | None = None
    """Id of a question whose answer is not needed any more."""
    secrets: dict[str, str] | None = field(default=None, repr=False)
    """Environment variables, only in the first message to a process."""

    def to_json(self) -> bytes:
        """Encode the message; inverse of `from_json`."""
        return json.dumps({name: value for name, value in asdict(self).items() if value}, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "ControlMessage":
        """Decode a message of the supervisor, which is trusted."""
        fields = json.loads(data)
        if "stop" in fields:
            fields["stop"] = StopRequest(**fields["stop"])
        if "action" in fields:
            fields["action"] = ActionRequest(**fields["action"])
        if "question" in fields:
            fields["question"] = QuestionPart(**fields["question"])
        return cls(**fields)


# Records


class MessageRecord(TypedDict):
    """Message to the user, shown among the log lines."""

    type: Literal["message"]
    line: str
    level: NotRequired[str]


class ConfigRecord(TypedDict):
    """Configuration in effect, the defaults that it replaced, and run info."""

    type: Literal["config"]
    effective: dict[str, object]
    replaced: Sequence[Mapping[str, object]]
    """Replaced values: field, requested, used, reason."""
    facts: Mapping[str, object]


class StepMetrics(TypedDict):
    """Measurements of one optimizer step that every method has."""

    step: int
    epoch: float | None
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    gpu_memory_mb: float | None
    samples_per_second: float | None


class MetricRecord(StepMetrics):
    """Measurements of one optimizer step."""

    type: Literal["metric"]
    total_steps: int | None
    extra: Mapping[str, object]
    """Further measurements by name."""


class EvalRecord(TypedDict):
    """Metrics of an evaluation after `step`."""

    type: Literal["eval"]
    step: int
    epoch: float | None
    metrics: Mapping[str, object]


Phase = Literal[
    "loading", "tokenizing", "training", "evaluating", "predicting", "serving", "saving", "exporting", "pushing"
]  # fmt: skip


class PhaseRecord(TypedDict):
    """Start of a phase."""

    type: Literal["phase"]
    name: Phase
    start_step: NotRequired[int | None]
    total_steps: NotRequired[int | None]


class ProgressRecord(TypedDict):
    """Progress of a phase, in units of that phase."""

    type: Literal["progress"]
    phase: str
    done: float
    total: float | None
    message: str | None


class SampleOrigin(TypedDict):
    """Reason for a sample: the action that requested it, or the rewards of a round of reinforcement learning."""

    action_id: NotRequired[str]
    rewards: NotRequired[Mapping[str, float | None]]
    advantage: NotRequired[float]


class SampleRecord(SampleOrigin):
    """Text that the model generated."""

    type: Literal["sample"]
    step: int
    prompt: str
    completion: str


class SkippedRowsRecord(TypedDict):
    """Rows of the data that are left out, cut, or teach nothing."""

    type: Literal["skipped_rows"]
    data: str
    """training or evaluation."""
    count: int
    total: int
    reason: str
    examples: list[int]


class DistributionRecord(TypedDict):
    """Histograms of weights and gradients before a step."""

    type: Literal["distribution"]
    step: int
    edges: Sequence[float | None]
    groups: Mapping[str, object]


class OutputWeights(TypedDict):
    """Weights in an output, and the reason for the choice."""

    weights: Literal["best", "last", "checkpoint"]
    step: int
    reason: str


class ExportRecord(OutputWeights):
    """Output that was written."""

    type: Literal["export"]
    output: Literal["adapter", "merged"]


class AnsweredAction(TypedDict):
    """Action that a checkpoint answers."""

    id: str
    action: str


class AnsweredSaves(TypedDict, total=False):
    """Actions that a checkpoint answers, and whether one of them keeps it."""

    actions: list[AnsweredAction]
    pinned: bool


class CheckpointRecord(AnsweredSaves):
    """Checkpoint that is on disk: sent only after its parent folder was fsynced."""

    type: Literal["checkpoint"]
    name: str
    step: int
    epoch: NotRequired[float | None]
    kind: str
    """periodic, stop, best or final."""
    bytes: Annotated[int, Ge(0)]
    manifest_sha256: str
    seconds: NotRequired[float | None]
    """Time that it took to save."""
    metrics: NotRequired[Mapping[str, object] | None]
    """Loss and best loss, to which a rollback returns, and the metric that ranks checkpoints."""


ActionStatus = Literal["done", "refused", "failed"]


class ActionDetails(TypedDict, total=False):
    """Fields that the result of an action may contain."""

    result: Mapping[str, object] | None
    message: str | None
    total_steps: int | None


class ActionRecord(ActionDetails):
    """Result of an action, which took effect after `step`."""

    type: Literal["action"]
    id: str
    action: str
    step: int
    epoch: NotRequired[float | None]
    status: ActionStatus


class AnomalyDetails(TypedDict):
    """Details of the errors `non_finite_loss` and `loss_spike`."""

    summary: str
    """Description of the anomaly, in sentences without advice."""
    in_evaluation: bool
    """True if an evaluation was non-finite, not a step."""
    singled_out: list[int]
    """Rows of the dataset that fail alone, from 0; empty if none does."""


class ErrorInfo(TypedDict):
    """Classified error: a stable code and a sentence that says what to do next."""

    code: str
    message: str
    details: NotRequired[AnomalyDetails]


class RepairProposal(TypedDict):
    """Step that the next attempt may skip, because loss or gradients were anomalous there."""

    kind: Literal["non_finite", "loss_spike"]
    step: int
    rows: list[int]
    """Rows of the dataset that make up the step, from 0."""
    singled_out: list[int]
    """Rows that fail on their own."""


class HubPush(TypedDict):
    """Result of a push to the hub: the commit, or the error."""

    repo: str
    commit: NotRequired[str]
    url: NotRequired[str]
    error: NotRequired[str]


class TrainingResult(TypedDict):
    """Result of an attempt."""

    outcome: Literal["completed", "stopped", "failed"]
    why: NotRequired[str | None]
    """Reason for an end before the last step: stop, drain, time_limit, stop_at_step, early_stopping, epoch_end; or
    `export`, for a run that only exports a checkpoint."""
    step: NotRequired[int | None]
    epoch: NotRequired[float | None]
    error: NotRequired[ErrorInfo | None]
    rank: NotRequired[int | None]
    """Rank on which a failure happened, if another one reports it."""
    output: NotRequired[str | None]
    """Folder of the output below the attempt's own."""
    exported: NotRequired[str | None]
    """Weights in the output and the reason for the choice, as text for users."""
    hub: NotRequired[HubPush | None]
    metrics: NotRequired[Mapping[str, object] | None]
    repair: NotRequired[RepairProposal | None]


class AnswersRecord(TypedDict):
    """Pieces of answers, one step of all questions that a serving process answers at a time."""

    type: Literal["answers"]
    pieces: Sequence[Mapping[str, object]]
    """Each an `anneal.contracts.attempt.answers.AnswerPiece`."""


class ResultRecord(TrainingResult):
    """Last record of an attempt."""

    type: Literal["result"]


TrainerRecord = (
    MessageRecord
    | ConfigRecord
    | MetricRecord
    | EvalRecord
    | PhaseRecord
    | ProgressRecord
    | SampleRecord
    | SkippedRowsRecord
    | DistributionRecord
    | ExportRecord
    | CheckpointRecord
    | ActionRecord
    | AnswersRecord
    | ResultRecord
)
