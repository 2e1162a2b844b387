"""Teacher of a distillation: a frozen model whose next-token probabilities are learned."""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from anneal.contracts.attempt.job import ModelSource
from worker.training.context import TrainingContext
from worker.training.failures import TrainingFailure
from worker.training.model import base_model
from worker.training.model.base_model import BaseModelSource, load_failure
from worker.training.model.checked_weights import load_pretrained
from worker.training.model.merging import dequantize_model, merge_adapter, options_of_stored
from worker.wire.heartbeat import heartbeat_while_growing

_TOLERANCE = 1e-3
"""Largest difference of two ways to compute logits that rounding explains, relative to the largest logit."""


class LogitOptions(NamedTuple):
    """Operations of a model on the products of hidden states and output layer."""

    scale: float
    softcap: float | None


def logit_options(model: Any) -> LogitOptions:
    """Return how a model's logits follow from its output layer, as TRL reads it from the model's configuration."""
    config = model.config.get_text_config()
    scales = (getattr(config, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"))
    scale = next((scale for scale in scales if scale is not None), None)
    divisor = getattr(config, "logits_scaling", None)
    if scale is None and divisor is not None:
        scale = divisor if config.model_type == "hyperclovax" else 1 / divisor
    return LogitOptions(1.0 if scale is None else scale, getattr(config, "final_logit_softcapping", None))


def load_teacher(run: TrainingContext, named: ModelSource, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Any:
    """Load the teacher of a run onto its device, frozen; it must take sequences of `max_length` tokens.

    Raises:
        TrainingFailure: `model_not_found` or `config_error`.
    """
    base = base_model.find_other_model(run.job, named, "teacher")
    _check_tokenizer(base, tokenizer, named)
    longest = getattr(base.architecture.get_text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and longest < max_length:
        raise TrainingFailure(
            "config_error",
            f"The teacher {named.name} takes at most {longest} tokens, but a sequence may have {max_length}: lower "
            "`max_seq_length`.",
        )
    is_half = run.config.dtype == "bfloat16" and run.machine.kind == "cuda"
    with heartbeat_while_growing(run.report.alive, base.folder):
        teacher = _load_network(base, named, torch.bfloat16 if is_half else torch.float32)
    teacher.to("cuda" if run.machine.kind == "cuda" else "cpu").eval().requires_grad_(False)
    _check_head(teacher, named)
    # Generating takes long, so each token sends a heartbeat.
    teacher.register_forward_pre_hook(lambda *_: run.report.alive())
    return teacher


def _check_tokenizer(base: BaseModelSource, tokenizer: PreTrainedTokenizerBase, named: ModelSource) -> None:
    """Check that the teacher's probabilities are those of the tokens of the run."""
    theirs = base_model.load_tokenizer(base).get_vocab()
    different = [token for token, number in tokenizer.get_vocab().items() if theirs.get(token) != number]
    if different:
        raise TrainingFailure(
            "config_error",
            f"The teacher {named.name} has another tokenizer: {len(different)} tokens of the run are not in it, or "
            f"have other ids, such as {different[0][:40]!r}. Name a teacher of the same family of models.",
        )


def _load_network(base: BaseModelSource, named: ModelSource, dtype: torch.dtype) -> Any:
    """Load the weights and merge their adapter, if any; from safetensors only."""
    stored = base.stored_quantization
    if stored is not None and not stored.is_supported:
        raise TrainingFailure(
            "config_error",
            f"The teacher {named.name} is stored {stored.text}, which cannot be loaded here; name the model from which "
            "it was quantized.",
        )
    what = f"The teacher {named.name}"
    try:
        network = load_pretrained(
            AutoModelForCausalLM,
            base.source,
            what if base.adapter is None else f"The base of the teacher {named.name}",
            dtype=dtype,
            **base.options,
            **options_of_stored(stored),
        )
        network = dequantize_model(network, dtype)
        return network if base.adapter is None else merge_adapter(network, base.adapter, what)
    except (RuntimeError, MemoryError, TrainingFailure):
        raise
    except Exception as error:
        raise load_failure(error, named.name, "teacher") from error


def _check_head(teacher: Any, named: ModelSource) -> None:
    """Check that the teacher's logits are those of its last hidden states and its output layer, which the loss reads.

    Raises:
        TrainingFailure: `config_error`: they are not.
    """
    ids = torch.arange(8, device=teacher.device).unsqueeze(0)
    with torch.no_grad():
        logits = teacher(input_ids=ids, use_cache=False).logits.float()
        head: nn.Linear = teacher.get_output_embeddings()
        options = logit_options(teacher)
        computed = head(teacher.base_model(input_ids=ids, use_cache=False).last_hidden_state).float() * options.scale
        if options.softcap is not None:
            computed = options.softcap * torch.tanh(computed / options.softcap)
    tolerance = _TOLERANCE if head.weight.dtype is torch.float32 else 5e-2
    if not torch.allclose(computed, logits, rtol=0, atol=tolerance * float(logits.abs().max())):
        raise TrainingFailure(
            "config_error",
            f"The probabilities of a teacher of the kind `{teacher.config.model_type}` cannot be learned, because its "
            f"logits are not those of its last hidden states and its output layer: name another teacher than "
            f"{named.name}.",
        )
