"""Clean-up marks what nobody needs, and never a checkpoint that somebody may want."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, select, update

from app.config import Settings
from app.infra.db import sync_engine
from app.runs.state.checkpoints import retention
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run
from tests.factories import Trainer, mark_checkpoint
from tests.rows import add_run, waiting_for_locks
from tests.waiting import eventually


@pytest.fixture
def trainer(settings: Settings) -> Iterator[Trainer]:
    engine = sync_engine(settings.database_url or "")
    yield Trainer(engine, add_run(engine).id)
    engine.dispose()


def retire(trainer: Trainer, keep: int) -> list[str]:
    """Names of what went."""
    with trainer.engine.begin() as connection:
        return sorted(name for _, name in retention.retire_checkpoints(connection, trainer.run_id, keep))


def kept_steps(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        there = select(Checkpoint.step).where(Checkpoint.deleted_at.is_(None)).order_by(Checkpoint.step)
        return list(connection.scalars(there).all())


@pytest.mark.parametrize(("keep", "steps"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_furthest_are_kept_and_the_others_go(trainer: Trainer, keep: int, steps: list[int]) -> None:
    for step in (1, 2, 3, 4):
        trainer.checkpoint(step)
    retire(trainer, keep)
    assert kept_steps(trainer.engine) == steps


@pytest.mark.parametrize(
    ("keep", "saved"), [(1, [[10, 100], [20, 100], [30, 100]]), (2, [[10, 100], [10, 20, 100], [20, 30, 100]])]
)
def test_what_an_attempt_saves_stays_however_far_an_earlier_one_was(
    trainer: Trainer, keep: int, saved: list[list[int]]
) -> None:
    """What the earlier one saved lies on another machine: the next began anew, and so would the one after it."""
    for step in (90, 100):
        trainer.checkpoint(step)
    later = trainer.retry()
    for step, there in zip((10, 20, 30), saved, strict=True):
        later.checkpoint(step)
        retire(later, keep)
        assert kept_steps(trainer.engine) == there
    later.checkpoint(110)
    retire(later, 1)
    assert kept_steps(trainer.engine) == [110], "the other has been overtaken"


def test_a_pinned_one_stays_however_old(trainer: Trainer) -> None:
    pinned = trainer.checkpoint(1)
    for step in (2, 3):
        trainer.checkpoint(step)
    mark_checkpoint(trainer.engine, pinned, pinned=True)
    assert retire(trainer, 1) == ["checkpoint-2"]
    assert kept_steps(trainer.engine) == [1, 3]


def test_checkpoint_that_a_request_is_about_to_evaluate_stays(trainer: Trainer) -> None:
    """The request locks it, and commits its run while this waits for the lock."""
    checkpoint = trainer.checkpoint(1)
    trainer.checkpoint(2)
    evaluating = add_run(trainer.engine, task="evaluate")
    with ThreadPoolExecutor(1) as pool, trainer.engine.connect() as request:
        request.execute(select(Checkpoint.id).where(Checkpoint.id == checkpoint).with_for_update(read=True))
        request.execute(update(Run).where(Run.id == evaluating.id).values(resume_checkpoint_id=checkpoint))
        retired = pool.submit(retire, trainer, 1)
        eventually(lambda: waiting_for_locks(trainer.engine))
        request.commit()
        assert retired.result() == []
    assert kept_steps(trainer.engine) == [1, 2]


def test_the_one_with_the_lowest_evaluation_loss_stays(trainer: Trainer) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None)):
        trainer.checkpoint(step, metrics={"eval_loss": loss})
    retire(trainer, 1)
    assert kept_steps(trainer.engine) == [2, 4]


def test_checkpoint_with_the_highest_reward_stays(trainer: Trainer) -> None:
    for step, reward in ((1, 0.3), (2, 0.9), (3, -0.2), (4, None)):
        trainer.checkpoint(step, metrics={"eval_reward": reward})
    retire(trainer, 1)
    assert kept_steps(trainer.engine) == [2, 4]


def test_a_damaged_one_does_not_count_as_the_newest(trainer: Trainer) -> None:
    trainer.checkpoint(1)
    trainer.checkpoint(2)
    damaged = trainer.checkpoint(3)
    mark_checkpoint(trainer.engine, damaged, bad_reason="weights has other contents than were written")
    assert retire(trainer, 1) == ["checkpoint-1", "checkpoint-3"]
    assert kept_steps(trainer.engine) == [2]


def test_retention_touches_no_other_run(trainer: Trainer) -> None:
    trainer.checkpoint(1)
    other = Trainer(trainer.engine, add_run(trainer.engine).id)
    for step in (2, 3):
        other.checkpoint(step)
    assert retire(other, 1) == ["checkpoint-2"]
    assert kept_steps(trainer.engine) == [1, 3]
