"""Command `anneal usage`."""

from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.console import AsJson, open_client, print_json, print_note, print_table

if TYPE_CHECKING:
    from anneal.contracts.schemas.runs.usage import Usage

commands = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@commands.command("usage")
def show_usage(
    by: Annotated[str, typer.Option(help="Group: key, experiment, month, model or method.")] = "month",
    since: Annotated[
        str | None, typer.Option("--from", metavar="DAY", help="First day, in UTC. [default: eleven months ago]")
    ] = None,
    until: Annotated[
        str | None, typer.Option("--to", metavar="DAY", help="Day after the last one. [default: tomorrow]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show device-hours, tokens and cost of all runs, deleted ones included.

    Example: `anneal usage --by key --from 2026-01-01 --to 2026-02-01`
    """
    with open_client() as client:
        usage = client.service.usage(by=by, since=since, until=until)  # type: ignore[arg-type]
    if as_json:
        print_json(usage)
        return
    rows = [[row.name or row.group or "the service", row.group or "-", *_figures(row)] for row in usage.data]
    print_table([by.upper(), "ID", "DEVICE-HOURS", "TOKENS", "COST"], [*rows, ["total", "-", *_figures(usage.total)]])
    if usage.has_more:
        print_note("There are more groups; the total has all of them.")
    if usage.total.cost is not None and usage.total.unpriced_device_hours:
        print_note(f"The cost is without {usage.total.unpriced_device_hours:,.2f} device-hours that have no price.")


def _figures(usage: "Usage") -> list[str]:
    cost = "-" if usage.cost is None else f"{usage.cost.amount:,.2f} {usage.cost.currency}"
    return [f"{usage.device_hours:,.2f}", f"{usage.tokens:,}", cost]
