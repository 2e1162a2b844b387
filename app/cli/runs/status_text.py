"""Statuses of runs in the words of the dashboard."""

_WORDS = {"initializing": "starting", "checkpointing": "saving", "cancelled": "stopped"}
_STATUSES = {word: status for status, word in _WORDS.items()}


def status_text(status: str) -> str:
    """Return the word for a status of the API."""
    return _WORDS.get(status, status)


def status_of(text: str) -> str:
    """Return the status of the API for a word; other text unchanged."""
    return _STATUSES.get(text.lower(), text)
