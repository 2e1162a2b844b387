"""Protocols that plugins implement; described in docs/guides/plugins.md."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback


class DataSource(Protocol):
    """Source of rows that replaces the dataset's file (`anneal.data_sources`)."""

    def __call__(self, path: Path, /, purpose: str, **parameters: Any) -> Iterable[Mapping[str, Any]]:
        """Return rows in the dataset's format, the same ones each time; `purpose` is training or evaluation."""


class ModelFactory(Protocol):
    """Factory of the base model, before an adapter is added (`anneal.model_factories`)."""

    def __call__(self, load: Callable[[], PreTrainedModel], /, **parameters: Any) -> PreTrainedModel:
        """Return the model; `load` loads the configured one onto its device."""


class OptimizerFactory(Protocol):
    """Factory of an optimizer (`anneal.optimizers`), such as a class of `torch.optim`."""

    def __call__(self, groups: list[dict[str, Any]], /, lr: float, **parameters: Any) -> torch.optim.Optimizer:
        """Create the optimizer; `groups` has all trained parameters, each group with its `weight_decay`."""


class SchedulerFactory(Protocol):
    """Factory of a learning-rate schedule (`anneal.schedulers`)."""

    def __call__(
        self, optimizer: torch.optim.Optimizer, /, num_training_steps: int, num_warmup_steps: int, **parameters: Any
    ) -> LRScheduler:
        """Create the scheduler, which is stepped once after each optimizer step."""


class TokenizerFactory(Protocol):
    """Factory of the tokenizer (`anneal.tokenizers`)."""

    def __call__(self, load: Callable[[], PreTrainedTokenizerBase], /, **parameters: Any) -> PreTrainedTokenizerBase:
        """Return the tokenizer, the same one each time; `load` loads that of the base model."""


class CollatorFactory(Protocol):
    """Factory of a collator (`anneal.collators`)."""

    def __call__(
        self,
        collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        /,
        **parameters: Any,
    ) -> Callable[[list[dict[str, Any]]], Mapping[str, Any]]:
        """Return a function from examples to their batch that depends on nothing else; `collate` is the method's."""


class CallbackFactory(Protocol):
    """Factory of a callback (`anneal.callbacks`), such as a subclass of `transformers.TrainerCallback`."""

    def __call__(self, **parameters: Any) -> TrainerCallback:
        """Create the callback; `worker/training/plugins/callbacks.py` lists the methods that it may have."""


class ChatTemplateFactory(Protocol):
    """Factory of a chat template (`anneal.chat_templates`)."""

    def __call__(self, tokenizer: PreTrainedTokenizerBase, /) -> str:
        """Return the Jinja text of the template."""


class RewardFunction(Protocol):
    """Reward function created by `anneal.rewards` from its options."""

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], /, **columns: Any) -> Sequence[float | None]:
        """Return one number per completion; None: the completion does not count."""
