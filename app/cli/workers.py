"""Commands of `anneal workers`."""

from collections import Counter
from typing import TYPE_CHECKING

from app.cli.console import After, AsJson, Limit, command_group, connected, listing, page

if TYPE_CHECKING:
    from app.contracts.schemas.workers import DeviceRead

commands = command_group("Workers: the processes that execute runs. Example: `anneal workers list`.")


@commands.callback()
def workers() -> None:
    """Keep `list` a subcommand: Typer merges a single command into its group."""


@commands.command("list")
def list_workers(limit: Limit = 50, after: After = None, as_json: AsJson = False) -> None:
    """List workers with their devices and current runs, newest first.

    Example: `anneal workers list --json`
    """
    with connected() as client:
        found, has_more = page(client.workers.list(limit=limit + 1, after=after), limit)
        rows = [
            (
                it.id, it.state, it.host, it.runs or None, _devices(it.devices), it.labels or None,
                it.heartbeat_at,
            )
            for it in found
        ]  # fmt: skip
        listing(found, has_more, as_json, ("id", "state", "host", "runs", "devices", "labels", "last heartbeat"), rows)


def _devices(devices: list["DeviceRead"]) -> list[str]:
    """Return the devices of a worker, those that look the same as one item with their number."""
    counts = Counter(map(_device, devices))
    return [text if count == 1 else f"{count} x {text}" for text, count in counts.items()]


def _device(device: "DeviceRead") -> str:
    memory = f" ({device.memory_mb:,} MiB)" if device.memory_mb else ""
    paused = f" (paused: {device.trouble})" if device.trouble else ""
    return f"{device.name}{memory}{paused}"
