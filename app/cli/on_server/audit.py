"""Command `anneal audit`, which reads the audit log on the server."""

from datetime import timedelta
from typing import Annotated

import typer

from app.cli.console import AsJson, print_json, print_text
from app.cli.errors import plain_errors, settings_with_urls


def audit(
    key: Annotated[str | None, typer.Option(help="Only calls with the key of this id.")] = None,
    resource: Annotated[str | None, typer.Option(help="Only calls on the resource with this id or name.")] = None,
    days: Annotated[float | None, typer.Option(min=0, max=36_500, help="Only calls of the last DAYS days.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of calls to show.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List calls and commands that made changes, newest first.

    Example: `anneal audit --days 7 --resource hf_token`
    """
    from sqlalchemy.orm import Session

    from anneal.contracts.schemas.administration.audit import AuditView
    from anneal.contracts.schemas.page import Page
    from app.audit.log import Filters, select_entries
    from app.infra.clock import utc_now
    from app.infra.db import sync_engine
    from app.tables.administration.audit import AuditEntry

    with plain_errors():
        settings = settings_with_urls()
        since = None if days is None else utc_now() - timedelta(days=days)
        query = select_entries(Filters(key, resource, since)).order_by(AuditEntry.id.desc()).limit(limit + 1)
        with Session(sync_engine(settings.database_url or "", pool_size=0, name="anneal-audit")) as session:
            calls = session.scalars(query).all()
            if as_json:
                entries = [AuditView.model_validate(call) for call in calls[:limit]]
                print_json(Page(data=entries, has_more=len(calls) > limit))
                return
            for call in calls[:limit]:
                what = f"{call.method} {call.route}"
                who = f"{call.key_name} ({call.key_id or 'on the server'})"
                print_text(
                    f"{call.ts:%Y-%m-%d %H:%M:%S}  {call.status or '   '}  {what}  {call.resource or '-'}  {who}"
                )
