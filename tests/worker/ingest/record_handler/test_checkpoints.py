"""Checkpoints that a trainer reports: which are kept, and with which losses."""

from sqlalchemy import select

from app.tables.checkpoints import Checkpoint
from tests.rows import run_row
from tests.worker.ingest.record_handler.lab import Lab, checkpoint


def test_keeps_the_newest_checkpoints_and_marks_the_others(lab: Lab) -> None:
    lab.run.config["save_total_limit"] = 2
    for step in (1, 2, 3, 4):
        lab.says("checkpoint", **checkpoint(step))
    lab.writer.drain()
    with lab.engine.connect() as connection:
        from sqlalchemy import text

        rows = connection.execute(text("SELECT step, deleted_at IS NULL FROM checkpoints ORDER BY step")).all()
    assert [tuple(row) for row in rows] == [(1, False), (2, False), (3, True), (4, True)]


def test_keeps_the_checkpoint_with_the_lowest_evaluation_loss_and_no_other_best(lab: Lab) -> None:
    lab.run.config["save_total_limit"] = 1
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None)):
        record = checkpoint(step)
        lab.says("checkpoint", **{**record, "kind": "best", "metrics": {"loss": 1.0, "eval_loss": loss}})
        lab.writer.drain()
    with lab.engine.connect() as connection:
        from sqlalchemy import text

        rows = connection.execute(text("SELECT step FROM checkpoints WHERE deleted_at IS NULL ORDER BY step")).all()
    assert [row.step for row in rows] == [2, 4]


def test_a_checkpoint_that_is_reported_behind_later_steps_has_the_best_loss_of_its_own(lab: Lab) -> None:
    """It was copied at its step and written while training went on; the run does not fall back for it."""
    lab.says("phase", name="training", start_step=0, total_steps=10)
    for step, loss in ((1, 3.0), (2, 2.5), (3, 2.0), (4, 1.5)):
        lab.says("metric", step=step, epoch=0.1 * step, loss=loss)
    lab.says("checkpoint", **checkpoint(2))
    lab.says("metric", step=5, epoch=0.5, loss=1.0)
    lab.says("checkpoint", **checkpoint(4))
    lab.writer.drain()
    with lab.engine.connect() as connection:
        rows = connection.execute(select(Checkpoint.step, Checkpoint.metrics).order_by(Checkpoint.step)).all()
    assert [(row.step, row.metrics["best_loss"]) for row in rows] == [(2, 2.5), (4, 1.5)]
    row = run_row(lab.engine, lab.run.id)
    assert (row.current_step, row.best_loss, row.checkpoint_step) == (5, 1.0, 4)
