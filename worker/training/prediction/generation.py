"""Answers of a model to prompts, in batches: each is what the model generates for its prompt alone."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from anneal.contracts.prompts import PredictOptions
from worker.training.loop.sampling import end_tokens
from worker.training.prediction.rows import Prompt

MOST_ROWS = 256
"""Rows of a batch: the logits of each have the size of the vocabulary."""
_ON_CPU = 8_192
_UNKNOWN = 16_384
_MOST_TOKENS = 2**18
_FREE_PART = 0.5
"""Part of the free memory that a batch may fill: the rest is for activations of the prompts and for fragments."""
_STREAMS = 16
"""Values of the width of the model for each token of a prompt that is computed."""


@dataclass(frozen=True)
class Answer:
    """Text and tokens that a model has generated after a prompt."""

    text: str
    finish_reason: str
    """`stop`: the model has ended it, or a stop text has; `length`: it has the maximum number of tokens."""
    tokens: list[int]


def plan_batches(prompts: Sequence[Prompt], options: PredictOptions, batch_tokens: int) -> list[list[Prompt]]:
    """Divide prompts into batches of similar length, the longest first; the same prompts make the same batches."""
    batches: list[list[Prompt]] = []
    longest = 0
    for prompt in sorted(prompts, key=lambda prompt: (-_length(prompt), prompt.row)):
        rows = len(batches[-1]) + 1 if batches else 0
        if not batches or rows > MOST_ROWS or rows * longest > batch_tokens:
            batches.append([])
            longest = _length(prompt) + options.max_new_tokens
        batches[-1].append(prompt)
    return batches


def _length(prompt: Prompt) -> int:
    return 0 if prompt.ids is None else len(prompt.ids)


def fitting_tokens(model: Any) -> int:
    """Return the number of tokens of a batch that fit beside the model, as a power of two.

    A power of two, so that a little more or less free memory does not change the batches.
    """
    if model.device.type != "cuda":
        return _ON_CPU
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    layers, width = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if not (heads and layers and width):
        return _UNKNOWN
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    item = torch.finfo(model.dtype).bits // 8
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    of_logits = MOST_ROWS * config.vocab_size * 16
    of_token = item * (2 * layers * heads * head + _STREAMS * width)
    fitting = max(free * _FREE_PART - of_logits, 1) / of_token
    return int(min(2 ** max(math.floor(math.log2(max(fitting, 1))), 9), _MOST_TOKENS))


class Generator:
    """Generator of answers, each from the tokens of its prompt and, if sampled, from the seed and its row's number."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        options: PredictOptions,
        seed: int,
        heartbeat: Callable[[], None],
    ) -> None:
        """Prepare the generation; `heartbeat` is called with each token, and may raise to end it."""
        self._model, self._tokenizer, self._options, self._seed = model, tokenizer, options, seed
        self._heartbeat = heartbeat
        self._ends = list(dict.fromkeys([*end_tokens(model, tokenizer), *stop_tokens(tokenizer, options.stop)]))
        # A value of None in `GenerationConfig` is that of the model's own configuration. A penalty for repetition
        # would depend on the padding, and thus on the batch.
        model.generation_config.update(
            max_time=None,
            stop_strings=None,
            cache_implementation=None,
            return_dict_in_generate=False,
            repetition_penalty=1.0,
        )
        # Greedy also where it samples: `_RowSampler` leaves one token to choose. What else the model's own
        # configuration asks for, such as suppressed tokens, is taken from it; the values of sampling have no effect.
        self._config = GenerationConfig(
            max_new_tokens=options.max_new_tokens,
            do_sample=False,
            num_beams=1,
            num_return_sequences=1,
            temperature=1.0,
            top_p=1.0,
            top_k=50,
            use_cache=True,
            eos_token_id=self._ends,
            pad_token_id=tokenizer.pad_token_id,
        )

    def answer_batch(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Return the answer to each prompt."""
        rows = [prompt.ids for prompt in prompts if prompt.ids is not None]
        longest = max(len(ids) for ids in rows)
        device = self._model.device
        ids = torch.full((len(rows), longest), int(self._tokenizer.pad_token_id or 0))
        mask = torch.zeros_like(ids)
        for at, row in enumerate(rows):
            ids[at, longest - len(row) :] = torch.from_numpy(row)
            mask[at, longest - len(row) :] = 1
        ends = _TextEnds(self._tokenizer, self._options.stop, longest, self._heartbeat)
        with torch.no_grad():
            written = self._model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                generation_config=self._config,
                stopping_criteria=StoppingCriteriaList([ends]),
                logits_processor=self._samplers([prompt.row for prompt in prompts]),
            )
        return [
            self._finished_answer(tokens[longest:length])
            for tokens, length in zip(written.tolist(), ends.lengths(written.shape[1], len(rows)), strict=True)
        ]

    def _samplers(self, rows: Sequence[int]) -> LogitsProcessorList:
        options, samplers = self._options, LogitsProcessorList()
        if options.temperature == 0:
            return samplers
        samplers.append(TemperatureLogitsWarper(float(options.temperature)))
        if options.top_k is not None:
            samplers.append(TopKLogitsWarper(options.top_k))
        if options.top_p < 1:
            samplers.append(TopPLogitsWarper(float(options.top_p)))
        samplers.append(_RowSampler(self._seed, rows))
        return samplers

    def _finished_answer(self, tokens: list[int]) -> Answer:
        end = next((at for at, token in enumerate(tokens) if token in self._ends), None)
        reason = "length"
        if end is not None:
            tokens, reason = tokens[: end + 1], "stop"
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        places = [at for stop in self._options.stop if (at := text.find(stop)) >= 0]
        if places:
            text, reason = text[: min(places)], "stop"
        return Answer(text, reason, tokens)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the tokens that are left out when an answer is decoded, with their ids."""
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return special | {token.content: at for at, token in tokenizer.added_tokens_decoder.items() if token.special}


def stop_tokens(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> list[int]:
    """Return the ids of special tokens among stop texts, which never appear in a decoded text."""
    special = special_tokens(tokenizer) if stop else {}
    return [special[text] for text in stop if text in special]


def draw_tokens(scores: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """Return a token for each row of scores: where a number from 0 to 1 falls among the probabilities.

    Returns:
        Token ids; shape (rows, 1).
    """
    sums = torch.softmax(scores.double(), dim=-1).cumsum(dim=-1)
    drawn = torch.tensor(numbers, dtype=sums.dtype, device=sums.device).unsqueeze(1)
    return torch.searchsorted(sums, drawn * sums[:, -1:], right=True).clamp(max=scores.shape[-1] - 1)


class _RowSampler(LogitsProcessor):  # type: ignore[misc]
    """Draws a token for each row with random numbers of its own, and leaves no other.

    So a row has the same answer in every batch, and after a resume.
    """

    def __init__(self, seed: int, rows: Sequence[int]) -> None:
        self._random = [random.Random(f"{seed} {row}") for row in rows]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = draw_tokens(scores, [generator.random() for generator in self._random])
        return torch.full_like(scores, -math.inf).scatter(1, chosen, 0.0)


class _TextEnds(StoppingCriteria):  # type: ignore[misc]
    """Ends rows whose generated text contains a stop text, and sends a heartbeat with each token."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], start: int, heartbeat: Callable[[], None]
    ) -> None:
        self._tokenizer, self._stop, self._start, self._heartbeat = tokenizer, stop, start, heartbeat
        # A token has at least one byte, but for special ones.
        self._tail = max((len(text.encode()) for text in stop), default=0) + 8
        self._lengths: dict[int, int] = {}

    def lengths(self, most: int, rows: int) -> list[int]:
        """Return the number of tokens of each row, prompt included, up to the end of its stop text or `most`."""
        return [self._lengths.get(row, most) for row in range(rows)]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._heartbeat()
        if self._stop:
            tails = input_ids[:, max(self._start, input_ids.shape[1] - self._tail) :].tolist()
            for row, text in enumerate(self._tokenizer.batch_decode(tails, skip_special_tokens=True)):
                if row not in self._lengths and any(stop in text for stop in self._stop):
                    self._lengths[row] = input_ids.shape[1]
        return torch.tensor([row in self._lengths for row in range(len(input_ids))], device=input_ids.device)
