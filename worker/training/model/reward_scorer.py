"""A trained reward model as a reward function: scores texts in the form in which it was trained on them."""

from contextlib import nullcontext
from typing import Any

import torch
from peft import PeftConfig
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase
from trl.trainer.reward_trainer import suppress_seqcls_warning

from anneal.contracts.attempt.job import ModelSource
from worker.training.context import TrainingContext
from worker.training.data.chat_template import ensure_template
from worker.training.failures import TrainingFailure
from worker.training.model import base_model
from worker.training.model.base_model import BaseModelSource, load_failure
from worker.training.model.checked_weights import load_pretrained
from worker.training.model.merging import dequantize_model, merge_adapter, options_of_stored
from worker.wire.heartbeat import heartbeat_while_growing

_TEXTS_AT_ONCE = 8


class RewardScorer:
    """Scorer of completions, called as TRL calls a reward function."""

    def __init__(self, named: ModelSource, name: str, run: TrainingContext, max_length: int | None) -> None:
        """Load the model described by `named` onto the run's device, frozen.

        It must accept texts of up to `max_length` tokens; with None, longer ones than it accepts have no score.

        Raises:
            TrainingFailure: `model_not_found` or `config_error`.
        """
        self.__name__ = name
        self._run, self._alive = run, run.report.alive
        self._named = named.name
        base = base_model.find_other_model(run.job, named, "reward model")
        self.identity = base.identity
        """Fingerprint of the weights."""
        self._tokenizer = base_model.load_tokenizer(base)
        cuda = run.machine.kind == "cuda"
        # With float16, scores would overflow sooner than those of a model in mixed precision.
        dtype = torch.bfloat16 if run.config.dtype == "bfloat16" else torch.float32
        longest = getattr(base.architecture.get_text_config(), "max_position_embeddings", None)
        self._longest = longest if isinstance(longest, int) else None
        if max_length is not None and self._longest is not None and self._longest < max_length:
            raise TrainingFailure(
                "config_error",
                f"The reward model {self._named} takes at most {self._longest} tokens, but prompt and completion may "
                f"have {max_length}: lower `max_seq_length`.",
            )
        with heartbeat_while_growing(self._alive, base.folder):
            self._model = _load_classifier(base, self._named, dtype)
        self._model.config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        self._model.to("cuda" if cuda else "cpu").eval().requires_grad_(False)

    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
        """Return one score per completion, in order; None for a text that is too long."""
        are_chats = bool(prompts) and not isinstance(prompts[0], str)
        if are_chats and ensure_template(self._tokenizer):
            self._run.report.message(
                f"The reward model {self._named} has no chat template; a plain one (<|user|>, <|assistant|>) is used.",
                level="warning",
            )
        texts = [self._whole_text(*one) for one in zip(prompts, completions, strict=True)]
        scores: list[float | None] = []
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            self._alive()
            scores += self._score_texts(texts[start : start + _TEXTS_AT_ONCE], are_chats)
        return scores

    def _whole_text(self, prompt: Any, completion: Any) -> str:
        if not isinstance(prompt, str):
            return str(self._tokenizer.apply_chat_template(prompt + completion, tokenize=False))
        # The reward is read at the end of a text, and the texts in its training data end with this token.
        end = str(self._tokenizer.eos_token)
        return f"{prompt}{completion}" if completion.endswith(end) else f"{prompt}{completion}{end}"

    def _score_texts(self, texts: list[str], are_chats: bool) -> list[float | None]:
        # A chat template adds the special tokens itself; for plain texts they are added here, as in its training.
        batch = _tokenize_padded(self._tokenizer, texts, add_special_tokens=not are_chats).to(self._model.device)
        if self._longest is not None and batch["input_ids"].shape[1] > self._longest:
            if len(texts) == 1:
                return [None]
            return [score for text in texts for score in self._score_texts([text], are_chats)]
        with torch.inference_mode():
            logits = self._model(**batch).logits
        scores: list[float | None] = logits[:, 0].float().tolist()
        return scores


def _tokenize_padded(tokenizer: PreTrainedTokenizerBase, texts: list[str], add_special_tokens: bool) -> Any:
    return tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=add_special_tokens
    )


def _load_classifier(base: BaseModelSource, name: str, dtype: torch.dtype) -> Any:
    """Load the classifier and merge its adapter, if any; weights from safetensors only."""
    stored = base.stored_quantization
    if stored is not None and not stored.is_supported:
        raise TrainingFailure(
            "config_error",
            f"The reward model {name} is stored {stored.text}, which cannot be loaded here; name the model from which "
            "it was quantized.",
        )
    labels: dict[str, Any] = {}
    if base.adapter is not None:
        if PeftConfig.from_pretrained(str(base.adapter)).task_type != "SEQ_CLS":
            raise TrainingFailure("config_error", f"{name} is an adapter, but not one of a reward model.")
        labels = {"num_labels": 1}  # not part of an adapter's configuration
    try:
        # Only the base of an adapter may lack the head; the keys that this silences are not reported at all.
        with suppress_seqcls_warning() if base.adapter is not None else nullcontext():
            model = load_pretrained(
                AutoModelForSequenceClassification,
                base.source,
                f"The reward model {name}" if base.adapter is None else f"The base of the reward model {name}",
                has_new_head=base.adapter is not None,
                dtype=dtype,
                **labels,
                **base.options,
                **options_of_stored(stored),
            )
        model = dequantize_model(model, dtype)
        if base.adapter is not None:
            model = merge_adapter(model, base.adapter, f"The reward model {name}")
    except (RuntimeError, MemoryError, TrainingFailure):
        raise
    except Exception as error:
        raise load_failure(error, name, "reward model") from error
    if model.config.num_labels != 1:
        raise TrainingFailure(
            "config_error",
            f"{name} returns {model.config.num_labels} numbers for a text, but a reward model must return one.",
        )
    return model
