"""File type detection, by name and otherwise by the first bytes."""

import re
from pathlib import Path
from typing import Literal, Protocol, get_args

FileType = Literal["jsonl", "json", "csv", "tsv", "parquet"]
KINDS: tuple[FileType, ...] = get_args(FileType)
HEAD_BYTES = 4096
"""Number of first bytes used for detection, if the file has that many."""
_SUFFIXES: dict[str, FileType] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_DOCUMENT = re.compile(rb'\s*(?:\[|\{\s*"data"\s*:\s*\[)')


class Reader(Protocol):
    """Interface of a reader that parses one file and passes its rows to `RowWriter`."""

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the file."""

    def end_file(self) -> None:
        """Handle the end of the file."""

    def read_more(self) -> bool:
        """Continue reading after the end of the input for a short time; return False once all rows were passed on."""

    def close(self) -> None:
        """Release all resources, in any state."""


def kind_of(name: str, head: bytes) -> FileType | None:
    """Return the type of a file from its name and its first bytes `head`, or None if neither determines it."""
    suffix = Path(name.lower().removesuffix(".gz")).suffix
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    if head.startswith(b"PAR1"):
        return "parquet"
    # Many JSONL files are named .json.
    if suffix == ".json":
        return "json" if _DOCUMENT.match(head) else "jsonl"
    start = head.lstrip()[:1]
    return "json" if start == b"[" else "jsonl" if start in (b"{", b"") else None
