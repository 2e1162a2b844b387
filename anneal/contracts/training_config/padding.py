"""Rule for concatenating the sequences of a micro-batch without padding (`extra.padding_free`)."""

from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import TrainingConfig

SEPARATES_TEXTS = ("varlen", "flash_attention_2", "flash_attention_3")
"""Attention that computes each text of a sequence by itself, without a mask over all of them."""
_OWN_BATCHES = ("collator", "model_factory")
"""Plugins that may rely on batches with one sequence per row and a mask of the padding."""


def is_padding_free(config: TrainingConfig, attention: str | None) -> bool:
    """Return True if the rows of a micro-batch are concatenated with this attention, though they are not packed.

    By default they are where that changes no loss and saves padding: the noise of NEFTune depends on the length of the
    padded sequence, and a single row has no padding.
    """
    chosen = config.trainer_options.padding_free
    if chosen is not None:
        return chosen
    return (
        METHODS[config.method].is_supervised
        and not config.packing
        and config.batch_size > 1
        and attention in SEPARATES_TEXTS
        and config.neftune_noise_alpha is None
        and not any(config.extra.get(name) for name in _OWN_BATCHES)
    )
