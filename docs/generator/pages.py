"""Registry of the reference pages."""

from collections.abc import Callable
from pathlib import Path

from docs.generator import cli, configuration, errors, events, gpus, http_api, metrics, settings, tables

REFERENCE = Path(__file__).parents[1] / "reference"

PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration.page,
    "settings.md": settings.page,
    "http.md": http_api.page,
    "events.md": events.page,
    "errors.md": errors.page,
    "cli.md": cli.page,
    "metrics.md": metrics.page,
    "gpus.md": gpus.page,
    "tables.md": tables.page,
}
"""File name of each generated page, with the function that returns its text."""
