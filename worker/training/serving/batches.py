"""Forward passes for the sequences of a batch."""

import inspect
from typing import Any

import torch
from transformers import SuppressTokensLogitsProcessor

from worker.training.failures import TrainingFailure
from worker.training.serving.adapters import AdapterSet
from worker.training.serving.row_cache import RowCache, supports_rows
from worker.training.serving.sequences import Sequence

_LEAST_SPARE = 64
"""Columns that a cache gets at least beyond those in use, so that it is not copied for every token."""


class Network:
    """Model as a function from tokens and what is cached of those before them to the logits of the next token."""

    def __init__(self, adapters: AdapterSet) -> None:
        """Prepare the model of a set of adapters.

        Raises:
            TrainingFailure: `config_error`: it takes no cache.
        """
        self._adapters, self._model = adapters, adapters.model
        self.config = self._model.config.get_text_config(decoder=True)
        self.device: torch.device = self._model.device
        parameters = inspect.signature(self._model.forward).parameters
        names = [name for name in ("past_key_values", "cache_params") if name in parameters]
        if not names:
            raise TrainingFailure(
                "config_error",
                f"A model of the kind `{self.config.model_type}` generates without a cache of transformers, and cannot "
                "answer here: predict over a dataset instead.",
            )
        self._cache_name = names[0]
        self._takes_positions = "position_ids" in parameters
        self._keeps_logits = "logits_to_keep" in parameters
        # Of what the model's own configuration publishes for generation, as predictions have it.
        suppressed = getattr(self._model.generation_config, "suppress_tokens", None)
        self._suppress = SuppressTokensLogitsProcessor(suppressed, device=self.device) if suppressed else None
        self.batches_rows = names[0] == "past_key_values" and supports_rows(self.config)
        """False if each sequence needs a batch of its own."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        is_long_rope = rope.get("rope_type") == "longrope"
        self._switch: int | None = rope["original_max_position_embeddings"] if is_long_rope else None
        """Length above which a model computes all positions of a batch in another way; None: it does not."""
        self.reads_parts = self.batches_rows and self._switch is None
        """False if a prompt has to be read in one pass.

        With a state in place of keys and values, some models forget it when they read more than one token.
        """

    def is_long(self, length: int) -> bool:
        """Return True if a sequence of this length may not be in a batch with shorter ones."""
        return self._switch is not None and length > self._switch

    def changes_at(self, length: int) -> bool:
        """Return True if a sequence has to be read again when it has this length."""
        return self.is_long(length) and not self.is_long(length - 1)

    def next_logits(
        self, tokens: list[list[int]], cache: RowCache, lengths: list[int], adapters: list[str | None]
    ) -> torch.Tensor:
        """Compute a pass, and return the logits that follow the last token of each row.

        Args:
            tokens: next tokens of each row, as many for each.
            cache: what is known of the tokens before them.
            lengths: number of tokens of each row with these.
            adapters: adapter of each row.

        Returns:
            Logits in float32; shape (rows, tokens of the vocabulary).
        """
        self._adapters.activate(adapters)
        ids = torch.tensor(tokens, device=self.device)
        columns = cache.length + ids.shape[1]
        of_rows = torch.tensor(lengths, device=self.device).unsqueeze(1)
        inputs: dict[str, Any] = {"input_ids": ids, self._cache_name: cache.states, "use_cache": True}
        is_padded = min(lengths) < columns
        if is_padded or not self._takes_positions:
            inputs["attention_mask"] = (torch.arange(columns, device=self.device) >= columns - of_rows).long()
        if self._takes_positions:
            inputs["position_ids"] = torch.arange(-ids.shape[1], 0, device=self.device) + of_rows
        if self._keeps_logits:
            inputs["logits_to_keep"] = 1
        logits: torch.Tensor = self._model(**inputs).logits[:, -1].float()
        cache.advance(ids.shape[1])
        return logits if self._suppress is None else self._suppress(None, logits)


class Batch:
    """Sequences that are extended together, each but its last token cached in a row."""

    def __init__(self, network: Network, cache: RowCache, first: Sequence) -> None:
        """Create a batch of one sequence, whose tokens are in `cache`."""
        self._network = network
        self.cache = cache
        self.sequences = [first]

    def columns_with(self, length: int) -> int:
        """Return the number of columns that are used once a row of `length` tokens has joined."""
        return max(self.cache.length, length)

    def reserve(self, rows: int, columns: int, budget: int) -> bool:
        """Make room for more rows, and for one column more than `columns`, within a budget of tokens.

        Returns:
            False if the budget is too small for it.
        """
        cache, most = self.cache, columns + 1
        before = columns - cache.length
        if cache.has_room(rows, before, 1):
            return True
        if rows * most > budget:
            return False
        longest = max(len(sequence.tokens) + sequence.remaining for sequence in self.sequences)
        roomy_rows = 1 << (rows - 1).bit_length()
        roomy = min(most + max(_LEAST_SPARE, most // 4), max(longest, most))
        rows = roomy_rows if roomy_rows * most <= budget else rows
        cache.resize(rows, before, max(min(roomy, budget // rows), most))
        return True

    def shrink(self) -> bool:
        """Free the memory that the cache has beyond what the next pass needs; return False if there is none."""
        rows, columns = len(self.sequences), self.cache.length + 1
        if self.cache.size <= rows * columns:
            return False
        self.cache.resize(rows, 0, columns)
        return True

    def append(self, sequence: Sequence, cache: RowCache) -> None:
        """Add a sequence whose tokens are in the first row of `cache`, for which there is room."""
        self.cache.append(cache)
        self.sequences.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; one that remains takes its row."""
        row = self.sequences.index(sequence)
        last = self.sequences.pop()
        if row < len(self.sequences):
            self.sequences[row] = last
        if self.sequences:
            self.cache.remove(row, max(len(other.tokens) for other in self.sequences) - 1)

    def next_logits(self) -> torch.Tensor:
        """Compute the last token of each sequence, and return the logits of the next."""
        sequences = self.sequences
        return self._network.next_logits(
            [sequence.tokens[-1:] for sequence in sequences],
            self.cache,
            [len(sequence.tokens) for sequence in sequences],
            [sequence.adapter for sequence in sequences],
        )
