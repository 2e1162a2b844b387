"""Warning about a base model that was trained to fill in masked tokens, not to continue a text."""

from typing import Any

from anneal.contracts.methods import Method

_CONTINUES_TEXT = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def masked_model_warning(architectures: Any, method: Method) -> str | None:
    """Return a warning about the `architectures` of a model's config.json; None if they fit the method."""
    if method.has_reward_head or not isinstance(architectures, list):
        return None
    names = [name for name in architectures if isinstance(name, str)]
    masked = next((name for name in names if name.endswith("ForMaskedLM")), None)
    if masked is None or any(name.endswith(_CONTINUES_TEXT) for name in names):
        return None
    return (
        f"The base model is a masked language model ({masked[:60]}): it was trained to fill in tokens from both sides, "
        "and does not continue texts. Use a causal language model, or method `reward`, for which this one fits."
    )
