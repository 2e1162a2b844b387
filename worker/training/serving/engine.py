"""Engine of answers: questions join while others are answered, and each step adds a token to every answer."""

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from anneal.contracts.attempt.answers import AnswerError, AnswerErrorCode, AnswerPiece, Question
from anneal.contracts.training_config.resolution import LONGEST_SEQUENCE
from worker.training.failures import DEVICE_ERROR, OUT_OF_MEMORY, TrainingFailure, classify_error
from worker.training.serving.adapters import AdapterSet
from worker.training.serving.batches import Batch, Network
from worker.training.serving.memory import fitting_cache_tokens
from worker.training.serving.prompts import AnswerFailure, QuestionEncoders
from worker.training.serving.row_cache import RowCache
from worker.training.serving.sampling import choose_tokens
from worker.training.serving.sequences import OpenQuestion, Sequence

_MARGIN = 64
"""Tokens for which there must be memory when a sequence joins, so that it does not have to leave soon."""
_READING_SECONDS = 0.05
"""Time after which a step converts no further question to tokens: the answers wait for it."""
_PREFILL_TOKENS = {"cuda": 1024, "cpu": 128}
_OUT_OF_MEMORY = (
    "The device has too little memory for this answer: ask for fewer tokens with `max_tokens`, shorten the prompt, or "
    "use a device with more memory."
)
_NOT_FINITE = (
    "The model computes values that are NaN or infinite for this question: use an earlier checkpoint of its run, or "
    "train it again with a lower learning rate."
)


@dataclass(frozen=True)
class EngineLimits:
    """Limits of what is computed and kept in memory at a time."""

    rows: int = 32
    """Answers that are generated at a time; other questions wait."""
    adapters: int = 8
    """Adapters in memory."""
    prefill_tokens: int | None = None
    """Tokens of prompts that are read in one step, between two tokens of the answers that are being generated; None: as
    many as the kind of device reads in a moment."""
    cache_tokens: int | None = None
    """Tokens that may be cached; None: what fits into the free memory of the device."""


@dataclass
class _Prefill:
    """Sequence whose tokens are being read."""

    sequence: Sequence
    cache: RowCache

    def next_tokens(self, most: int) -> list[int]:
        done = self.cache.length
        return self.sequence.tokens[done : done + most]

    @property
    def is_done(self) -> bool:
        return self.cache.length == len(self.sequence.tokens)


class AnswerEngine:
    """Answers of one model, and of adapters beside it, to many questions at a time.

    Greedy answers, and those with a seed, do not depend on the questions that are answered beside them, except for the
    rounding of sums, which depends on the number of rows and their length in 16 bits.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        limits: EngineLimits | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        """Prepare an engine for a model on its device, which it sets to evaluation mode.

        Args:
            model: base model, whole model, or a `PeftModel`, which takes no further adapters.
            tokenizer: its tokenizer, with an end-of-sequence token.
            limits: limits of what is computed at a time.
            trust_remote_code: tokenizers of adapters may contain code.

        Raises:
            TrainingFailure: `config_error`: the model cannot generate here.
        """
        model.eval()
        self._limits = limits or EngineLimits()
        self._adapters = AdapterSet(model, self._limits.adapters)
        self._network = Network(self._adapters)
        self._prefill_tokens = self._limits.prefill_tokens or _PREFILL_TOKENS[self._network.device.type]
        self._encoders = QuestionEncoders(self._adapters.model, tokenizer, trust_remote_code=trust_remote_code)
        own = getattr(self._network.config, "max_position_embeddings", None)
        self._context = int(own or min(tokenizer.model_max_length, LONGEST_SEQUENCE))
        self._most_cached = self._budget = self._fitting_tokens()
        """Tokens that may be cached, and those that may be cached now: fewer after a lack of memory."""
        self._questions: dict[str, OpenQuestion] = {}
        self._submitted = 0
        self._unread: deque[OpenQuestion] = deque()
        self._waiting: list[Sequence] = []
        """The oldest first."""
        self._prefill: _Prefill | None = None
        self._batches: dict[Hashable, Batch] = {}
        self._pieces: list[AnswerPiece] = []

    @property
    def open_questions(self) -> int:
        """Number of questions that are not answered yet."""
        return len(self._questions)

    def submit(self, question: Question, adapter_folder: Path | None) -> None:
        """Take a question; its adapter is loaded from its folder when it is first needed.

        Whatever is wrong with it becomes a piece with an error. A question that is open already is not taken again.
        """
        if question.id in self._questions:
            return
        if not self._questions:
            self._most_cached = self._budget = self._fitting_tokens()
        self._submitted += 1
        owner = OpenQuestion(question, adapter_folder if question.adapter is not None else None, self._submitted)
        self._questions[question.id] = owner
        self._unread.append(owner)

    def cancel(self, question_id: str) -> None:
        """Forget a question, of which no further piece is returned; its place is free."""
        owner = self._questions.get(question_id)
        if owner is not None:
            with torch.inference_mode():
                self._close(owner)

    def step(self) -> list[AnswerPiece]:
        """Add a token to every answer, read prompts, and return what can be sent; nothing if there is no question.

        Raises:
            Exception: the model or its device has failed; the engine cannot be used any more.
        """
        with torch.inference_mode():
            for key, batch in list(self._batches.items()):
                if self._batches.get(key) is batch:  # it may have run out of memory with another one
                    self._with_memory(partial(self._advance, batch))
            self._read_questions()
            self._with_memory(self._read_prompts)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _fitting_tokens(self) -> int:
        """Return the number of tokens that fit into memory while nothing is cached."""
        return self._limits.cache_tokens or fitting_cache_tokens(self._adapters.model)

    # Questions

    def _read_questions(self) -> None:
        """Convert questions that were submitted to sequences, which wait; at least one, if there is one."""
        until = time.monotonic() + _READING_SECONDS
        while self._unread:
            owner = self._unread.popleft()
            if self._questions.get(owner.question.id) is owner:  # otherwise it was cancelled
                self._read_question(owner)
                if time.monotonic() >= until:
                    return

    def _read_question(self, owner: OpenQuestion) -> None:
        question = owner.question
        try:
            encoder = self._encoders.of_adapter(owner.adapter_folder)
            prompt = encoder.encode(question)
            most_tokens = self._limit_tokens(question, len(prompt))
        except AnswerFailure as failure:
            self._fail(owner, failure.code, failure.message)
            return
        owner.end_tokens = encoder.end_tokens(question)
        owner.sequences = [
            Sequence(owner, choice, prompt, most_tokens, encoder.new_text(question, prompt))
            for choice in range(question.n)
        ]
        self._waiting += owner.sequences

    def _limit_tokens(self, question: Question, length: int) -> int:
        """Return the maximum number of tokens of an answer to a prompt of `length` tokens.

        Raises:
            AnswerFailure: the prompt is too long.
        """
        longest = self._context - 1
        if length > longest:
            raise AnswerFailure(
                "context_length_exceeded",
                f"The prompt has {length:,} tokens, and this model takes at most {longest:,} and an answer of one "
                "token: shorten it.",
            )
        longest = self._most_cached - 1
        if length > longest:
            raise AnswerFailure(
                "context_length_exceeded",
                f"The prompt has {length:,} tokens, and the memory of this device has room for {max(longest, 0):,}: "
                "shorten it, or use a device with more memory.",
            )
        left = min(self._context, self._most_cached) - length
        return left if question.max_tokens is None else min(question.max_tokens, left)

    def _fail(self, owner: OpenQuestion, code: AnswerErrorCode, message: str) -> None:
        self._pieces.append(AnswerPiece(question_id=owner.question.id, error=AnswerError(code=code, message=message)))
        self._close(owner)

    def _close(self, owner: OpenQuestion) -> None:
        """Remove a question with all that is computed for it."""
        del self._questions[owner.question.id]
        for sequence in owner.sequences:
            self._take_out(sequence)

    def _extend(self, sequence: Sequence, token: int) -> bool:
        """Add a token, and return True if the answer goes on."""
        piece = sequence.extend(token)
        if piece is not None:
            self._pieces.append(piece)
        if piece is None or piece.finish_reason is None:
            return True
        owner = sequence.owner
        owner.sequences.remove(sequence)
        if not owner.sequences:
            del self._questions[owner.question.id]
        return False

    # Prompts

    def _read_prompts(self) -> None:
        """Read as many tokens of prompts as one step may; answers whose prompt is read get their first token."""
        most = left = self._prefill_tokens
        while left > 0:
            self._prefill = self._prefill or self._start_prefill()
            if self._prefill is None:
                return
            sequence, cache = self._prefill.sequence, self._prefill.cache
            tokens = self._prefill.next_tokens(most if self._network.reads_parts else len(sequence.tokens))
            if left < min(len(tokens), most):
                return  # the parts of a prompt, and thus their rounding, do not depend on other prompts
            left -= len(tokens)
            try:
                logits = self._network.next_logits([tokens], cache, [cache.length + len(tokens)], [sequence.adapter])
            except Exception as error:
                failure = classify_error(error)
                if failure.code in (OUT_OF_MEMORY, DEVICE_ERROR):
                    raise
                self._fail(sequence.owner, "internal", failure.message)
                continue
            if self._prefill.is_done:
                self._prefill = None
                self._join(sequence, cache, logits)

    def _start_prefill(self) -> _Prefill | None:
        """Return the sequence that has waited longest, if there is room for it."""
        while self._waiting:
            sequence = self._waiting[0]
            if len(self._running()) >= self._limits.rows or not self._load_adapter(sequence):
                return None
            if sequence.owner.question.id not in self._questions:
                continue  # its adapter could not be loaded
            if self._has_memory(sequence):
                self._waiting.pop(0)
                return _Prefill(sequence, RowCache(self._network.config, _expected_length(sequence)))
            if self._running():
                return None
            self._fail(sequence.owner, "out_of_memory", _OUT_OF_MEMORY)
        return None

    def _load_adapter(self, sequence: Sequence) -> bool:
        """Load the adapter of a sequence, or end its question; return False if there is no place for it now."""
        key, folder = sequence.adapter, sequence.owner.adapter_folder
        if key is None:
            return True
        in_use = {other.adapter for other in self._running() if other.adapter is not None}
        try:
            if folder is None:
                raise TrainingFailure("config_error", "The folder of the adapter is unknown: export its run again.")
            return self._adapters.load(key, folder, in_use)
        except TrainingFailure as failure:
            code: AnswerErrorCode = "out_of_memory" if failure.code == OUT_OF_MEMORY else "unusable_model"
            self._fail(sequence.owner, code, failure.message)
        return True

    def _has_memory(self, sequence: Sequence) -> bool:
        """Return True if a waiting sequence can be read and then join its batch."""
        batch, needed = self._batches.get(self._batch_key(sequence)), _expected_length(sequence)
        if batch is not None:
            needed += (len(batch.sequences) + 1) * batch.columns_with(needed)
        return needed <= self._budget_of(batch)

    def _join(self, sequence: Sequence, cache: RowCache, logits: torch.Tensor) -> None:
        """Add the first token to a sequence whose tokens are cached, and to others with the same prompt."""
        sequences = [sequence, *self._take_siblings(sequence)]
        tokens = choose_tokens(logits.expand(len(sequences), -1), [other.sampler for other in sequences])
        for other, token in zip(sequences, tokens, strict=True):
            if token is None:
                self._fail(sequence.owner, "unusable_model", _NOT_FINITE)
                return
            if self._extend(other, token) and not self._place(other, cache):
                self._requeue(other)

    def _take_siblings(self, sequence: Sequence) -> list[Sequence]:
        """Take the other choices of a question out of those that wait, if its prompt was read for the first."""
        if len(sequence.tokens) > sequence.prompt_length or not self._network.batches_rows:
            return []
        free = self._limits.rows - len(self._running()) - 1
        siblings = [
            other
            for other in self._waiting
            if other.owner is sequence.owner and len(other.tokens) == other.prompt_length
        ][:free]
        for other in siblings:
            self._waiting.remove(other)
        return siblings

    def _place(self, sequence: Sequence, cache: RowCache) -> bool:
        """Put a sequence into its batch; return False if there is no memory for it, or it has to be read again."""
        if self._network.changes_at(len(sequence.tokens)):
            return False
        key = self._batch_key(sequence)
        batch = self._batches.get(key)
        if batch is None:
            self._batches[key] = Batch(self._network, cache, sequence)
            return True
        if not batch.reserve(len(batch.sequences) + 1, batch.columns_with(cache.length), self._budget_of(batch)):
            return False
        batch.append(sequence, cache)
        return True

    def _batch_key(self, sequence: Sequence) -> Hashable:
        """Return what all sequences of a batch have in common."""
        if not self._network.batches_rows:
            return sequence
        mixes = sequence.adapter is None or self._adapters.mixes(sequence.adapter)
        return None if mixes else sequence.adapter, self._network.is_long(len(sequence.tokens))

    # Batches

    def _advance(self, batch: Batch) -> None:
        """Add a token to each sequence of a batch; the youngest sequences leave if the memory is too small."""
        for sequence in [each for each in batch.sequences if self._network.changes_at(len(each.tokens))]:
            self._requeue(sequence)
        while batch.sequences and not batch.reserve(len(batch.sequences), batch.cache.length, self._budget_of(batch)):
            if any(other.shrink() for other in self._batches.values() if other is not batch):
                continue
            running = self._running()
            youngest = max(running, key=lambda sequence: sequence.age)
            if len(running) == 1:
                self._fail(youngest.owner, "out_of_memory", _OUT_OF_MEMORY)
            else:
                self._requeue(youngest)
        if not batch.sequences:
            return
        sequences = list(batch.sequences)
        tokens = choose_tokens(batch.next_logits(), [sequence.sampler for sequence in sequences])
        failed: list[OpenQuestion] = []
        ended: list[Sequence] = []
        for sequence, token in zip(sequences, tokens, strict=True):
            if token is None:
                failed.append(sequence.owner)
            elif not self._extend(sequence, token):
                ended.append(sequence)
        for sequence in ended:
            self._take_out(sequence)
        for owner in dict.fromkeys(failed):
            self._fail(owner, "unusable_model", _NOT_FINITE)

    def _running(self) -> list[Sequence]:
        """Return the sequences that are in memory."""
        sequences = [sequence for batch in self._batches.values() for sequence in batch.sequences]
        return sequences if self._prefill is None else [*sequences, self._prefill.sequence]

    def _requeue(self, sequence: Sequence) -> None:
        """Let a sequence wait until its tokens are read again, with those of its answer."""
        self._take_out(sequence)
        insort(self._waiting, sequence, key=lambda waiting: waiting.age)

    def _take_out(self, sequence: Sequence) -> None:
        """Remove a sequence from wherever it is."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if self._prefill is not None and self._prefill.sequence is sequence:
            self._prefill = None
        for key, batch in list(self._batches.items()):
            if sequence in batch.sequences:
                batch.remove(sequence)
                if not batch.sequences:
                    del self._batches[key]

    # Memory

    def _budget_of(self, batch: Batch | None) -> int:
        """Return the number of tokens that a batch may cache beside the other batches and a prompt."""
        others = sum(other.cache.size for other in self._batches.values() if other is not batch)
        return self._budget - others - (0 if self._prefill is None else self._prefill.cache.size)

    def _with_memory(self, compute: Callable[[], None]) -> None:
        """Compute; without memory for it, start over with a smaller budget, in which the youngest questions wait."""
        try:
            compute()
            return
        except Exception as error:
            if classify_error(error).code != OUT_OF_MEMORY:
                raise
        # Outside of the handler, whose exception refers to the tensors of the pass.
        self._budget = (self._budget - self._budget_of(None)) // 2
        for batch in self._batches.values():
            batch.cache.free()
        self._batches.clear()
        self._prefill = None
        self._waiting = [sequence for owner in self._questions.values() for sequence in owner.sequences]
        if self._network.device.type == "cuda":
            torch.cuda.empty_cache()


def _expected_length(sequence: Sequence) -> int:
    """Return the number of tokens that a sequence has soon."""
    return len(sequence.tokens) + min(sequence.remaining, _MARGIN)
