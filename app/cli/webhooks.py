"""Commands of `anneal webhooks`."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anneal.contracts.run_task import RunTask
from app.cli.console import (
    After,
    AsJson,
    Limit,
    command_group,
    fail,
    open_client,
    print_details,
    print_json,
    print_listing,
    print_note,
    print_text,
    report_changed,
    report_deleted,
    split_page,
)
from app.cli.names import OfExperiment, id_within

if TYPE_CHECKING:
    from anneal.client.client import Anneal
    from anneal.contracts.schemas.webhooks import DeliveryView, WebhookCreated, WebhookView

commands = command_group(
    "Webhooks: addresses to which events of runs are sent. Example: `anneal webhooks create https://hooks.example.com`."
)

_TEST_SECONDS = 20.0

WebhookId = Annotated[
    str, typer.Argument(metavar="WEBHOOK", help="Webhook: its id or the beginning of it, or `last` for the newest.")
]
Name = Annotated[str | None, typer.Option(help="Name to identify it by; default: the host of the address.")]
Format = Annotated[
    str | None,
    typer.Option(help="`standard` (default), `slack` for Slack and Mattermost, or `openai` for clients of OpenAI."),
]
Types = Annotated[
    list[str] | None,
    typer.Option(
        "--type",
        help="Type of events: end (default), status or progress; of the format openai fine_tuning.job.succeeded, "
        "fine_tuning.job.failed or fine_tuning.job.cancelled; repeatable.",
    ),
]
Tag = Annotated[str | None, typer.Option(help="Only runs with this tag.")]
Model = Annotated[str | None, typer.Option(help="Only runs of this base model.")]
Task = Annotated[RunTask | None, typer.Option(help="Only runs of this task.")]
Statuses = Annotated[
    list[str] | None, typer.Option("--status", help="Only events that report this status; repeatable.")
]


@commands.command()
def create(
    url: Annotated[str, typer.Argument(help="Public HTTPS address that receives the events.")],
    name: Name = None,
    format: Format = None,
    types: Types = None,
    experiment: OfExperiment = None,
    tag: Tag = None,
    model: Model = None,
    task: Task = None,
    statuses: Statuses = None,
    as_json: AsJson = False,
) -> None:
    """Create a webhook and print its id and the secret that signs its messages.

    Example: `anneal webhooks create https://hooks.example.com/anneal --status failed`
    """
    conditions = _conditions(experiment, tag, model, task, statuses)
    with open_client() as client:
        options: dict[str, Any] = {"name": name, "format": format, "types": types, "filter": conditions or None}
        _print_secret(client.webhooks.create(url, **options), as_json)


@commands.command("list")
def list_webhooks(limit: Limit = 50, after: After = None, as_json: AsJson = False) -> None:
    """List webhooks, newest first, with what fails.

    Example: `anneal webhooks list`
    """
    with open_client() as client:
        page, has_more = split_page(client.webhooks.list(limit=limit + 1, after=after), limit)
        rows = [(it.id, it.name, it.types, it.filter or None, _state_of(it), it.url) for it in page]
        print_listing(page, has_more, as_json, ("id", "name", "types", "filter", "state", "url"), rows)


@commands.command()
def show(webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Show a webhook, with the reason if its receiver fails.

    Example: `anneal webhooks show last`
    """
    with open_client() as client:
        webhook = client.webhooks.get(_id_of(client, webhook_id))
        if as_json:
            print_json(webhook)
            return
        print_details(
            {
                "id": webhook.id, "name": webhook.name, "url": webhook.url, "format": webhook.format,
                "types": webhook.types, "filter": webhook.filter or None, "state": _state_of(webhook),
                "failing since": webhook.failing_since, "last error": webhook.last_error,
                "previous secret until": webhook.previous_secret_until, "created": webhook.created_at,
            }
        )  # fmt: skip


@commands.command()
def edit(
    webhook_id: WebhookId,
    url: Annotated[str | None, typer.Option(help="New address.")] = None,
    name: Name = None,
    format: Format = None,
    types: Types = None,
    experiment: OfExperiment = None,
    tag: Tag = None,
    model: Model = None,
    task: Task = None,
    statuses: Statuses = None,
    no_filter: Annotated[bool, typer.Option("--no-filter", help="Send the events of every run.")] = False,
    enable: Annotated[
        bool | None, typer.Option("--enable/--disable", help="Disable: send nothing until it is enabled again.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change a webhook; conditions replace all of its conditions.

    Example: `anneal webhooks edit last --type end --type status`
    """
    conditions = _conditions(experiment, tag, model, task, statuses)
    if no_filter and conditions:
        raise typer.BadParameter("--no-filter contradicts the conditions; leave it or them out.")
    with open_client() as client:
        options: dict[str, Any] = {"url": url, "name": name, "format": format, "types": types, "enabled": enable}
        options["filter"] = conditions if conditions or no_filter else None
        report_changed(client.webhooks.update(_id_of(client, webhook_id), **options), as_json)


@commands.command()
def delete(webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Delete a webhook with its deliveries; those that wait are not sent.

    Example: `anneal webhooks delete whk_01k3x9m6q2v8s4t0w7y5z1a3d2`
    """
    with open_client() as client:
        webhook_id = _id_of(client, webhook_id)
        client.webhooks.delete(webhook_id)
    report_deleted(webhook_id, as_json)


@commands.command()
def rotate(webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Replace the secret of a webhook and print the new one; for 24 hours messages are signed with both.

    Example: `anneal webhooks rotate last`
    """
    with open_client() as client:
        _print_secret(client.webhooks.rotate(_id_of(client, webhook_id)), as_json)


@commands.command()
def test(webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Send a test message and wait for the result; exit code 1 if the receiver did not accept it.

    Example: `anneal webhooks test last`
    """
    with open_client() as client:
        webhook_id = _id_of(client, webhook_id)
        delivery, deadline = client.webhooks.test(webhook_id), time.monotonic() + _TEST_SECONDS
        while delivery.status == "pending" and time.monotonic() < deadline:
            time.sleep(0.2)
            delivery = client.webhooks.get_delivery(webhook_id, delivery.id)
        if delivery.status == "failed":
            fail(delivery.error or "The receiver did not accept the message.", code="not_delivered")
        _report_delivery(delivery, as_json)


@commands.command()
def deliveries(
    webhook_id: WebhookId,
    status: Annotated[str | None, typer.Option(help="Only this status: pending, delivered or failed.")] = None,
    limit: Limit = 50,
    after: After = None,
    as_json: AsJson = False,
) -> None:
    """List the deliveries of a webhook, newest first; they are kept for 30 days.

    Example: `anneal webhooks deliveries last --status failed`
    """
    with open_client() as client:
        options: dict[str, Any] = {"status": status, "limit": limit + 1, "after": after}
        page, has_more = split_page(client.webhooks.deliveries(_id_of(client, webhook_id), **options), limit)
        rows = [(it.id, it.type, it.run_id, it.status, it.attempts, it.error, it.created_at) for it in page]
        print_listing(page, has_more, as_json, ("id", "type", "run", "status", "attempts", "error", "created"), rows)


@commands.command()
def redeliver(
    webhook_id: WebhookId,
    delivery_id: Annotated[
        str, typer.Argument(metavar="DELIVERY", help="Delivery: its id or the beginning of it, or `last`.")
    ],
    as_json: AsJson = False,
) -> None:
    """Send a message again under its id.

    Example: `anneal webhooks redeliver last last`
    """
    with open_client() as client:
        webhook_id = _id_of(client, webhook_id)
        delivery_id = id_within("delivery", delivery_id, client.webhooks.deliveries(webhook_id))
        _report_delivery(client.webhooks.redeliver(webhook_id, delivery_id), as_json)


def _id_of(client: "Anneal", text: str) -> str:
    return id_within("webhook", text, client.webhooks.list())


def _conditions(
    experiment: str | None, tag: str | None, model: str | None, task: str | None, statuses: list[str] | None
) -> dict[str, Any]:
    named = {"experiment_id": experiment, "tag": tag, "base_model": model, "task": task, "status": statuses}
    return {name: value for name, value in named.items() if value}


def _state_of(webhook: "WebhookView") -> str:
    if not webhook.enabled:
        return "disabled"
    return "working" if webhook.failing_since is None else f"failing since {webhook.failing_since:%Y-%m-%d %H:%M}"


def _print_secret(webhook: "WebhookCreated", as_json: bool) -> None:
    if as_json:
        print_json(webhook)
        return
    print_text(webhook.id)
    print_text(webhook.secret)
    print_note("Store the second line, the secret, where the receiver reads it: it cannot be shown again.")


def _report_delivery(delivery: "DeliveryView", as_json: bool) -> None:
    if as_json:
        print_json(delivery)
    else:
        print_note(f"{delivery.id} is {delivery.status}.")
