"""Redaction of a training process's output: masks the secrets it received and text that looks like a key."""

import base64
import json
import re
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

MASK = "[redacted]"
LONGEST = 512
"""Number of characters also removed at the end of a cut text, which may be the beginning of a credential."""

_LOOKS_LIKE_A_KEY = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"
    r"|\banneal_[A-Za-z0-9_-]{43}"
    r"|(?<=\b[Bb]earer )[A-Za-z0-9._~+/=-]{8,}"
    r"|(?<=://)[^\s/@:]{1,100}:[^\s/@]{1,400}(?=@)"
)


class Redactor:
    """Redactor of credentials in texts; `hide_values` adds values to look for."""

    def __init__(self) -> None:
        self._forms: list[str] = []
        self.longest = LONGEST
        """Number of characters at the end of a cut text that may be the beginning of a credential."""

    def hide_values(self, values: Iterable[str]) -> None:
        """Mask these values from now on, also in the encodings in which programs print them."""
        forms = {form for value in values for form in _encoded_forms(value)}
        self._forms = sorted({*self._forms, *forms}, key=len, reverse=True)
        self.longest = max([LONGEST, *map(len, self._forms)])

    def __call__(self, text: str) -> str:
        """Return the text with its credentials masked."""
        for form in self._forms:
            if form in text:
                text = text.replace(form, MASK)
        # Nearly every line ends here; the expression takes ten times as long as these searches together.
        if "://" in text or "earer " in text or ("_" in text and ("hf_" in text or "anneal_" in text)):
            text = _LOOKS_LIKE_A_KEY.sub(MASK, text)
        return text

    def cut_text(self, text: str, most: int) -> str:
        """Return at most `most` characters of a text, without a credential or the beginning of one."""
        if len(text) <= most + self.longest:
            return self(text)[:most]
        masked = self(text[: most + self.longest])
        return masked[: max(min(most, len(masked) - self.longest), 0)]


def _encoded_forms(value: str) -> set[str]:
    """Return the forms of a secret: plain, quoted for URLs, JSON and Python, hexadecimal, and base64 at any offset."""
    raw = value.encode()
    forms = {value, quote(value, safe=""), quote_plus(value), json.dumps(value)[1:-1], repr(value)[1:-1], raw.hex()}
    for offset in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            encoded = encode(b"\0" * offset + raw).decode().rstrip("=")
            # The characters at both ends mix with the bytes next to the secret.
            first = -(-offset * 8 // 6)
            whole = (offset + len(raw)) * 8 // 6
            forms.add(encoded[first:whole])
    return {form for form in forms if len(form) >= 8}
