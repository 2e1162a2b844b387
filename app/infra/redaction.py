"""Redaction of credentials in text of other programs, such as error messages of libraries."""

import re

_SECRET = re.compile(
    r"(\banneal_)[A-Za-z0-9_-]{43}"  # key of the API
    r"|(://[^\s:/@]*:)[^\s@]+(?=@)"  # password of a URL, which may contain a slash
    r"|(://)[^\s:/@]+(?=@)"  # token of a URL
    r"|(\bpassword=\\?[\"']?)[^\s\"'\\&,;)}]+",  # of a connection string
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """Replace API keys, credentials of URLs and passwords of connection strings by `[redacted]`."""
    return _SECRET.sub(lambda found: f"{next(filter(None, found.groups()))}[redacted]", text)
