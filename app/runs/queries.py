"""Lists of runs: filtered, newest or best first; the last page is as fast as the first."""

import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, Select, Text, literal_column, select, tuple_, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from app.api.errors import invalid
from app.api.pagination import Paging, found_by, newest_first
from app.contracts.errors import FieldError
from app.contracts.run_status import TERMINAL, TrainingStatus
from app.runs.checkpoints.service import preferred_place
from app.runs.serializers import DOCUMENTS, MOMENTS, NUMBERS, PLAIN
from app.tables.runs import IS_NOT_PROBE, Run

Sort = Literal["created_at", "best_loss"]

_NOT_FINITE = "('NaN', 'Infinity', '-Infinity')"
_REWARD_RUN_IDS = (
    "(SELECT coalesce(json_agg(reward_run_id ORDER BY reward_run_id), '[]'::json) "
    "FROM run_reward_models WHERE run_id = runs.id)"
)
_RFC_3339 = 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'


def _shown() -> ColumnElement[str]:
    """Return the expression for a run's own columns in a list, as JSON.

    Postgres serializes them: parsing, validating and serializing fifty configurations in Python takes ten times as
    long as the query.
    """
    shown = {name: f"runs.{name}" for name in (*PLAIN, *DOCUMENTS)}
    # JSON has no non-finite numbers.
    shown |= {name: f"CASE WHEN runs.{name} NOT IN {_NOT_FINITE} THEN runs.{name} END" for name in NUMBERS}
    shown |= {name: f"to_char(runs.{name} AT TIME ZONE 'UTC', '{_RFC_3339}')" for name in MOMENTS}
    shown["reward_run_ids"] = _REWARD_RUN_IDS
    pairs = ", ".join(f"'{name}', {value}" for name, value in shown.items())
    return literal_column(f"cast(json_build_object({pairs}) AS text)", Text)


_LISTED = select(
    *Run.__table__.c["id", "status", "event_seq", "output_attempt"],
    preferred_place(Run.__table__.c).label("furthest"),
    _shown().label("shown"),
)


class Listed(NamedTuple):
    """A run in a list."""

    id: str
    status: str
    event_seq: int
    output_attempt: int | None
    furthest: list[int] | None
    """`[step, attempt]` of the checkpoint from which it would be resumed."""
    shown: str
    """Its own columns, as a JSON object."""


*_HEAD, _SHOWN = Listed._fields
_WHOLE = select(
    literal_column(f"cast(json_agg(json_build_array({', '.join(_HEAD)})) AS text)", Text),
    literal_column(f"string_agg({_SHOWN}, chr(31))", Text),
)


@dataclass(frozen=True)
class Filters:
    """Filters of a list of runs; None: any."""

    experiment_id: str | None = None
    status: tuple[TrainingStatus, ...] = ()
    tag: str | None = None
    parent_run_id: str | None = None
    base_model: str | None = None
    find: str | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return all conditions except the one on the status."""
        found: list[ColumnElement[bool]] = []
        if self.experiment_id is not None:
            found.append(Run.experiment_id == self.experiment_id)
        if self.tag is not None:
            found.append(Run.tags.contains([self.tag]))
        if self.parent_run_id is not None:
            found.append(Run.parent_run_id == self.parent_run_id)
        if self.base_model is not None:
            found.append(Run.config["base_model"].astext == self.base_model)
        if self.find is not None:
            found.append(found_by(self.find, "run", Run.id, Run.name))
        return found

    def on_status(self) -> list[ColumnElement[bool]]:
        """Return the condition on the status, if there is one."""
        return [Run.status.in_([status.value for status in self.status])] if self.status else []


async def page(
    session: AsyncSession, filters: Filters, paging: Paging, sort: Sort = "created_at"
) -> tuple[list[Listed], bool]:
    """Return a page of runs and whether there are more: newest first, or lowest loss first, runs without one last.

    Sorted by loss, probes are excluded: they measure two steps on the longest rows, which is not a result.
    """
    if sort == "best_loss":
        return await _best_first(session, filters, paging)
    runs = await _fetch(session, newest_first(_chosen(filters, paging), Run.id, paging))
    return runs[: paging.limit], len(runs) > paging.limit


async def _fetch(session: AsyncSession, query: Select[*tuple[Any, ...]]) -> list[Listed]:
    """Fetch the rows of a query as one value: separate rows arrive 8 kB at a time, with a wake-up for each."""
    heads, shown = (await session.execute(_WHOLE.select_from(query.subquery()))).one()
    # JSON never contains this character unescaped.
    pairs = zip(json.loads(heads), shown.split("\x1f"), strict=True) if heads else ()
    return [Listed._make((*head, one)) for head, one in pairs]


def _chosen(filters: Filters, paging: Paging) -> Select[*tuple[Any, ...]]:
    if len(filters.status) < 2:
        return _LISTED.where(*filters.conditions(), *filters.on_status())
    # An index returns each status in the right order; all together would have to be sorted.
    some: list[Select[Any]] = []
    for status in set(filters.status):
        of_status = select(Run.id).where(*filters.conditions(), Run.status == status.value)
        if paging.after is not None:
            of_status = of_status.where(Run.id < paging.after)
        some.append(of_status.order_by(Run.id.desc()).limit(paging.limit + 1))
    ids = union_all(*(one.subquery().select() for one in some)).subquery()
    return _LISTED.where(Run.id.in_(select(ids.c.id)))


async def _best_first(session: AsyncSession, filters: Filters, paging: Paging) -> tuple[list[Listed], bool]:
    conditions = [*filters.conditions(), *filters.on_status(), IS_NOT_PROBE]
    after = None if paging.after is None else await _place(session, paging.after)
    runs: list[Listed] = []
    if after is None or after[0] is not None:
        runs = await _fetch(session, _with_loss(_LISTED, conditions, after, paging.limit + 1))
    if len(runs) <= paging.limit:
        last = paging.after if after is not None and after[0] is None else None
        without = _LISTED.where(*conditions, Run.final_loss.is_(None), Run.best_loss.is_(None))
        runs += await _fetch(session, newest_first(without, Run.id, Paging(paging.limit - len(runs), last)))
    return runs[: paging.limit], len(runs) > paging.limit


async def _place(session: AsyncSession, run_id: str) -> tuple[float | None, str]:
    found = (await session.execute(select(Run.best_loss).where(Run.id == run_id))).one_or_none()
    if found is None:
        message = "this run no longer exists; start again from the first page"
        raise invalid([FieldError(field="after", code="unknown_cursor", message=message)])
    return found[0], run_id


def _with_loss(
    chosen: Select[*tuple[Any, ...]],
    conditions: list[ColumnElement[bool]],
    after: tuple[float | None, str] | None,
    most: int,
) -> Select[*tuple[Any, ...]]:
    """Order runs by loss: ended runs by an index; the others are sorted, since they are few and their losses change."""
    ended = (Run.final_loss, [Run.final_loss.is_not(None)])
    unfinished = (Run.best_loss, [Run.best_loss.is_not(None), Run.attempt > 0, Run.status.not_in(TERMINAL)])
    parts = []
    for loss, where in (ended, unfinished):
        part = select(Run.id, loss.label("loss")).where(*conditions, *where)
        if after is not None:
            part = part.where(tuple_(loss, Run.id) > tuple_(*after))
        parts.append(part.order_by(loss, Run.id).limit(most).subquery().select())
    both = union_all(*parts).subquery()
    return chosen.join(both, Run.id == both.c.id).order_by(both.c.loss, both.c.id).limit(most)


async def best_of(session: AsyncSession, experiment_id: str) -> Any | None:
    """Return id, name and loss of an experiment's run with the lowest loss; of two equal ones, the older."""
    named = select(Run.id, Run.name, Run.best_loss)
    conditions = [Run.experiment_id == experiment_id, IS_NOT_PROBE]
    return (await session.execute(_with_loss(named, conditions, None, 1))).one_or_none()
