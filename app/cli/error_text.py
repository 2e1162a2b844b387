"""Errors of the service as lines for a terminal: each problem once, and commands in place of HTTP calls."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anneal.client.errors import AnnealError

_COMMANDS = (
    (r"GET /v1/runs/([^/\s]+)/actions", r"`anneal actions list \1`"),
    (r"GET /v1/runs/([^/\s]+)/checkpoints", r"`anneal runs checkpoints \1`"),
    (r"GET /v1/webhooks/\{id\}/deliveries", "`anneal webhooks deliveries`"),
    (r"`?GET /openai/v1/models`? lists .*?(?=\.$)", "`anneal models list` and `anneal runs list` list them"),
    (r'PATCH it with \{"enabled": true\} first', "edit it with `--enable` first"),
    (r"GET …/(checkpoints|logs)\b", r"`anneal runs \1`"),
    (r"GET /v1/runs\?status=(\w+)", r"`anneal runs list --status \1`"),
    (r"GET /v1/(actions|datasets|experiments|keys|runs|secrets|webhooks|workers)\b", r"`anneal \1 list`"),
    (r"GET /v1/backends\b", "`anneal runs create --help`"),
    (r"POST /v1/datasets\b", "`anneal datasets upload`"),
    (r"POST /v1/experiments\b", "`anneal experiments create`"),
    (r"`POST /v1/runs/estimate`", "`anneal runs estimate`"),
    (r"POST /v1/runs/predict\b", "`anneal predict`"),
    (r", or POST /v1/runs/delete with these IDs", ""),
    (r'PATCH it with \{"pinned": false\} first', "unpin it first with `anneal runs unpin`"),
    (r"`\?cascade=true`", "`--with-runs`"),
    (r"send `file_format`", "add `--file-format`"),
    (r"set the field `format` before the file", "add `--format`"),
    (r"use `columns` to rename yours", "add `--column OURS=THEIRS` to rename yours"),
    (r"[Cc]orrect it and send the request again", "Correct it and try again"),
    (r"send the request again", "try again"),
)
"""Patterns of what the service's sentences say to callers of its HTTP API, and what a user of the commands does."""


def in_commands(text: str) -> str:
    """Return a sentence of the service with the matching commands in place of HTTP calls."""
    for pattern, command in _COMMANDS:
        text = re.sub(pattern, command, text)
    return text


def error_lines(error: "AnnealError") -> list[str]:
    """Return the sentence of an error, and a line for each further problem."""
    detail, items = error.detail, error.errors
    if len(items) > 1 and items[0].message.rstrip(".") in detail:  # it quotes the first one only
        detail = f"{len(items)} values are invalid. Correct them and try again."
    named = [f"  {item.field}: {item.message}" if item.field else f"  {item.message}" for item in items]
    others = [line for line, item in zip(named, items, strict=True) if item.message.rstrip(".") not in detail]
    return [in_commands(line) for line in (detail, *others)]
