"""Resource ids: a prefix and 26 lower-case base32 characters that sort by time of creation."""

import os
import re
import threading
from datetime import datetime

from app.infra.clock import SteadyClock

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford: no i, l, o, u
_PATTERN = re.compile(r"[a-z]+_[0-9a-hjkmnp-tv-z]{26}")
_MAX_LEAD_SECONDS = 7200
"""Seconds by which ids may be ahead of the clock after it was set back, so that they still sort by creation."""
_lock = threading.Lock()
_clock = SteadyClock()
_last = 0


def new_id(prefix: str) -> str:
    """Return a new id such as `run_01k…`: 48 bits of milliseconds, 80 random bits.

    Ids increase within a process, unless the clock was ahead by hours for longer than `SteadyClock` ignores.
    """
    global _last
    with _lock:
        value = int(_clock.now() * 1000) << 80 | int.from_bytes(os.urandom(10))
        # Ids must sort by creation even within one millisecond or after the clock is set back.
        if value <= _last <= value + (_MAX_LEAD_SECONDS * 1000 << 80):
            value = _last + 1
        _last = value
    return f"{prefix}_" + _encode_base32(value)


def _encode_base32(value: int) -> str:
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5))


def id_at(prefix: str, moment: datetime) -> str:
    """Return the smallest id that could have been created at `moment`, as a bound for time ranges."""
    value = max(0, int(moment.timestamp() * 1000)) << 80  # no ids exist from before 1970
    return f"{prefix}_" + _encode_base32(value)


def is_id(text: str, prefix: str) -> bool:
    """Return True if `text` has the form of an id with this prefix."""
    return text.startswith(prefix + "_") and _PATTERN.fullmatch(text) is not None
