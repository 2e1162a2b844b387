"""Text of untrusted origin in a form that a terminal shows and does not obey."""

import re

_ANSI = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colors, cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC: titles, links
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"  # strings for the terminal
    r"|\x1b[ -/]*[0-~]?"
)

# Eight-bit controls, and the marks that change the reading direction and so hide what a line really says.
_INVISIBLE = [*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_VISIBLE = {code: chr(0x2400 + code) for code in range(0x20) if code != 0x09} | {0x7F: "\u2421"}
_VISIBLE |= {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _INVISIBLE}
_VISIBLE |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
_ESCAPED = {code: f"\\u{code:04x}" for code in [0x7F, *_INVISIBLE, *range(0xD800, 0xE000)]}


def plain_number(value: float) -> str:
    """Format a number with four digits; larger ones in whole, never as 1.2e+04."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def plain_line(text: str) -> str:
    """Return `text` as one line: without escape sequences, and with its other control characters made visible."""
    return _ANSI.sub("", text).translate(_VISIBLE)


def plain_text(text: str) -> str:
    """Return `text` like `plain_line`, but with its line ends."""
    return "\n".join(plain_line(line) for line in text.split("\n"))


def plain_json(document: str) -> str:
    """Return a JSON document of the same value, in which the characters that a terminal obeys are escaped."""
    return document.translate(_ESCAPED)


def is_plain_path(path: str) -> bool:
    """Return True for a path in UTF-8 without control characters, direction marks and backslashes."""
    return plain_line(path) == path and not {"\t", "\\"} & set(path)
