"""Remarks on rows that are left out, cut, or teach nothing."""

from typing import TypedDict

_MAX_EXAMPLES = 10


class Remark(TypedDict):
    """Remark on some rows of a file; part of the cached facts about tokenized data."""

    reason: str
    """Sentence for users, with both counts."""
    count: int
    total: int
    """Number of rows that were considered."""
    examples: list[int]
    """Numbers of the first of the rows, from 0."""


class NotedRows:
    """Counter of rows that a remark is about."""

    def __init__(self) -> None:
        self.count = 0
        self._examples: list[int] = []

    def add(self, number: int) -> None:
        """Note the row with this number."""
        self.count += 1
        if len(self._examples) < _MAX_EXAMPLES:
            self._examples.append(number)

    def remarks(self, total: int, reason: str) -> list[Remark]:
        """Return the remark, or none if there is no such row; `reason` contains `{n}`, the counts in words."""
        if not self.count:
            return []
        sentence = reason.replace("{n}", f"{self.count} of {total}")
        return [{"reason": sentence, "count": self.count, "total": total, "examples": self._examples}]
