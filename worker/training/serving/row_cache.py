"""Keys and values of the rows of a batch, which rows join and leave while the others are extended."""

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, DynamicLayer, DynamicSlidingWindowLayer


def supports_rows(config: Any) -> bool:
    """Return True if the layers of a model keep keys and values of tokens, and nothing else.

    A state that sums up all tokens before, as that of linear attention, would contain the padding of a shorter row.
    """
    kinds = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
    return all(type(layer) in kinds for layer in DynamicCache(config=config).layers)


class RowCache:
    """Cache whose rows end in the same column, as those of a batch that is padded at its start.

    Tokens are written in place into the columns that follow, and layers get a view of those in use, so that neither a
    new token nor a row that leaves costs a copy of the others. Layers with a sliding window keep all columns too.

    A model that `supports_rows` rejects gets the cache of transformers, to which no row can be added.
    """

    def __init__(self, config: Any, columns: int) -> None:
        """Create an empty cache of one row, with room for `columns` tokens."""
        self._place = _Place(columns)
        self._layers: list[_Layer] = []
        states: Cache = DynamicCache(config=config)
        if supports_rows(config):
            states = Cache(layers=[self._replace_layer(layer) for layer in states.layers])
        self.states: Cache | None = states
        """Argument of the model's forward pass."""

    def _replace_layer(self, layer: Any) -> Any:
        if type(layer) is DummyLayer:
            return layer
        self._layers.append(_Layer(self._place, getattr(layer, "sliding_window", None)))
        return self._layers[-1]

    @property
    def rows(self) -> int:
        """Number of rows in use."""
        return self._place.rows

    @property
    def length(self) -> int:
        """Number of columns in use, those of the longest row."""
        return self._place.end - self._place.start

    @property
    def size(self) -> int:
        """Number of tokens for which memory is allocated."""
        return self._place.most_rows * self._place.most_columns

    def advance(self, tokens: int) -> None:
        """Count the columns of a forward pass that has ended; before, it may be repeated."""
        self._place.end += tokens

    def free(self) -> None:
        """Free the memory of a cache that is not used any more, but may still be referred to."""
        self.states, self._layers = None, []

    def has_room(self, rows: int, before: int, after: int) -> bool:
        """Return True if it has room for so many rows, with free columns before and after those in use."""
        place = self._place
        return rows <= place.most_rows and before <= place.start and place.end + after <= place.most_columns

    def resize(self, rows: int, before: int, columns: int) -> None:
        """Move the content into new memory for `rows` of `columns` tokens each, with free columns before it."""
        old, length = (self._place.start, self._place.end), self.length
        for layer in self._layers:
            layer.move(rows, columns, old, before)
        self._place.most_rows, self._place.most_columns = rows, columns
        self._place.start, self._place.end = before, before + length

    def append(self, other: "RowCache") -> None:
        """Add the first row of a cache, which may be this one, whose rows then have the same length.

        There must be room for it.
        """
        place, length = self._place, other.length
        first = other._place.start
        start = min(place.start, place.end - length)
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            mine.clear(slice(0, place.rows), slice(start, place.start))
            mine.clear(slice(place.rows, place.rows + 1), slice(start, place.end - length))
            mine.write_row(place.rows, slice(place.end - length, place.end), theirs, 0, slice(first, first + length))
        place.start = start
        place.rows += 1

    def remove(self, row: int, longest: int) -> None:
        """Remove a row, whose number the last row gets; `longest` is the length of the longest row that remains."""
        place = self._place
        place.rows -= 1
        if row != place.rows:
            columns = slice(place.start, place.end)
            for layer in self._layers:
                layer.write_row(row, columns, layer, place.rows, columns)
        place.start = place.end - longest


class _Place:
    """Rows and columns in use, the same in all layers, and those for which there is memory."""

    def __init__(self, columns: int) -> None:
        self.rows = self.most_rows = 1
        self.most_columns = columns
        self.start = self.end = 0


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer; shape (rows, heads, columns, width)."""

    def __init__(self, place: _Place, window: int | None) -> None:
        super().__init__()
        self._place = place
        self._window = window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        place = self._place
        self.keys, self.values = (
            _allocate(states, place.most_rows, place.most_columns) for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place, tokens = self._place, key_states.shape[-2]
        first, end = place.start + self._hidden_columns(), place.end + tokens
        self.keys[: place.rows, :, place.end : end] = key_states
        self.values[: place.rows, :, place.end : end] = value_states
        return self.keys[: place.rows, :, first:end], self.values[: place.rows, :, first:end]

    def get_seq_length(self) -> int:
        return self._place.end - self._place.start

    def get_max_length(self) -> int:
        return -1 if self._window is None else self._window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        hidden = self._hidden_columns()
        return self.get_seq_length() - hidden + query_length, hidden

    def _hidden_columns(self) -> int:
        """Return the number of columns in use that are before the window of the next token."""
        return 0 if self._window is None else max(self.get_seq_length() - self._window + 1, 0)

    def move(self, rows: int, columns: int, used: tuple[int, int], before: int) -> None:
        """Move the columns in use to new memory, where `before` columns precede them."""
        if not self.is_initialized:
            return
        start, end = used
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = _allocate(old, rows, columns)
            rows_in_use = slice(0, self._place.rows)
            new[rows_in_use, :, before : before + end - start] = old[rows_in_use, :, start:end]
            setattr(self, name, new)
            del old  # before memory is allocated for the next

    def clear(self, rows: slice, columns: slice) -> None:
        """Set columns to zero: padding is multiplied by a probability of zero, and must be finite."""
        if self.is_initialized and columns.start < columns.stop:
            self.keys[rows, :, columns] = 0
            self.values[rows, :, columns] = 0

    def write_row(self, row: int, columns: slice, source: "_Layer", source_row: int, source_columns: slice) -> None:
        """Copy columns of a row from a layer, which may be this one."""
        if source.is_initialized:
            if not self.is_initialized:
                self.lazy_initialization(source.keys, source.values)
            self.keys[row, :, columns] = source.keys[source_row, :, source_columns]
            self.values[row, :, columns] = source.values[source_row, :, source_columns]


def _allocate(states: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return memory for keys or values as `states`, of zeros, since padding must be finite."""
    heads, width = states.shape[1], states.shape[3]
    return torch.zeros((rows, heads, columns, width), dtype=states.dtype, device=states.device)
