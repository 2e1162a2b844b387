"""Datasets: from a JSONL file to token ids and labels, truncated or packed, each row with its number in the file."""

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import PreTrainedTokenizerBase

from anneal.contracts.training_config.fields import LossOn, TrainingConfig
from anneal.contracts.training_config.resolution import loss_tokens
from worker.training.data import reader, tokenization
from worker.training.data.chat_template import ChatEncoder
from worker.training.data.completions import CompletionEncoder
from worker.training.data.packing import Sequences
from worker.training.data.pretokenized import TokenizedEncoder
from worker.training.data.reader import Progress
from worker.training.data.remarks import NotedRows, Remark
from worker.training.data.token_cache import TokenCache, Write
from worker.training.data.tokenization import Encoded, TextEncoder, TextsEncoder
from worker.training.failures import TrainingFailure

VERSION = 4
"""Version of the code that makes tokens from rows, here and in the encoders and `packing`. Increase it with any
change of the output, remarks included, or runs reuse what the old code made."""
_INTS = pa.list_(pa.int32())


@dataclass(frozen=True)
class Tokens:
    """A dataset ready to train on: columns `input_ids`, `labels`, `rows` and, if packed, `seq_lengths`."""

    dataset: Dataset
    rows: int
    """Number of rows of the file that are in it."""
    tokens: int
    remarks: list[Remark]
    """Warnings for the user: rows cut or left out."""
    highest_id: int
    """Highest token id in the data."""
    are_cached: bool = False
    """True if an earlier run made the tokens."""


def split_rows(count: int, part: float, seed: int) -> tuple[list[int], list[int]]:
    """Split `count` row numbers into training and held-out rows, both in file order; at least one in each."""
    if count < 2:
        raise TrainingFailure("bad_data", "`eval_split` needs at least two rows.")
    held = min(max(round(count * part), 1), count - 1)
    chosen = set(random.Random(seed).sample(range(count), held))
    return [row for row in range(count) if row not in chosen], sorted(chosen)


def tokenize_file(
    path: str,
    data_format: str,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainingConfig,
    *,
    max_length: int,
    chosen: list[int] | None,
    progress: Progress,
    purpose: str = "training",
    sha256: str | None = None,
    cache: TokenCache | None = None,
    vocabulary: int | None = None,
) -> Tokens:
    """Read, tokenize, mask, truncate and pack the `chosen` rows (None: all) of a file, in file order.

    Columns that the format does not name are ignored. If `sha256`, the digest of the file, is given, the result is
    kept in `cache`, and read from there if it was made before. `purpose` is the name of the data in messages, and
    `vocabulary` the number of tokens that the model has embeddings for, by default those of the tokenizer.

    Raises:
        TrainingFailure: `bad_data` that names the rows.
    """
    loss_on = loss_tokens(config, data_format)
    encoder = _encoder_for(path, data_format, tokenizer, loss_on, vocabulary or len(tokenizer))
    strategy = config.trainer_options.packing_strategy if config.packing else None
    parts = {
        "version": VERSION,
        "data": sha256,
        "format": data_format,
        "rows": None if chosen is None else hashlib.sha256(np.array(chosen, "<i8").tobytes()).hexdigest(),
        "tokenizer": tokenization.tokenizer_digest(tokenizer) if sha256 else None,
        "loss_on": loss_on,
        "vocabulary": vocabulary if data_format == "tokenized" else None,
        "training_template": encoder.training_template if isinstance(encoder, ChatEncoder) else None,
        "max_length": max_length,
        "truncation_mode": config.truncation_mode,
        "packing": strategy,
    }
    names = ["input_ids", *(["labels"] if encoder.masks else []), "rows"]
    if strategy == "bfd":
        names.append("seq_lengths")
    schema = pa.schema([(name, _INTS) for name in names])

    def write_sequences(write: Write) -> dict[str, Any]:
        sequences = Sequences(write, schema, max_length, strategy)
        read = reader.encode_rows(path, encoder, chosen=chosen, progress=progress, purpose=purpose)
        facts = _build_sequences(sequences, read, config.truncation_mode, purpose)
        return {**facts, "remarks": [*facts["remarks"], *encoder.remarks(facts["rows"])]}

    entry = (cache or TokenCache()).get_or_build(parts if sha256 else None, schema, write_sequences)
    facts, table = entry.facts, entry.table
    if entry.from_cache:
        progress(facts["rows"], facts["rows"])
    if not encoder.masks:  # labels are the tokens themselves, and share their memory
        table = table.add_column(1, pa.field("labels", _INTS), table["input_ids"])
    # Without a fingerprint, `Dataset` would compute one by serializing the whole table.
    dataset = Dataset(InMemoryTable(table), fingerprint=entry.name[:32])
    return Tokens(dataset, **facts, are_cached=entry.from_cache)


def first_batch(data: Dataset, config: TrainingConfig, devices: int) -> Dataset:
    """Return the rows of one optimizer step, to train on repeatedly."""
    return data.select(range(min(len(data), config.batch_size * config.gradient_accumulation_steps * devices)))


def steps_per_epoch(data: Dataset, config: TrainingConfig, devices: int) -> int:
    """Return the number of optimizer steps in one epoch, each of which takes batches on every device."""
    batches = math.ceil(len(data) / (config.batch_size * devices))
    return math.ceil(batches / config.gradient_accumulation_steps)


BORDERS = "text_borders"
"""Key of the borders of the texts in a batch without padding: `cu_seq_lens_q` as a list, which stays on the host."""


class RowIdCollator:
    """A collator that adds the row numbers, and the `BORDERS` of texts, to the batch built by another collator."""

    def __init__(self, collate: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> None:
        self._collate = collate

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self._collate(examples)
        batch["rows"] = [row for example in examples for row in example["rows"]]
        if (borders := _text_borders(batch)) is not None:
            batch[BORDERS] = borders
        return batch


def _text_borders(batch: Mapping[str, Any]) -> list[int] | None:
    """Return the borders of the texts in a sequence; None if there are none, or a plugin has changed the batch.

    Masks follow the positions, so the borders are those of the positions.
    """
    positions, lengths = batch.get("position_ids"), batch.get("cu_seq_lens_q")
    if not (isinstance(positions, torch.Tensor) and isinstance(lengths, torch.Tensor)):
        return None
    if positions.dim() != 2 or len(positions) != 1 or not positions.numel():
        return None
    later = (positions[0].diff() != 1).nonzero().flatten() + 1
    borders = [0, *later.tolist(), positions.shape[1]]
    return borders if borders == lengths.tolist() else None


def _encoder_for(
    path: str, data_format: str, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn, vocabulary: int
) -> TextsEncoder:
    if data_format == "chat":
        return ChatEncoder(tokenizer, loss_on, has_weights=loss_on == "all" and reader.has_weights(path))
    if data_format == "prompt_completion":
        return CompletionEncoder(tokenizer, loss_on)
    if data_format == "text":
        return TextEncoder(tokenizer)
    if data_format == "tokenized":
        return TokenizedEncoder(vocabulary)
    raise TrainingFailure("bad_data", f"Datasets of format {data_format} cannot be used for training.")


def _build_sequences(
    sequences: Sequences, read: Iterable[tuple[int, Encoded]], truncation_mode: str, purpose: str
) -> dict[str, Any]:
    """Make all sequences from `read`, and return the fields of `Tokens` that describe them."""
    limit = slice(-sequences.room, None) if truncation_mode == "keep_end" else slice(sequences.room)
    done, cut, masked = 0, NotedRows(), NotedRows()
    for number, encoded in read:
        done += 1
        if len(encoded.ids) > sequences.room and sequences.strategy != "wrapped":
            cut.add(number)
            encoded = encoded.cut(limit)
        # The first token of a text is never predicted. `wrapped` keeps texts without tokens to learn in its stream.
        if sequences.strategy == "wrapped" or encoded.teaches:
            sequences.add_row(number, encoded)
        else:
            masked.add(number)
    sequences.write_rows()
    if not sequences.teaches:
        why = f"no row has a token to learn within {sequences.room} tokens" if done else "it has no rows"
        raise TrainingFailure("bad_data", f"There is nothing to train on in the {purpose} data: {why}.")
    end = "end" if truncation_mode == "keep_start" else "start"
    remarks = [
        *cut.remarks(done, f"{{n}} rows are longer than {sequences.room} tokens and were cut at the {end}."),
        *masked.remarks(done, "{n} rows were left out: no token to learn remains after truncation."),
    ]
    return {"rows": sequences.rows, "tokens": sequences.tokens, "remarks": remarks, "highest_id": sequences.highest_id}
