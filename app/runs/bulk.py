"""Changes of several runs in one transaction; a run that cannot be changed leaves the others alone."""

from collections.abc import Awaitable, Callable, Sequence

from fastapi import Request
from sqlalchemy.ext.asyncio import AsyncSession

from anneal.contracts.schemas.runs.bulk import RunChange, RunChanges
from anneal.contracts.schemas.runs.requests import MOST_TAGS
from app.api.errors import ApiError, conflict
from app.audit import log as audit
from app.runs.state import service


async def change_each(
    request: Request,
    session: AsyncSession,
    ids: Sequence[str],
    change: Callable[[str], Awaitable[bool]],
    already: str,
) -> RunChanges:
    """Change each run, and record an audit entry for each that has changed.

    `change` returns False if the run is already as requested, or raises `ApiError`; `already` is the code of the error
    that says so too.
    """
    changes: dict[str, RunChange] = {}
    # Newest first: a run is deleted after those that were resumed from it, and `service.lock_runs` has the same order.
    for run_id in sorted(set(ids), reverse=True):
        try:
            async with session.begin_nested():
                outcome = "changed" if await change(run_id) else "unchanged"
            changes[run_id] = RunChange.model_validate({"id": run_id, "outcome": outcome})
        except ApiError as error:
            outcome = "unchanged" if error.code == already else "refused"
            changes[run_id] = RunChange.model_validate(
                {"id": run_id, "outcome": outcome, "code": error.code, "detail": error.detail}
            )
    _record_changes(request, session, [run_id for run_id, one in changes.items() if one.outcome == "changed"])
    return RunChanges(runs=[changes[run_id] for run_id in dict.fromkeys(ids)])


def _record_changes(request: Request, session: AsyncSession, changed: Sequence[str]) -> None:
    call = audit.call_of(request.scope)
    if call is not None:
        for run_id in changed:
            call.write_entry(session, 200, run_id)
        audit.skip_audit(request)  # of the request as a whole


async def edit_tags(session: AsyncSession, run_id: str, add: Sequence[str], remove: Sequence[str]) -> bool:
    """Add and remove tags of a run; return False if it has these tags already."""
    run = await service.lock_run(session, run_id)
    tags = [name for name in dict.fromkeys([*run.tags, *add]) if name not in remove]
    if len(tags) > MOST_TAGS:
        raise conflict("too_many_tags", f"Run {run_id} would have {len(tags)} tags; at most {MOST_TAGS} are possible.")
    if tags == run.tags:
        return False
    run.tags = tags
    await session.flush()
    return True
