"""Commands of `anneal workers`."""

from collections import Counter
from typing import TYPE_CHECKING

from app.cli.console import After, AsJson, Limit, command_group, open_client, print_listing, split_page

if TYPE_CHECKING:
    from anneal.contracts.schemas.workers import DeviceRead

commands = command_group("Workers: the processes that execute runs. Example: `anneal workers list`.")


@commands.callback()
def workers() -> None:
    """Keep `list` a subcommand: Typer merges a single command into its group."""


@commands.command("list")
def list_workers(limit: Limit = 50, after: After = None, as_json: AsJson = False) -> None:
    """List workers with their devices and current runs, newest first.

    Example: `anneal workers list --json`
    """
    with open_client() as client:
        workers_page, has_more = split_page(client.workers.list(limit=limit + 1, after=after), limit)
        rows = [
            (
                it.id, it.state, it.host, it.runs or None, _device_texts(it.devices), it.labels or None,
                it.heartbeat_at,
            )
            for it in workers_page
        ]  # fmt: skip
        print_listing(
            workers_page,
            has_more,
            as_json,
            ("id", "state", "host", "runs", "devices", "labels", "last heartbeat"),
            rows,
        )


def _device_texts(devices: list["DeviceRead"]) -> list[str]:
    """Return the devices of a worker, those that look the same as one item with their number."""
    counts = Counter(map(_device_text, devices))
    return [text if count == 1 else f"{count} x {text}" for text, count in counts.items()]


def _device_text(device: "DeviceRead") -> str:
    memory = f" ({device.memory_mb:,} MiB)" if device.memory_mb else ""
    paused = f" (paused: {device.trouble})" if device.trouble else ""
    return f"{device.name}{memory}{paused}"
