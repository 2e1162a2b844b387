"""Keyset pagination: newest first by id; each page continues after the last id of the previous one."""

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Query
from sqlalchemy import ColumnElement, Select, Text, and_, cast, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from anneal.contracts.errors import FieldError
from app.api.errors import invalid

T = TypeVar("T")
_ID = re.compile(r"[a-z]{1,12}_[0-9a-z]{26}")


@dataclass(frozen=True)
class Paging:
    """Requested page: at most `limit` items older than the id `after`."""

    limit: int
    after: str | None


async def _parse_paging(
    limit: Annotated[int, Query(ge=1, le=200, description="Maximum number of items to return.", examples=[50])] = 50,
    after: Annotated[
        str | None, Query(description="Id of the last item of the previous page; older items are returned.")
    ] = None,
) -> Paging:
    if after is not None and _ID.fullmatch(after) is None:
        raise invalid([FieldError(field="after", code="not_an_id", message="must be the id of an item of this list")])
    return Paging(limit, after)


PageQuery = Annotated[Paging, Depends(_parse_paging)]

FindQuery = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=200,
        description="Only items whose id starts with this text (with or without `run_`, …), or whose name it is.",
    ),
]


def found_by(
    text: str, prefix: str, id: InstrumentedAttribute[str], name: InstrumentedAttribute[str]
) -> ColumnElement[bool]:
    """Return the condition of `FindQuery` for ids with this prefix."""
    starts = [id.startswith(start, autoescape=True) for start in (text, f"{prefix}_{text}")]
    return or_(name == text, *starts)


SearchQuery = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=200,
        description="Only items whose name or one of whose tags contains this text, ignoring case, or whose ID starts "
        "with it.",
    ),
]


def search_condition(
    text: str,
    prefix: str,
    id: InstrumentedAttribute[str],
    name: InstrumentedAttribute[str],
    tags: InstrumentedAttribute[list[str]] | None = None,
) -> ColumnElement[bool]:
    """Return the condition of `SearchQuery` for ids with this prefix."""
    parts = [id.startswith(start, autoescape=True) for start in (text, f"{prefix}_{text}")]
    parts.append(name.icontains(text, autoescape=True))
    if tags is not None:
        tag = func.jsonb_array_elements_text(tags).column_valued("tag")
        in_a_tag = exists(select(tag).where(tag.icontains(text, autoescape=True)))
        # The text of the JSON is searched first, as that takes a fraction of the time; it also matches brackets.
        in_json = cast(tags, Text).icontains(json.dumps(text, ensure_ascii=False)[1:-1], autoescape=True)
        parts.append(and_(in_json, in_a_tag))
    return or_(*parts)


async def fetch_page(
    session: AsyncSession,
    query: Select[T],
    id: InstrumentedAttribute[str] | ColumnElement[str],
    paging: Paging,
) -> tuple[list[T], bool]:
    """Return the objects of one page of `query` by descending `id`, and True if there are more."""
    rows, has_more = await fetch_rows(session, query, id, paging)
    return [row[0] for row in rows], has_more


async def fetch_rows(
    session: AsyncSession,
    query: Select[*tuple[Any, ...]],
    id: InstrumentedAttribute[str] | ColumnElement[str],
    paging: Paging,
) -> tuple[list[Any], bool]:
    """Return the rows of one page of a query of several columns, and True if there are more."""
    rows = list((await session.execute(newest_first(query, id, paging))).all())
    return rows[: paging.limit], len(rows) > paging.limit


def newest_first(
    query: Select[*tuple[Any, ...]], id: InstrumentedAttribute[str] | ColumnElement[str], paging: Paging
) -> Select[*tuple[Any, ...]]:
    """Return the query for one page by descending `id`, plus one extra row that shows if there are more."""
    page = query.order_by(id.desc()).limit(paging.limit + 1)
    return page if paging.after is None else page.where(id < paging.after)
