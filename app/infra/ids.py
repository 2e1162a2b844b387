"""Resource ids: a prefix and 26 lower-case base32 characters that sort by time of creation."""

import os
import re
import threading
import time
from datetime import datetime

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford: no i, l, o, u
_PATTERN = re.compile(r"[a-z]+_[0-9a-hjkmnp-tv-z]{26}")
_lock = threading.Lock()
_last = 0


def new_id(prefix: str) -> str:
    """Return a new id such as `run_01k…`: 48 bits of milliseconds, 80 random bits, increasing within a process."""
    global _last
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    with _lock:
        # Ids must sort by creation even within one millisecond or after the clock is set back.
        value = _last = value if value > _last else _last + 1
    return f"{prefix}_" + _encode(value)


def _encode(value: int) -> str:
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5))


def id_at(prefix: str, moment: datetime) -> str:
    """Return the smallest id that could have been created at `moment`, as a bound for time ranges."""
    value = max(0, int(moment.timestamp() * 1000)) << 80  # no ids exist from before 1970
    return f"{prefix}_" + _encode(value)


def is_id(text: str, prefix: str) -> bool:
    """Return True if `text` has the form of an id with this prefix."""
    return text.startswith(prefix + "_") and _PATTERN.fullmatch(text) is not None
