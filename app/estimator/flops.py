"""Floating-point operations of a whole run: training, reference model and generation of completions."""

from dataclasses import dataclass

from app.contracts.methods import METHODS
from app.contracts.training_config.fields import TrainingConfig
from app.estimator.activations import Activations, Checkpointing, Precision, activations
from app.estimator.architecture import Architecture
from app.estimator.forward_pass import Batch
from app.estimator.steps import Plan, attention_of


@dataclass(frozen=True)
class RunFlops:
    """Tokens and operations of all steps."""

    tokens: int
    training: float
    """Operations as a worker counts them (`flops_per_token_hardware`), including the reference model; plus the passes
    of a KL term, which a worker does not count."""
    writing: float
    """Operations for generating completions."""
    length: int
    """Mean number of tokens that attend to each other."""


def work(
    model: Architecture, config: TrainingConfig, precision: Precision, planned: Plan, checkpointing: Checkpointing
) -> RunFlops | None:
    """Return the operations of a run under an effective configuration; None if the number of tokens is not known.

    Attention grows with the square of the length, so it is computed for the mean length, not the longest.
    """
    if planned.tokens is None:
        return None
    shape = Batch(1, max(round(planned.attended), 2))

    def walked(run: TrainingConfig) -> Activations:
        return activations(model, run, precision, shape, checkpointing, attention_of(model, config))

    own = walked(config)
    of_token = (own.operations + own.operations_again) / shape.tokens
    kl_passes = int(config.has_kl_passes)
    of_token += kl_passes * own.forward / shape.tokens
    if _runs_reference(config, planned):
        # The forward pass of the base without its adapter equals that of a fully trained model.
        base = walked(config.model_copy(update={"lora_r": None}))
        of_token += (1 + kl_passes) * base.forward / shape.tokens
    written = own.forward / shape.tokens if config.generation else 0.0
    return RunFlops(planned.tokens, of_token * planned.tokens, written * planned.tokens, shape.length)


def left_out(config: TrainingConfig, planned: Plan) -> list[str]:
    """List, as sentences, the operations that are not counted."""
    found = []
    method, generation = METHODS[config.method], config.generation
    if method.has_reference and generation is None and not _runs_reference(config, planned):
        found.append(
            "Reference log-probabilities are computed once before the first step, in one forward pass on all "
            f"{method.row_noun}; `flops` and `seconds` do not include it."
        )
    if generation is not None and any(one.type == "model" for one in generation.rewards):
        found.append("Memory and operations of reward models are not included.")
    return found


def _runs_reference(config: TrainingConfig, planned: Plan) -> bool:
    """Return True if the reference model runs a forward pass in every step."""
    if config.generation is not None:
        return config.generation.beta > 0
    return METHODS[config.method].has_reference and config.lora_r is not None and not planned.repeats
