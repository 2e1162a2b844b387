"""Where a run goes back to after trouble: never further than the trouble itself gives reason for."""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from anneal.contracts.attempt.failure_report import FailureReport
from app.config import Settings
from app.infra.db import sync_engine
from app.runs.state import machine
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Attempt
from tests.factories import Trainer, mark_checkpoint
from tests.rows import add_run, run_row
from worker.attempts import auto_repair, failure_report
from worker.attempts.auto_repair import Repair


class Lab:
    """A run that meets trouble attempt after attempt."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.trainer = Trainer(engine, add_run(engine).id)

    def begins_at(self, step: int) -> None:
        this = (Attempt.run_id == self.trainer.run_id, Attempt.attempt == self.trainer.attempt)
        with self.engine.begin() as connection:
            connection.execute(update(Attempt).where(*this).values(start_step=step))

    def trouble(self, step: int, singled_out: list[int]) -> Repair:
        """What is planned for the step at which it was met; it is stored, and the next attempt claimed."""
        run = run_row(self.engine, self.trainer.run_id)
        proposed = Repair(
            kind="loss_spike", reason=f"the loss spiked at step {step}", step=step, rows=[7, 8], singled_out=singled_out
        )
        with self.engine.begin() as connection:
            reported = auto_repair.resolve_repair(connection, run, proposed)
            failure_report.store_failure_report(run, FailureReport(repair=reported), 0.0).apply(connection)
            connection.execute(machine.repair(run.id, run.lease_epoch, reported.reason)).one()
        self.trainer = Trainer(self.engine, run.id)
        return reported

    def bad(self) -> list[int]:
        with self.engine.connect() as connection:
            steps: Any = connection.scalars(select(Checkpoint.step).where(Checkpoint.bad_reason.is_not(None)))
            return sorted(steps)


@pytest.fixture
def lab(settings: Settings) -> Iterator[Lab]:
    engine = sync_engine(settings.database_url or "")
    yield Lab(engine)
    engine.dispose()


def test_the_reason_names_the_checkpoint_or_the_start(lab: Lab) -> None:
    assert "at step 5: back to the start, skipping" in lab.trouble(5, []).reason
    lab.trainer.checkpoint(100)
    assert "at step 105: back to the checkpoint of step 100, skipping" in lab.trouble(105, [7]).reason
    assert "back to the start" in lab.trouble(60, []).reason, "of what it could not reach it does not speak"


@pytest.mark.parametrize(("first", "second", "bad"), [([], [], [100]), ([7], [8], []), ([7], [], []), ([], [8], [])])
def test_a_checkpoint_is_condemned_when_trouble_comes_again_behind_it_and_no_row_stood_out(
    first: list[int], second: list[int], bad: list[int], lab: Lab
) -> None:
    lab.trainer.checkpoint(50)
    lab.trainer.checkpoint(100)
    lab.trouble(105, first)
    lab.begins_at(100)
    reported = lab.trouble(107, second)
    assert lab.bad() == bad
    assert f"back to the checkpoint of step {50 if bad else 100}" in reported.reason


def test_last_good_or_pinned_checkpoint_is_not_marked_corrupt(lab: Lab) -> None:
    last = lab.trainer.checkpoint(100)
    lab.trouble(105, [])
    lab.begins_at(100)
    assert lab.trouble(107, []).back_to == last
    lab.begins_at(100)
    pinned = lab.trainer.checkpoint(110)
    mark_checkpoint(lab.engine, pinned, pinned=True)
    lab.trouble(112, [])
    lab.begins_at(110)
    assert lab.trouble(113, []).back_to == pinned
    assert lab.bad() == []


def test_checkpoint_where_the_attempt_did_not_start_is_not_marked_corrupt(lab: Lab) -> None:
    """It lies on another machine, so the attempt began anew."""
    for step in (50, 100):
        lab.trainer.checkpoint(step)
    lab.trouble(105, [])
    lab.begins_at(0)
    lab.trouble(105, [])
    assert lab.bad() == []


def test_prediction_without_memory_goes_on_with_smaller_batches_until_they_have_one_row() -> None:
    options = {"batch_tokens": 1024, "max_new_tokens": 300}
    config = {"batch_size": 4, "on_out_of_memory": "repair", "extra": {"predict": options}}
    repair = auto_repair.propose_repair(config, "predicting", "out_of_memory", None)
    assert repair is not None and repair.changes == {"extra.predict.batch_tokens": 512}
    repaired, names = auto_repair.apply_repairs(config, [repair])
    assert repaired["extra"]["predict"] == {**options, "batch_tokens": 512} and options["batch_tokens"] == 1024
    assert names == {"extra.predict.batch_tokens"}
    assert auto_repair.propose_repair(repaired, "predicting", "out_of_memory", None) is None
