"""Names of the files in an attempt's folder that record its training, and the form of its complete log.

Line of a complete log: time in UTC, stream, level and text, separated by spaces.
"""

import re

RECORDS = frozenset({"metrics.jsonl", "distributions.jsonl", "memory_profile.jsonl", "memory_snapshot.pickle"})
_TENSORBOARD = "tensorboard/"
COMPLETE_LOG = "log"
"""Name of the complete log of the lead, without the end of its file names."""
_LOG_FILE = re.compile(r"log(?:-rank-[0-9]{1,6})?(?:\.1)?\.txt\.gz")
LOG_TEXT_BYTES = 512 * 2**20
"""Bytes of text in one file of a complete log; the file before it is kept too, older ones are removed."""


def is_record(path: str) -> bool:
    """Return True for a file in which an attempt records its training, such as `metrics.jsonl` or its complete log."""
    return path in RECORDS or path.startswith(_TENSORBOARD) or is_log_file(path)


def log_files(name: str) -> tuple[str, str]:
    """Return the names of the files of a complete log, compressed with gzip: the older one, and the one that grows."""
    return f"{name}.1.txt.gz", f"{name}.txt.gz"


def part_log(first_rank: int) -> str:
    """Return the name of the complete log of the ranks on another host than the lead's."""
    return f"{COMPLETE_LOG}-rank-{first_rank}"


def is_log_file(path: str) -> bool:
    """Return True for a file of a complete log."""
    return _LOG_FILE.fullmatch(path) is not None
