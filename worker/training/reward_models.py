"""A trained reward model as a reward: what it says of a text, as it was trained to judge texts."""

from pathlib import Path
from typing import Any

import torch
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.reward_trainer import suppress_seqcls_warning

from worker.training.base import ADAPTER_CONFIG, not_loaded
from worker.training.chat import ensure_template
from worker.training.failures import TrainingFailure
from worker.training.pulse import while_growing
from worker.training.run import Run

_TEXTS_AT_ONCE = 8


class RewardModel:
    """Scores completions; called as TRL calls a reward function."""

    def __init__(self, located: dict[str, Any], name: str, run: Run) -> None:
        """Load the model that `located` (name, path, hub, revision) leads to, on the run's device, to be read only.

        Raises:
            TrainingFailure: `model_not_found` or `config_error`.
        """
        self.__name__ = name
        self._alive = run.report.alive
        source = located["path"] or located["hub"]
        options = {
            "local_files_only": bool(run.job.get("offline")),
            "trust_remote_code": bool(run.job.get("trust_remote_code")),
            "revision": located["revision"] or "main",
        }
        cuda = run.machine.kind == "cuda"
        dtype = torch.bfloat16 if cuda and run.machine.bf16 else torch.float32
        try:
            with while_growing(self._alive, Path(source)), suppress_seqcls_warning():
                self._tokenizer = AutoTokenizer.from_pretrained(source, **options)
                self._model = _load(source, options, dtype)
        except TrainingFailure:
            raise
        except (RuntimeError, MemoryError):
            raise
        except Exception as error:
            raise not_loaded(error, located["name"], "reward model") from error
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        ensure_template(self._tokenizer)
        self._model.config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        self._model.to("cuda" if cuda else "cpu").eval().requires_grad_(False)

    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        """A number for each completion, in their order."""
        texts = [self._whole(*one) for one in zip(prompts, completions, strict=True)]
        scores: list[float] = []
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            self._alive()
            scores += self._scores(texts[start : start + _TEXTS_AT_ONCE])
        return scores

    def _whole(self, prompt: Any, completion: Any) -> str:
        if not isinstance(prompt, str):
            return str(self._tokenizer.apply_chat_template(prompt + completion, tokenize=False))
        # The end is where a reward is read, and texts that it was trained on end in this.
        return f"{prompt}{completion}{self._tokenizer.eos_token}"

    def _scores(self, texts: list[str]) -> list[float]:
        batch = self._tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        ).to(self._model.device)
        with torch.inference_mode():
            logits = self._model(**batch).logits
        scores: list[float] = logits[:, 0].float().tolist()
        return scores


def _load(source: str, options: dict[str, Any], dtype: torch.dtype) -> Any:
    if (Path(source) / ADAPTER_CONFIG).is_file():
        model = AutoPeftModelForSequenceClassification.from_pretrained(source, dtype=dtype, num_labels=1)
        return model.merge_and_unload()
    model = AutoModelForSequenceClassification.from_pretrained(source, dtype=dtype, use_safetensors=True, **options)
    if model.config.num_labels != 1:
        raise TrainingFailure(
            "config_error",
            f"{Path(source).name} gives {model.config.num_labels} numbers for a text, and a reward is one number.",
        )
    return model
