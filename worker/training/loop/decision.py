"""Decisions of rank 0 that every rank of a run follows."""

from typing import Any, NamedTuple, Protocol

from worker.training.checkpointing.saver import SavingTrainer
from worker.training.loop.actions import Actions
from worker.training.plugins.callbacks import PluginCallbacks


class LoopTrainer(SavingTrainer, Protocol):
    """A trainer whose steps are followed by decisions."""

    plugin_callbacks: PluginCallbacks

    @property
    def actions(self) -> Actions:
        """Live actions that wait for a step."""
        ...


class _Decision(NamedTuple):
    """Flags and limits of training after a step or an evaluation, as rank 0 has set them."""

    should_save: bool
    should_evaluate: bool
    should_log: bool
    should_stop: bool
    ended_by: str | None
    save_kind: str
    eval_pending: bool
    changed: dict[str, Any]
    """Fields that actions have changed."""
    total_steps: int | None


def share_decision(trainer: LoopTrainer) -> None:
    """Make this rank do what rank 0 has decided; every rank calls it after the same step or evaluation."""
    run, control = trainer.run, trainer.control
    if run.ranks.size == 1:
        return
    state = run.state
    own = _Decision(
        control.should_save,
        control.should_evaluate,
        control.should_log,
        control.should_training_stop,
        run.ended_by,
        run.save_kind,
        state.eval_pending,
        state.changed,
        state.total_steps,
    )
    decided = run.ranks.broadcast_value(own)
    if run.ranks.is_first:
        return
    control.should_save, control.should_evaluate = decided.should_save, decided.should_evaluate
    control.should_log, control.should_training_stop = decided.should_log, decided.should_stop
    run.ended_by = state.ended_by = decided.ended_by
    run.save_kind, state.eval_pending = decided.save_kind, decided.eval_pending
    if (decided.changed, decided.total_steps) != (own.changed, own.total_steps):
        trainer.actions.follow_changes(decided.changed, decided.total_steps)
