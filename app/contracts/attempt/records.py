"""Names of the files in an attempt's folder that record its training."""

RECORDS = frozenset({"metrics.jsonl", "distributions.jsonl", "memory_profile.jsonl", "memory_snapshot.pickle"})
_TENSORBOARD = "tensorboard/"


def is_record(path: str) -> bool:
    """Return True for a file in which an attempt records its training, such as `metrics.jsonl`."""
    return path in RECORDS or path.startswith(_TENSORBOARD)
