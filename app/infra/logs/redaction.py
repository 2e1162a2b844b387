"""Redaction of credentials in text of other programs, such as error messages of libraries."""

import re

_SECRET = re.compile(
    r"(\banneal_)[A-Za-z0-9_-]{43}"  # key of the API
    r"|(\bpassword=\\?[\"']?)[^\s\"'\\&,;)}]+",  # of a connection string
    re.IGNORECASE,
)
_OF_URL = re.compile(
    r"(://[^\s:/@]*:)[^\s@]+(?=@)"  # password of a URL, which may contain a slash
    r"|(://)[^\s:/@]+(?=@)"  # token of a URL
)
# Up to the last @ of a word only: behind it, each of many URLs would be searched to the end of the text.
_WORD = re.compile(r"\S+")


def redact_secrets(text: str) -> str:
    """Replace API keys, credentials of URLs and passwords of connection strings by `[redacted]`."""
    if "@" in text:
        text = _WORD.sub(_without_credentials, text)
    return _SECRET.sub(_redact_match, text)


def _without_credentials(word: re.Match[str]) -> str:
    before, at, after = word[0].rpartition("@")
    return _OF_URL.sub(_redact_match, before + at) + after


def _redact_match(match: re.Match[str]) -> str:
    return f"{next(filter(None, match.groups()))}[redacted]"
