"""Fields of a training configuration that hyperparameters of OpenAI's fine-tuning API determine."""

from anneal.contracts.methods import Method, RlhfOptions

_MICRO_BATCHES = (4, 3, 2, 1)
"""Sizes of a micro-batch, the preferred one first."""
DEFAULT_COMPLETIONS: int = RlhfOptions.model_fields["num_generations"].default
"""Completions of a prompt."""
_LEAST_COMPLETIONS = 2
MOST_COMPLETIONS = 1024


def learning_rate(multiplier: float, method: Method, lora_r: int | None) -> float:
    """Return `learning_rate` for a factor of the default of the method."""
    # Without the last digits, which differ from those of the number that a person would write.
    return float(f"{multiplier * method.default_fields(lora_r)['learning_rate']:.10g}")


def micro_batches(rows: int) -> dict[str, int]:
    """Return `batch_size` and `gradient_accumulation_steps` of a step of so many rows on one device."""
    size = next(size for size in _MICRO_BATCHES if rows % size == 0)
    return {"batch_size": size, "gradient_accumulation_steps": rows // size}


def completions_per_prompt(compute_multiplier: float) -> int:
    """Return `rlhf.num_generations` for a factor of its default."""
    return max(round(compute_multiplier * DEFAULT_COMPLETIONS), _LEAST_COMPLETIONS)
