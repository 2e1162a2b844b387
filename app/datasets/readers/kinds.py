"""Which kind of file somebody sends: told by its name, else by its first bytes."""

import re
from pathlib import Path
from typing import Literal, Protocol, get_args

Kind = Literal["jsonl", "json", "csv", "parquet"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HEAD_BYTES = 4096
"""How many of the first bytes decide, where the file has so many."""
_SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_DOCUMENT = re.compile(rb'\s*(?:\[|\{\s*"data"\s*:\s*\[)')


class Reader(Protocol):
    """Reads one file and hands its rows to `Rows`."""

    def feed(self, data: bytes) -> None:
        """The next bytes of the file."""

    def end(self) -> None:
        """The file has ended."""

    def more(self) -> bool:
        """After the end, read on for a moment: False once all rows were handed on."""

    def close(self) -> None:
        """Let go of what it holds, wherever it is."""


def kind_of(name: str, head: bytes) -> Kind | None:
    """The kind of a file with this name that begins with `head`; None where neither tells."""
    suffix = Path(name.lower()).suffix
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    if head.startswith(b"PAR1"):
        return "parquet"
    # Many a file of JSON lines is called .json.
    if suffix == ".json":
        return "json" if _DOCUMENT.match(head) else "jsonl"
    start = head.lstrip()[:1]
    return "json" if start == b"[" else "jsonl" if start in (b"{", b"") else None
