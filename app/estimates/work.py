"""Operations of a whole run: of training, of a reference that runs beside it, and of the completions that it writes."""

from dataclasses import dataclass

from app.estimates.activations import Activations, Checkpointing, Precision, activations
from app.estimates.architecture import Architecture
from app.estimates.layers import Batch
from app.estimates.plan import Plan, attention_of
from app.runs.config import TrainingConfig, TrainingMethod


@dataclass(frozen=True)
class Work:
    """What there is to do in all steps."""

    tokens: int
    training: float
    """Operations as a worker counts them (`flops_per_token_hardware`): a reference in every step included."""
    writing: float
    """Operations of the completions that `rlhf` has the model write."""
    length: int
    """Tokens that attention sees together, on average."""


def work(
    model: Architecture, config: TrainingConfig, precision: Precision, planned: Plan, checkpointing: Checkpointing
) -> Work | None:
    """Of an effective configuration; None: nobody knows how many tokens there will be.

    Attention grows with the square of a text, so it counts for texts of the mean length: the longest is one of many.
    """
    if planned.tokens is None:
        return None
    shape = Batch(1, max(round(planned.attended), 2))

    def walked(run: TrainingConfig) -> Activations:
        return activations(model, run, precision, shape, checkpointing, attention_of(model, config))

    own = walked(config)
    of_token = (own.operations + own.operations_again) / shape.tokens
    if _passes_reference(config, planned):
        # The base alone multiplies forward as a model does of which every weight trains.
        of_token += walked(config.model_copy(update={"lora_r": None})).forward / shape.tokens
    written = own.forward / shape.tokens if config.method is TrainingMethod.rlhf else 0.0
    return Work(planned.tokens, of_token * planned.tokens, written * planned.tokens, shape.length)


def left_out(config: TrainingConfig, planned: Plan) -> list[str]:
    """What the operations are without, in sentences."""
    found = []
    if config.method is TrainingMethod.dpo and not _passes_reference(config, planned):
        found.append(
            "Log-probabilities of the reference are computed once, before the first step: a forward pass over all "
            "pairs, which neither operations nor seconds count."
        )
    if config.method is TrainingMethod.rlhf and any(one.type == "model" for one in config.rlhf.rewards):
        found.append("Reward models take memory and operations of their own, which are not counted.")
    return found


def _passes_reference(config: TrainingConfig, planned: Plan) -> bool:
    """Whether the base runs forward in every step, beside what trains."""
    if config.method is TrainingMethod.rlhf:
        return config.rlhf.beta > 0
    return config.method is TrainingMethod.dpo and config.lora_r is not None and not planned.repeats
