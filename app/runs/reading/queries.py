"""Lists of runs: filtered, newest or best first; the last page is as fast as the first."""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Double,
    Integer,
    Select,
    Text,
    and_,
    bindparam,
    cast,
    func,
    literal,
    literal_column,
    or_,
    select,
    tuple_,
    union_all,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from anneal.contracts.errors import FieldError
from anneal.contracts.methods import METHODS, TrainingMethod
from anneal.contracts.run_status import TERMINAL, RunSort, TrainingStatus
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.runs.placement import Requirements, Resources
from app.api.errors import ApiError, invalid
from app.api.pagination import Paging, found_by, newest_first, search_condition
from app.runs.reading.serializers import FULL, SUMMARY
from app.runs.state.checkpoints.service import preferred_place
from app.tables.base import sql_list
from app.tables.runs import EXTRA_EVAL_DATASETS, IS_COMPARABLE, Run, RunEvalDataset

Order = Literal["asc", "desc"]

_DIALECT = make_url("postgresql+psycopg://").get_dialect()()
_NOT_FINITE = "('NaN', 'Infinity', '-Infinity')"
_HIGHER_IS_BETTER = sql_list([name for name, method in METHODS.items() if method.higher_is_better])
_BEST_EVAL = (
    f"CASE WHEN runs.task = '{RunTask.predict}' OR runs.method IN {_HIGHER_IS_BETTER} THEN -runs.best_score "
    "ELSE runs.best_score END"
)
_REWARD_RUN_IDS = (
    "(SELECT coalesce(json_agg(reward_run_id ORDER BY reward_run_id), '[]'::json) "
    "FROM run_reward_models WHERE run_id = runs.id)"
)
# A trainer reports its configuration, so a value may be of any type and size.
_SMALLEST, _LARGEST = "1e-30", "1e30"
_RATE = "coalesce(runs.effective_config -> 'learning_rate', runs.config -> 'learning_rate')"
_LEARNING_RATE = (
    f"CASE WHEN jsonb_typeof({_RATE}) = 'number' THEN CASE WHEN cast({_RATE} AS numeric) = 0 OR "
    f"cast({_RATE} AS numeric) BETWEEN {_SMALLEST} AND {_LARGEST} THEN cast({_RATE} AS float) END END"
)
_RFC_3339 = 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'


_NUMBERS = ("current_epoch", "best_loss")
_MOMENTS = ("created_at", "started_at", "finished_at", "stop_requested_at")


def _finite_column(column: str) -> str:
    return f"CASE WHEN runs.{column} NOT IN {_NOT_FINITE} THEN runs.{column} END"


def _own_columns(*, full: bool) -> dict[str, str]:
    """Return the expressions for a run's own columns in a list, by name."""
    values = {"id": "runs.id", "last_seq": "runs.event_seq"}
    values |= {name: f"runs.{name}" for name in ((*SUMMARY, *FULL) if full else SUMMARY)}
    # JSON has no non-finite numbers.
    values |= {name: _finite_column(name) for name in _NUMBERS}
    values |= {name: f"to_char(runs.{name} AT TIME ZONE 'UTC', '{_RFC_3339}')" for name in _MOMENTS}
    values["best_eval"] = _BEST_EVAL
    if full:
        # Stored without the values that are not set.
        for name, model in (("resources", Resources), ("requirements", Requirements)):
            values[name] = f"cast('{model().model_dump_json()}' AS jsonb) || runs.{name}"
        values["reward_run_ids"] = _REWARD_RUN_IDS
        values["extra_eval_datasets"] = EXTRA_EVAL_DATASETS
    return values


def _row_columns() -> dict[str, str]:
    """Return the expressions for a run in a table of many, by name."""
    moment = "to_char(runs.{} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')"
    # As float4, a number has seven digits and not seventeen. PostgreSQL refuses those that would be 0 or infinite.
    shortened = "cast(CASE WHEN abs({0}) > 1e-37 THEN {0} ELSE 0 END AS float4)"
    number = f"CASE WHEN {{0}} NOT IN {_NOT_FINITE} AND abs({{0}}) < 1e38 THEN {shortened} END"
    return {
        "id": "runs.id",
        "name": "runs.name",
        "task": "nullif(runs.task, 'train')",
        "status": "runs.status",
        "method": "runs.method",
        "base_model": "runs.base_model",
        "experiment_id": "runs.experiment_id",
        "tags": "nullif(runs.tags, '[]')",
        "step": "nullif(runs.current_step, 0)",
        "total_steps": "runs.total_steps",
        "learning_rate": f"cast(({_LEARNING_RATE}) AS float4)",
        "best_loss": number.format("runs.best_loss"),
        "best_eval": number.format(f"({_BEST_EVAL})"),
        "reason": "coalesce(runs.error_code, runs.pending_reason ->> 'code')",
        "end_reason": "nullif(runs.end_reason, 'finished')",
        "worker": "(SELECT host FROM workers WHERE workers.id = runs.worker_id)",
        "by": "(SELECT name FROM api_keys WHERE api_keys.id = runs.created_by)",
        "created_at": moment.format("created_at"),
        "started_at": moment.format("started_at"),
        "finished_at": moment.format("finished_at"),
    }


def _as_json(values: dict[str, str], *, strip: bool = False) -> ColumnElement[str]:
    """Return the expression for an object of these values, as a text; with `strip`, without nulls.

    Postgres serializes them: parsing, validating and serializing fifty runs in Python takes ten times as long as the
    query. `row_to_json` is quicker than `json_build_object`, and writes no spaces.
    """
    columns = ", ".join(f"{value} AS {name}" for name, value in values.items())
    row = "json_strip_nulls(row_to_json(item))" if strip else "row_to_json(item)"
    return literal_column(f"(SELECT cast({row} AS text) FROM (SELECT {columns}) AS item)", Text)


View = Literal["summary", "full", "row"]


def _build_view(item_json: ColumnElement[str], furthest: ColumnElement[Any]) -> Select[*tuple[Any, ...]]:
    own = Run.__table__.c["id", "status", "method", "output_attempt"]
    return select(*own, furthest.label("furthest"), item_json.label("item_json"))


_VIEWS: dict[View, Select[*tuple[Any, ...]]] = {
    "summary": _build_view(_as_json(_own_columns(full=False)), literal_column("NULL")),
    "full": _build_view(_as_json(_own_columns(full=True)), preferred_place(Run.__table__.c)),
    "row": _build_view(_as_json(_row_columns(), strip=True), literal_column("NULL")),
}


class Listed(NamedTuple):
    """A run in a list."""

    id: str
    status: str
    method: str
    output_attempt: int | None
    furthest: list[int] | None
    """`[step, attempt]` of the checkpoint from which it would be resumed; only with view `full`."""
    item_json: str
    """Its own columns, as a JSON object."""


*_HEAD, _ITEM_JSON = Listed._fields
_WHOLE = select(
    literal_column(f"cast(json_agg(json_build_array({', '.join(_HEAD)})) AS text)", Text),
    literal_column(f"string_agg({_ITEM_JSON}, chr(31))", Text),
)


READ_IN_PARTS: frozenset[RunSort] = frozenset({"live", "best"})
"""Orders whose pages take several statements. They need one snapshot: a run that starts or ends between two statements
would be twice on the page, or not at all."""

_COMPARED = ("experiment_id", "parent_run_id", "base_model", "method", "task", "dataset_id")


def _filter_condition(name: str, value: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the condition of a filter on its value; that of `tag` is a JSON array of one."""
    if name == "tag":
        return Run.tags.contains(cast(value, JSONB))
    if name == "dataset_id":
        extra = select(RunEvalDataset.run_id).where(RunEvalDataset.dataset_id == value)
        return or_(Run.dataset_id == value, Run.eval_dataset_id == value, Run.id.in_(extra))
    return Run.__table__.c[name] == value


@dataclass(frozen=True)
class Filters:
    """Filters of a list of runs; None: any."""

    experiment_id: str | None = None
    status: tuple[TrainingStatus, ...] = ()
    tag: str | None = None
    parent_run_id: str | None = None
    base_model: str | None = None
    method: TrainingMethod | None = None
    task: RunTask | None = None
    find: str | None = None
    search: str | None = None
    dataset_id: str | None = None

    def compared_values(self) -> dict[str, str]:
        """Return the values of the filters that `_filter_condition` knows, by name."""
        values = {name: getattr(self, name) for name in _COMPARED}
        compared = {name: str(value) for name, value in values.items() if value is not None}
        if self.tag is not None:
            compared["tag"] = json.dumps([self.tag])
        return compared

    def as_parameters(self) -> dict[str, str] | None:
        """Return the values of all filters by name if each is compared with one value, or None."""
        if self.find is not None or self.search is not None or len(self.status) > 1:
            return None
        return self.compared_values() | ({"status": self.status[0].value} if self.status else {})

    def all_conditions(self) -> list[ColumnElement[bool]]:
        """Return all conditions except the one on the status."""
        conditions = [_filter_condition(name, literal(value, Text)) for name, value in self.compared_values().items()]
        if self.find is not None:
            conditions.append(found_by(self.find, "run", Run.id, Run.name))
        if self.search is not None:
            conditions.append(search_condition(self.search, "run", Run.id, Run.name, Run.tags))
        return conditions

    def on_status(self) -> list[ColumnElement[bool]]:
        """Return the condition on the status, if there is one."""
        return [Run.status.in_([status.value for status in self.status])] if self.status else []


_SORTED: dict[str, ColumnElement[Any]] = {
    "created_at": Run.__table__.c.id,
    "name": Run.__table__.c.name,
    "step": Run.__table__.c.current_step,
    "best_loss": literal_column(f"({_finite_column('best_loss')})", Double),
    "best_eval": literal_column(f"({_BEST_EVAL})", Double),
    "learning_rate": literal_column(f"({_LEARNING_RATE})", Double),
    "seconds": literal_column(
        "cast(extract(epoch FROM coalesce(runs.finished_at, now()) - runs.started_at) AS float)", Double
    ),
}
_ASCENDING = {"name", "best_loss", "best_eval"}


@dataclass(frozen=True)
class Sorting:
    """Order of a list of runs."""

    by: RunSort = "created_at"
    is_ascending: bool = False

    @classmethod
    def from_request(cls, by: RunSort, order: Order | None) -> "Sorting":
        """Return the order that a request asks for; raise 422 for one that there is not."""
        if order is not None and by not in _SORTED:
            message = f"`{by}` has only one direction; leave `order` out"
            raise invalid([FieldError(field="order", code="not_supported", message=message)])
        return cls(by, by in _ASCENDING if order is None else order == "asc")


async def list_runs(
    connection: AsyncConnection,
    filters: Filters,
    paging: Paging,
    sorting: Sorting = Sorting(),
    view: View = "summary",
) -> tuple[list[Listed], bool]:
    """Return a page of runs and whether there are more: newest first, best first, running first, or by a value.

    Sorted by results, runs are grouped by method, since losses and rewards of different methods cannot be compared:
    first those that were evaluated, by their evaluation metric, then the others by their training loss. Runs without
    either come last. Probes, which measure two steps on the longest rows, and runs that do not train are excluded.
    The connection reads from one snapshot if the order is in `READ_IN_PARTS`.
    """
    if sorting.by == "best":
        return await _best_first(connection, view, filters, paging)
    if sorting.by == "live":
        return await _live_first(connection, view, filters, paging)
    if sorting != Sorting():
        runs = await _fetch_as_one(connection, await _by_value(connection, view, filters, paging, sorting))
        return runs[: paging.limit], len(runs) > paging.limit
    values = filters.as_parameters()
    if values is None:
        runs = await _fetch_as_one(
            connection, newest_first(_filtered_runs(_VIEWS[view], filters, paging), Run.id, paging)
        )
    else:
        statement = _newest_runs(view, tuple(values), continues=paging.after is not None)
        runs = await _execute_statement(
            connection, statement, values | {"after": paging.after, "most": paging.limit + 1}
        )
    return runs[: paging.limit], len(runs) > paging.limit


_LIVE_FIRST = (
    (TrainingStatus.initializing, TrainingStatus.running, TrainingStatus.checkpointing),
    (TrainingStatus.pending,),
    tuple(TrainingStatus(status) for status in TERMINAL),
)


async def _live_first(
    connection: AsyncConnection, view: View, filters: Filters, paging: Paging
) -> tuple[list[Listed], bool]:
    first = 0
    if paging.after is not None:
        status = await _value_of(connection, Run.__table__.c.status, paging.after)
        first = next(place for place, statuses in enumerate(_LIVE_FIRST) if status in statuses)
    runs: list[Listed] = []
    for place, statuses in enumerate(_LIVE_FIRST[first:], first):
        selected = tuple(status for status in statuses if not filters.status or status in filters.status)
        if selected and len(runs) <= paging.limit:
            part = Paging(paging.limit - len(runs), paging.after if place == first else None)
            some = _filtered_runs(_VIEWS[view], replace(filters, status=selected), part)
            runs += await _fetch_as_one(connection, newest_first(some, Run.id, part))
    return runs[: paging.limit], len(runs) > paging.limit


async def _by_value(
    connection: AsyncConnection, view: View, filters: Filters, paging: Paging, sorting: Sorting
) -> Select[*tuple[Any, ...]]:
    """Return the query of runs by a value, those without one last; of equal ones, the newer first."""
    column = _SORTED[sorting.by]
    query = _VIEWS[view].where(*filters.all_conditions(), *filters.on_status())
    if paging.after is not None:
        is_older = Run.id < paging.after
        if await _value_of(connection, column, paging.after) is None:
            query = query.where(column.is_(None), is_older)
        else:
            # In the same statement, for which now() has one value: a running run would be behind itself otherwise.
            start = select(column).where(Run.id == paging.after).correlate(None).scalar_subquery()
            is_behind = column > start if sorting.is_ascending else column < start
            query = query.where(or_(is_behind, and_(column == start, is_older), column.is_(None)))
    direction = column.asc() if sorting.is_ascending else column.desc()
    return query.order_by(direction.nulls_last(), Run.id.desc()).limit(paging.limit + 1)


async def _value_of(connection: AsyncConnection, column: ColumnElement[Any], run_id: str) -> Any:
    row = (await connection.execute(select(column).where(Run.id == run_id))).one_or_none()
    if row is None:
        raise _unknown_cursor()
    return row[0]


def _unknown_cursor() -> ApiError:
    message = "this run no longer exists; start again from the first page"
    return invalid([FieldError(field="after", code="unknown_cursor", message=message)])


class _Statement(NamedTuple):
    """A list of runs as a text, which is compiled once: to do so for each request takes as long as its execution."""

    text: str
    constants: dict[str, Any]
    """Parameters that always have the same value."""


_COMPILED = 256
"""Number of statements that are kept; each combination of filters is one."""
_MOST = bindparam("most", None, Integer)
_AFTER = bindparam("after", None, Text)
_AFTER_VALUE = bindparam("after_value", None, Double)


def _compile_query(query: Select[*tuple[Any, ...]]) -> _Statement:
    whole = _WHOLE.select_from(query.subquery())
    compiled = whole.compile(dialect=_DIALECT, compile_kwargs={"render_postcompile": True})
    constants = {name: value for name, value in compiled.params.items() if value is not None}
    for name, bound in compiled.binds.items():
        process = bound.type.dialect_impl(_DIALECT).bind_processor(_DIALECT)
        if name in constants and process is not None:
            constants[name] = process(constants[name])
    return _Statement(str(compiled), constants)


def _bound_conditions(names: tuple[str, ...]) -> list[ColumnElement[bool]]:
    """Return the conditions of filters whose values are parameters of these names."""
    return [_filter_condition(name, bindparam(name, None, Text)) for name in names]


@lru_cache(maxsize=_COMPILED)
def _newest_runs(view: View, names: tuple[str, ...], *, continues: bool) -> _Statement:
    query = _VIEWS[view].where(*_bound_conditions(names))
    if continues:
        query = query.where(Run.id < _AFTER)
    return _compile_query(query.order_by(Run.id.desc()).limit(_MOST))


async def _execute_statement(
    connection: AsyncConnection, statement: _Statement, values: dict[str, Any]
) -> list[Listed]:
    return _parse_listed((await connection.exec_driver_sql(statement.text, statement.constants | values)).one())


async def _fetch_as_one(connection: AsyncConnection, query: Select[*tuple[Any, ...]]) -> list[Listed]:
    """Fetch the rows of a query as one value: separate rows arrive 8 kB at a time, with a wake-up for each."""
    return _parse_listed((await connection.execute(_WHOLE.select_from(query.subquery()))).one())


def _parse_listed(row: Any) -> list[Listed]:
    heads, items = row
    # JSON never contains this character unescaped.
    pairs = zip(json.loads(heads), items.split("\x1f"), strict=True) if heads else ()
    return [Listed._make((*head, one)) for head, one in pairs]


def _filtered_runs(view: Select[*tuple[Any, ...]], filters: Filters, paging: Paging) -> Select[*tuple[Any, ...]]:
    if len(filters.status) < 2:
        return view.where(*filters.all_conditions(), *filters.on_status())
    # An index returns each status in the right order; all together would have to be sorted.
    some: list[Select[Any]] = []
    for status in set(filters.status):
        of_status = select(Run.id).where(*filters.all_conditions(), Run.status == status.value)
        if paging.after is not None:
            of_status = of_status.where(Run.id < paging.after)
        some.append(of_status.order_by(Run.id.desc()).limit(paging.limit + 1))
    ids = union_all(*(one.subquery().select() for one in some)).subquery()
    return view.where(Run.id.in_(select(ids.c.id)))


async def count_by_status(session: AsyncSession, filters: Filters) -> dict[str, int]:
    """Count the runs of each status that pass the filters, without the one on the status."""
    query = select(Run.status, func.count().label("number")).where(*filters.all_conditions()).group_by(Run.status)
    return {row.status: row.number for row in (await session.execute(query)).all()}


class _Tier(NamedTuple):
    """Runs that are compared with each other: by a score of their evaluations, or by their training loss."""

    method: TrainingMethod
    is_evaluated: bool


_TIERS = [_Tier(method, is_evaluated) for method in METHODS for is_evaluated in (True, False)]


class _Place(NamedTuple):
    """Place of a run in the order; `tier` None: it has neither an evaluation nor a loss."""

    tier: _Tier | None
    value: float | None
    id: str


async def _best_first(
    connection: AsyncConnection, view: View, filters: Filters, paging: Paging
) -> tuple[list[Listed], bool]:
    after = None if paging.after is None else await _find_place(connection, paging.after)
    first = 0
    if after is not None:
        first = len(_TIERS) if after.tier is None else _TIERS.index(after.tier)
    runs: list[Listed] = []
    for tier in _TIERS[first:]:
        if len(runs) > paging.limit:
            break
        if filters.method in (None, tier.method):
            start = after if after is not None and after.tier == tier else None
            runs += await _of_tier(connection, view, filters, tier, start, paging.limit + 1 - len(runs))
    if len(runs) <= paging.limit:
        last = after.id if after is not None and after.tier is None else None
        measures = (Run.final_score, Run.final_loss, Run.best_score, Run.best_loss)
        conditions = [
            *filters.all_conditions(),
            *filters.on_status(),
            _comparable(filters.task),
            *(one.is_(None) for one in measures),
        ]
        without = _VIEWS[view].where(*conditions)
        runs += await _fetch_as_one(connection, newest_first(without, Run.id, Paging(paging.limit - len(runs), last)))
    return runs[: paging.limit], len(runs) > paging.limit


async def _of_tier(
    connection: AsyncConnection, view: View, filters: Filters, tier: _Tier, start: _Place | None, most: int
) -> list[Listed]:
    """Return the best runs of a tier, from the one after `start`."""
    parameters = filters.as_parameters()
    if parameters is None:
        conditions = [*filters.all_conditions(), *filters.on_status(), _comparable(filters.task)]
        after = None if start is None else tuple_(literal(start.value, Double), literal(start.id, Text))
        return await _fetch_as_one(
            connection, _rank_runs(_VIEWS[view], tier, conditions, after, literal(most, Integer))
        )
    values: dict[str, Any] = parameters | {"most": most}
    if start is not None:
        values |= {"after": start.id, "after_value": start.value}
    return await _execute_statement(
        connection, _best_runs(view, tier, tuple(parameters), filters.task, continues=start is not None), values
    )


@lru_cache(maxsize=_COMPILED)
def _best_runs(view: View, tier: _Tier, names: tuple[str, ...], task: RunTask | None, *, continues: bool) -> _Statement:
    after = tuple_(_AFTER_VALUE, _AFTER) if continues else None
    return _compile_query(_rank_runs(_VIEWS[view], tier, [*_bound_conditions(names), _comparable(task)], after, _MOST))


def _comparable(task: RunTask | None) -> ColumnElement[bool]:
    """Return the condition on runs that are compared: trainings, or predictions if the filter asks for them."""
    return Run.task == RunTask.predict if task is RunTask.predict else IS_COMPARABLE


async def _find_place(connection: AsyncConnection, run_id: str) -> _Place:
    query = select(Run.method, Run.best_score, Run.best_loss).where(Run.id == run_id)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise _unknown_cursor()
    is_evaluated = row.best_score is not None
    value = row.best_score if is_evaluated else row.best_loss
    tier = None if value is None else _Tier(TrainingMethod(row.method), is_evaluated)
    return _Place(tier, value, run_id)


def _is_of(method: TrainingMethod) -> ColumnElement[bool]:
    return Run.method == method.value


def _rank_runs(
    chosen: Select[*tuple[Any, ...]],
    tier: _Tier,
    conditions: list[ColumnElement[bool]],
    after: ColumnElement[Any] | None,
    most: ColumnElement[int],
) -> Select[*tuple[Any, ...]]:
    """Order the runs of a tier: ended ones by an index; the others are sorted, since they are few and still change."""
    if tier.is_evaluated:
        ended, unfinished = Run.final_score, Run.best_score
        not_evaluated: list[list[ColumnElement[bool]]] = [[], []]
    else:
        ended, unfinished = Run.final_loss, Run.best_loss
        not_evaluated = [[Run.final_score.is_(None)], [Run.best_score.is_(None)]]
    live = [Run.attempt > 0, Run.status.not_in(TERMINAL)]
    parts = []
    for value, where in ((ended, not_evaluated[0]), (unfinished, [*not_evaluated[1], *live])):
        part = select(Run.id, value.label("value")).where(*conditions, _is_of(tier.method), value.is_not(None), *where)
        if after is not None:
            part = part.where(tuple_(value, Run.id) > after)
        parts.append(part.order_by(value, Run.id).limit(most).subquery().select())
    both = union_all(*parts).subquery()
    return chosen.join(both, Run.id == both.c.id).order_by(both.c.value, both.c.id).limit(most)


async def best_of(session: AsyncSession, experiment_id: str) -> list[Any]:
    """Return the best run of each method in an experiment: id, name, method, score, loss; of equal ones, the older."""
    named = select(Run.id, Run.name, Run.method, Run.best_score, Run.best_loss)
    conditions = [Run.experiment_id == experiment_id, IS_COMPARABLE]
    best_by_method: dict[TrainingMethod, Any] = {}
    for tier in _TIERS:
        if tier.method not in best_by_method:
            best = (await session.execute(_rank_runs(named, tier, conditions, None, literal(1, Integer)))).one_or_none()
            if best is not None:
                best_by_method[tier.method] = best
    return list(best_by_method.values())
