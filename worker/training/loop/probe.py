"""Probe: two steps on the longest rows that measure a run before it is created; nothing of it is kept."""

from typing import Any

import numpy as np
import pyarrow.compute as pc  # type: ignore[import-untyped]
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from anneal.contracts.methods import RlhfOptions
from anneal.contracts.training_config.fields import TrainingConfig
from worker.training.data.preferences import PromptEncoder, answer_columns

STEPS = 2
"""The first step is a warm-up and creates the optimizer's state: only in the second is everything in memory at once."""


def longest_rows(
    data: Dataset, config: TrainingConfig, devices: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> Dataset:
    """Return the rows of one step on all devices, the longest first; both steps of a probe train on them.

    Rows are sequences of tokens, pairs (as long as their longer answer, prompt included), or prompts, which
    `tokenizer` tokenizes.
    """
    count = config.batch_size * config.gradient_accumulation_steps * devices
    if config.generation is not None:
        count //= config.generation.num_generations
    order = np.argsort(-token_lengths(data, tokenizer), kind="stable")
    return data.select(order[:count])


def token_lengths(
    data: Dataset, tokenizer: PreTrainedTokenizerBase | None = None
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the number of tokens of each row."""
    if tokenizer is not None:
        encoder = PromptEncoder(tokenizer)
        prepared = [encoder.prepare(row, number) for number, row in enumerate(data)]
        return np.array([len(ids) for _, ids in encoder.encode(prepared)], np.int64)
    if "input_ids" in data.column_names:
        return _column_lengths(data, "input_ids")
    answers = np.maximum.reduce([_column_lengths(data, name) for name in answer_columns(data.column_names)])
    prompts = _column_lengths(data, "prompt_ids") if "prompt_ids" in data.column_names else 0
    return np.asarray(answers + prompts, np.int64)


def probe_generation_args(options: RlhfOptions) -> dict[str, Any]:
    """Return arguments of a trainer that make every completion as long as allowed, and keep the row order."""
    return {"generation_kwargs": {"min_new_tokens": options.max_completion_length}, "shuffle_dataset": False}


def _column_lengths(data: Dataset, column: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    lengths = pc.list_value_length(data.data.column(column)).to_numpy()
    return np.asarray(lengths, np.int64)
