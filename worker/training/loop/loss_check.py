"""Trial of the loss before the first step: TRL's must be that of the model, and texts of a sequence must not mix.

TRL computes log-probabilities from the last hidden states and the output layer alone. A model that computes more
between or after these would be trained for something else than what it computes where it is used.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from worker.training.failures import TrainingFailure, classify_error, one_line
from worker.training.trainer_protocol import ServiceTrainer

_TOKENS = 32
_UNFIT = (AttributeError, TypeError, ValueError, RuntimeError)
"""Exceptions of models that do not have the layers or take the inputs that TRL expects; a lack of memory is one too."""
_TOLERANCE, _TOLERANCE_16_BIT = 1e-4, 5e-2
"""Largest relative difference of two ways to compute a loss that rounding explains."""
_MIXING, _MIXING_16_BIT = 1e-5, 2e-2
"""The same of one way with another text before the one. Routers of experts and outliers of 8-bit layers then round
otherwise; a trained model that sees its text twice changes its loss many times more."""


def check_loss(trainer: ServiceTrainer, temperature: float = 1.0) -> None:
    """Compare the loss of a text in the trainer with that of the model's own logits, divided by `temperature`.

    Raises:
        TrainingFailure: `config_error`: they differ, or the trainer cannot compute it.
    """
    ids = _first_tokens(trainer)
    if not ids:
        return
    model: Any = trainer.model
    with _evaluation_mode(trainer):
        tokens = torch.tensor([ids], device=model.device)
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        own = float(cross_entropy(logits[0, :-1].float() / temperature, tokens[0, 1:], reduction="sum"))
        try:
            theirs = _loss_sum(model, [ids])
        except _UNFIT as error:
            if classify_error(error).code != "internal":  # such as a lack of memory
                raise
            raise TrainingFailure("config_error", f"{_refusal_message(model)} ({one_line(error)}).") from error
        limit = _TOLERANCE if _is_exact(model) else _TOLERANCE_16_BIT
    # A loss that is not finite ends the first step, with the rows.
    if math.isfinite(own) and not abs(theirs - own) <= limit * abs(own):
        count = len(ids) - 1
        raise TrainingFailure(
            "config_error",
            f"{_refusal_message(model)}: {theirs / count:.4g} instead of {own / count:.4g} for the first text.",
        )


def check_separation(trainer: ServiceTrainer) -> None:
    """Check that the loss of a text does not depend on the text before it in a sequence.

    Raises:
        TrainingFailure: `config_error`: it does.
    """
    ids = _first_tokens(trainer)
    if not ids:
        return
    model: Any = trainer.model
    with _evaluation_mode(trainer):
        alone = _loss_sum(model, [ids])
        try:
            first, other = (_loss_sum(model, [before, ids]) for before in (ids, ids[:1] * len(ids)))
        except _UNFIT as error:  # the layers of some models need a package for it
            if classify_error(error).code != "internal":
                raise
            raise _mixing_failure(trainer, f" ({one_line(error).rstrip('.')})") from error
        limit, mixing = (_TOLERANCE, _MIXING) if _is_exact(model) else (_TOLERANCE_16_BIT, _MIXING_16_BIT)
    is_separate = abs(first - other) <= mixing * abs(alone) and abs(first - alone) <= limit * abs(alone)
    if math.isfinite(alone) and not is_separate:
        raise _mixing_failure(trainer)


def _mixing_failure(trainer: ServiceTrainer, reason: str = "") -> TrainingFailure:
    remedy = (
        "leave `packing` out, or set `extra.packing_strategy` to `wrapped`, which does not separate texts"
        if trainer.run.config.packing
        else "leave `extra.padding_free` out"
    )
    return TrainingFailure(
        "config_error",
        f"A model of the kind `{trainer.model.config.model_type}` does not separate the texts of a sequence{reason}, "
        f"so each would be learned as the continuation of the one before it: {remedy}.",
    )


def _first_tokens(trainer: ServiceTrainer) -> list[int]:
    """Return the first tokens of the first row, repeated if there are few; two texts of them fit into a sequence."""
    count = min(_TOKENS, max((trainer.run.config.max_seq_length or 2 * _TOKENS) // 2, 2))
    return (list(trainer.pinned_text()) * count)[:count]


def _loss_sum(model: Any, texts: Sequence[list[int]]) -> float:
    """Return the sum of TRL's losses of the tokens of the last of several texts in a sequence."""
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=len(texts) > 1)
    batch = collate([{"input_ids": ids} for ids in texts])
    on_device = {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()
    }
    output = model(**on_device, fused_lm_head=True)
    return float(-output.log_probs[0, -(len(texts[-1]) - 1) :].sum())


@contextmanager
def _evaluation_mode(trainer: ServiceTrainer) -> Iterator[None]:
    """Switch to evaluation mode without gradients, in the data types of the trainer's passes; nothing is compiled."""
    model: Any = trainer.model
    trains = model.training
    model.eval()
    try:
        with (
            torch.no_grad(),
            trainer.accelerator.autocast(),
            torch.compiler.set_stance("force_eager") if trainer.run.config.torch_compile else nullcontext(),
        ):
            yield
    finally:
        model.train(trains)


def _is_exact(model: Any) -> bool:
    return not torch.is_autocast_enabled(model.device.type) and all(
        one.dtype is torch.float32 for one in model.parameters()
    )


def _refusal_message(model: Any) -> str:
    return (
        f"A model of the kind `{model.config.model_type}` can be neither trained nor evaluated, since TRL does not "
        "compute its loss, but that of its last hidden states and its output layer"
    )
