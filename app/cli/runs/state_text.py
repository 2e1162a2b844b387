"""Statuses of runs in the words of the dashboard, and predictions as text: `finishes in about 2 h 10 min`."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anneal.contracts.schemas.runs.reads import Prediction

_WORDS = {"initializing": "starting", "checkpointing": "saving", "cancelled": "stopped"}
_STATUSES = {word: status for status, word in _WORDS.items()}


def status_text(status: str) -> str:
    """Return the word for a status of the API."""
    return _WORDS.get(status, status)


def status_of(text: str) -> str:
    """Return the status of the API for a word; other text unchanged."""
    return _STATUSES.get(text.lower(), text)


def eta_text(prediction: "Prediction | None") -> str:
    """Format the predicted start, if it is in the future, and finish; empty without a prediction."""
    if prediction is None:
        return ""
    now = datetime.now(UTC)
    parts = []
    if prediction.start_at is not None and prediction.start_at > now:
        parts.append(f"starts {_duration_text((prediction.start_at - now).total_seconds())}")
    if prediction.finish_at is not None:
        parts.append(f"finishes {_duration_text((prediction.finish_at - now).total_seconds())}")
    return ", ".join(parts)


def _duration_text(seconds: float) -> str:
    """Format a duration with the precision of the prediction."""
    if seconds < 1:
        return "any moment"
    if seconds < 90:
        return f"in about {round(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"in about {minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 10:
        return f"in about {hours} h {minutes} min" if minutes else f"in about {hours} h"
    if hours < 48:
        return f"in about {hours} h"
    return f"in about {round(hours / 24)} days"
