"""Floating-point operations (FLOPs) of matrix products: per training token, and of a whole run.

Conventions, those of PaLM (https://arxiv.org/abs/2204.02311, appendix B) and Megatron-LM
(https://arxiv.org/abs/2104.04473):

- A product with a weight is 2 operations forward, 2 backward to its input if gradients propagate further, and 2
  backward to the weight if it is trained. Embeddings are lookups and cost nothing. Of the experts, only those count
  that a token is routed to. Dequantization is not counted.
- Attention is 2 products of 2 operations for each pair of tokens of a sequence, and twice that backward. The causal
  half is not subtracted, nor are pairs outside a sliding window.
- The head counts for every token, although some kernels skip masked tokens.
- Recomputation in the backward pass (`gradient_checkpointing`) counts for the hardware, not for MFU.
- A reference model that runs in every step counts its forward pass. Generation, reward models and reference
  log-probabilities computed once beforehand are not operations of a training token.
- Norms, activations, the optimizer, and what an adapter computes once per batch (the norms of DoRA, the matrices added
  to experts) are not products per token.
"""

from dataclasses import dataclass

from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import TrainingConfig
from app.estimator.activations import Activations, Checkpointing, Precision, compute_activations
from app.estimator.architecture import Architecture
from app.estimator.forward_pass import Batch
from app.estimator.steps import Plan


@dataclass(frozen=True)
class Operations:
    """Operations per token, and per pair of tokens of a sequence (its length squared)."""

    token: int
    pair: int

    def total_for(self, tokens: float, pairs: float) -> float:
        """Return the operations of so many tokens and pairs."""
        return tokens * self.token + pairs * self.pair

    def per_token(self, length: float) -> int:
        """Return the operations per token in a sequence of `length` tokens."""
        return round(self.token + length * self.pair)

    def __add__(self, other: "Operations") -> "Operations":
        return Operations(self.token + other.token, self.pair + other.pair)

    def repeated(self, count: int) -> "Operations":
        """Return the operations of `count` repetitions."""
        return Operations(self.token * count, self.pair * count)


@dataclass(frozen=True)
class StepOperations:
    """Operations of a training step."""

    forward: Operations
    """Forward pass of the model, without its reference."""
    training: Operations
    """Forward and backward passes, from which MFU is computed."""
    recomputed: Operations
    """Repeated in the backward pass."""

    @property
    def hardware(self) -> Operations:
        """All operations that the device executes."""
        return self.training + self.recomputed


def step_operations(
    model: Architecture, config: TrainingConfig, checkpointing: Checkpointing, *, reference_passes: int = 0
) -> StepOperations:
    """Return the operations of a step under an effective configuration, with forward passes of a reference model.

    The reference is the base without its adapter, or a copy of it; both cost the same.

    Raises:
        CannotTrain: The model cannot be trained with this configuration.
    """

    def forward_passes(config: TrainingConfig) -> list[Activations]:
        # Operations depend neither on the precision nor on the kernel of attention.
        precision = Precision("cpu", autocast=False, base=4)
        return [
            compute_activations(model, config, precision, Batch(1, length), checkpointing, "sdpa") for length in (1, 2)
        ]

    of_one_token, of_two_tokens = forward_passes(config)
    training = _by_length(of_one_token.operations, of_two_tokens.operations)
    if reference_passes:
        base_one, base_two = forward_passes(config.model_copy(update={"lora_r": None}))
        training += _by_length(base_one.forward, base_two.forward).repeated(reference_passes)
    return StepOperations(
        forward=_by_length(of_one_token.forward, of_two_tokens.forward),
        training=training,
        recomputed=_by_length(of_one_token.operations_again, of_two_tokens.operations_again),
    )


def _by_length(first: int, two: int) -> Operations:
    """Return the operations that are `first` for a sequence of one token and `two` for a sequence of two tokens."""
    pair = (two - 2 * first) // 2
    return Operations(first - pair, pair)


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


def estimate_flops(
    model: Architecture, config: TrainingConfig, planned: Plan, checkpointing: Checkpointing
) -> RunFlops | None:
    """Return the operations of a run under an effective configuration; None if the number of tokens is not known.

    Attention grows with the square of the length, so it is computed for the mean length, not the longest.
    """
    if planned.tokens is None:
        return None
    length = max(round(planned.attended), 2)
    kl_passes = int(config.has_kl_passes)
    reference_passes = 1 + kl_passes if _runs_reference(config, planned) else 0
    step = step_operations(model, config, checkpointing, reference_passes=reference_passes)
    forward = step.forward.per_token(length)
    training = step.hardware.per_token(length) + kl_passes * forward
    written = forward if config.generation else 0
    return RunFlops(planned.tokens, training * planned.tokens, written * planned.tokens, length)


def uncounted_parts(config: TrainingConfig, planned: Plan) -> list[str]:
    """List, as sentences, the operations that are not counted."""
    parts = []
    method, generation = METHODS[config.method], config.generation
    if method.has_reference and generation is None and not _runs_reference(config, planned):
        parts.append(
            "Reference log-probabilities are computed once before the first step, in one forward pass on all "
            f"{method.row_noun}; `flops` and `seconds` do not include it."
        )
    if generation is not None and any(one.type == "model" for one in generation.rewards):
        parts.append("Memory and operations of reward models are not included.")
    return parts


def _runs_reference(config: TrainingConfig, planned: Plan) -> bool:
    """Return True if the reference model runs a forward pass in every step."""
    if config.generation is not None:
        return config.generation.beta > 0
    return METHODS[config.method].has_reference and config.lora_r is not None and not planned.repeats
