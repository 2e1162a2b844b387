"""Tables whose rows an archive has, and the rows of some runs in them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, Table, text

from app.tables.registry import all_models

_BATCH_ROWS = 1000


@dataclass(frozen=True)
class ArchivedTable:
    """A table, and its column with the id of what a row belongs to: a run, or the row itself."""

    table: Table
    owner: str

    @property
    def name(self) -> str:
        """Name in the database and in the archive."""
        return self.table.name

    @property
    def columns(self) -> list[str]:
        """Columns that are stored, in their order; others are computed from these."""
        return [column.name for column in self.table.columns if column.computed is None]

    def read_rows(self, connection: Connection, owners: Collection[str]) -> Iterator[str]:
        """Yield the rows of these owners as JSON objects."""
        columns = ", ".join(f'"{name}"' for name in self.columns)
        query = text(
            f'SELECT row_to_json(r)::text FROM (SELECT {columns} FROM "{self.name}"'
            f' WHERE "{self.owner}" = ANY(CAST(:owners AS text[])) ORDER BY {self._key_columns}) AS r'
        )
        options = {"yield_per": _BATCH_ROWS}  # which also streams
        yield from connection.execute(query, {"owners": sorted(owners)}, execution_options=options).scalars()

    @property
    def _key_columns(self) -> str:
        return ", ".join(f'"{column.name}"' for column in self.table.primary_key)


def _archived_table(table: str, owner: str) -> ArchivedTable:
    return ArchivedTable(all_models().tables[table], owner)


KEYS = _archived_table("api_keys", "id")
EXPERIMENTS = _archived_table("experiments", "id")
DATASETS = _archived_table("datasets", "id")
RUNS = _archived_table("runs", "id")
EVENTS = _archived_table("run_events", "run_id")
_PER_RUN = (
    "run_reward_models", "run_eval_datasets", "run_estimates", "run_attempts", "run_timings", "checkpoints",
    "run_actions", "metric_rollups",
)  # fmt: skip
TABLES = (KEYS, EXPERIMENTS, DATASETS, RUNS, *(_archived_table(name, "run_id") for name in _PER_RUN), EVENTS)
"""In an order in which rows refer only to earlier tables, or to rows of the same."""
