"""Run that this worker has claimed."""

from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from sqlalchemy import Row

from anneal.contracts.run_task import RunTask


@dataclass(frozen=True)
class ClaimedRun:
    """The columns of a claimed run that its attempt needs, under their names in the table."""

    id: str
    attempt: int
    lease_epoch: int
    """Lease epoch: what is written for the run is fenced with it."""
    backend: Literal["celery", "fake", "ray"]
    config: dict[str, Any]
    user_set_fields: list[str]
    """Fields of the configuration that the user has set."""
    dataset_id: str | None
    """None only for the task `serve`."""
    eval_dataset_id: str | None
    extra_eval_datasets: dict[str, str]
    """IDs of further datasets to evaluate on, by name."""
    task: RunTask
    base_run_id: str | None
    parent_run_id: str | None
    resume_checkpoint_id: str | None
    requirements: dict[str, Any]
    """Conditions that its devices meet, and the decision whether its model is divided among them."""
    devices_needed: int
    hosts_needed: int
    device_indexes: list[int]
    """Devices of this worker that the run was assigned."""
    members: list[str]
    """Workers that train the other parts of the run."""

    @classmethod
    def from_row(cls, row: Row[Any]) -> Self:
        """Create it from the row that `machine.claim` returns."""
        columns = {field.name: row._mapping[field.name] for field in fields(cls)}
        extra, members = columns["extra_eval_datasets"] or {}, columns["members"] or []
        converted = {"task": RunTask(columns["task"]), "extra_eval_datasets": extra, "members": members}
        return cls(**{**columns, **converted})
