"""Logging of the API and workers: console lines or JSON, with the ids of the request or run."""

import json
import logging
import sys
from collections.abc import Callable, MutableMapping
from contextvars import Context, copy_context
from typing import Any, Literal

from app.infra.logs.lean_structlog import (
    ExtraAdder,
    ProcessorFormatter,
    TimeStamper,
    add_log_level,
    add_logger_name,
    bind_contextvars,
    format_exc_info,
    merge_contextvars,
)
from app.infra.logs.redaction import redact_secrets

Format = Literal["json", "console"]
EventDict = MutableMapping[str, Any]
"""Fields of a log record."""

_LEADING_FIELDS = ("timestamp", "level", "logger", "event")
_ONLY_WARNINGS = ("alembic", "celery", "httpcore", "httpx", "kombu")


def set_up(chosen: Format | None) -> None:
    """Log to standard error in the chosen format; None selects `console` on a terminal and `json` otherwise."""
    render = (
        _render_console if (chosen or ("console" if sys.stderr.isatty() else "json")) == "console" else _render_json
    )
    handler = logging.StreamHandler()
    handler.setFormatter(_build_formatter(render))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in _ONLY_WARNINGS:
        logging.getLogger(name).setLevel(logging.WARNING)


def run_context(run_id: str) -> Context:
    """Return a context for a task whose log records belong to a run, not to the request that started it."""
    context = Context()
    context.run(bind_contextvars, run_id=run_id)
    return context


def with_current_context(work: Callable[[], None]) -> Callable[[], None]:
    """Return `work` bound to the current context, so that a new thread logs with the same ids."""
    context = copy_context()
    return lambda: context.run(work)


class _Redacting(ProcessorFormatter):
    """Formatter that redacts keys and passwords from a record, including its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        # They are never logged on purpose, but an error of a library may contain one.
        return redact_secrets(super().format(record))


def _build_formatter(render: Callable[[Any, str, EventDict], str]) -> ProcessorFormatter:
    return _Redacting(
        foreign_pre_chain=[
            merge_contextvars,
            add_log_level,
            add_logger_name,
            ExtraAdder(),
            _without_colors,
            TimeStamper(fmt="%Y-%m-%dT%H:%M:%S.%fZ", utc=True),
        ],
        processors=[ProcessorFormatter.remove_processors_meta, format_exc_info, render],
    )


def _without_colors(_logger: Any, _name: str, event: EventDict) -> EventDict:
    event.pop("color_message", None)  # uvicorn's message a second time, with colors for terminals
    return event


def _render_json(_logger: Any, _name: str, event: EventDict) -> str:
    ordered = {name: event.pop(name) for name in _LEADING_FIELDS}
    return json.dumps({**ordered, **event}, ensure_ascii=False, default=str)


def _render_console(_logger: Any, _name: str, event: EventDict) -> str:
    timestamp, level, logger, message = (event.pop(name) for name in _LEADING_FIELDS)
    traceback = event.pop("exception", None)
    ids = "".join(f" {name}={value}" for name, value in event.items() if value is not None)
    line = f"{timestamp} {level.upper()} {logger}: {message}{ids}"
    return f"{line}\n{traceback}" if traceback else line
