"""Callbacks installed by the operator: `transformers.TrainerCallback` with two more events and a state in checkpoints.

Beside the events of transformers, a callback may have `on_step_start`, called before each optimizer step, and
`on_metrics`, called with `metrics`: a copy of each metric and evaluation that the run reports. The numbers by name that
`report_metrics()` returns are added to the next metric. With `state_dict()` and `load_state_dict(state)` its state,
JSON of at most 1 MB, is part of every checkpoint.
"""

import copy
import json
from collections.abc import Collection
from functools import partial
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from anneal.contracts.plugins import Plugin
from worker.training.plugins import registry
from worker.training.plugins.metric_functions import named_numbers
from worker.training.trainer_protocol import ServiceTrainer

_EVENTS = sorted(name for name in vars(TrainerCallback) if name.startswith("on_"))
_DECIDING = frozenset({"on_step_end", "on_log", "on_metrics", "on_evaluate"})
"""Events after which the decisions of a callback are applied: between two steps, when the run may be saved."""
_MOST_STATE = 1_000_000


class PluginCallbacks(TrainerCallback):  # type: ignore[misc]
    """Calls the installed callbacks of a run in their order; an error ends the run and names the plugin.

    A callback gets a copy of the trainer's control. It may request a log, an evaluation and a checkpoint, and end the
    run as early stopping does. It cannot undo what the service decided. On several devices only rank 0 has callbacks.
    """

    def __init__(self, trainer: ServiceTrainer) -> None:
        """Create the callbacks.

        Raises:
            TrainingFailure: `config_error` that names what cannot be created, or is no `TrainerCallback`.
        """
        self._trainer = trainer
        self._callbacks: dict[str, tuple[str, Any]] = {}
        plugins = trainer.run.config.trainer_options.callbacks if trainer.run.ranks.is_first else []
        for place, plugin in enumerate(plugins):
            self._callbacks[f"{place}.{plugin.type}"] = (plugin.type, _create_callback(plugin))
        for event in _EVENTS:
            if any(_has_method(callback, event) for _, callback in self._callbacks.values()):
                setattr(self, event, partial(self._call_callbacks, event))  # events that no callback has cost nothing
        if any(hasattr(callback, "on_metrics") for _, callback in self._callbacks.values()):
            trainer.run.listeners.append(self._on_metrics)

    def collect_states(self) -> dict[str, Any]:
        """Return the states of all callbacks that have one.

        Raises:
            TrainingFailure: `config_error`: a state is not JSON, or is too large.
        """
        return {
            key: self._state_of(name, callback)
            for key, (name, callback) in self._callbacks.items()
            if hasattr(callback, "state_dict")
        }

    def restore_states(self, states: dict[str, Any]) -> None:
        """Restore the states of a checkpoint; a callback that it does not know keeps its initial one."""
        for key, (name, callback) in self._callbacks.items():
            if key in states:
                registry.call_guarded("callback", name, callback.load_state_dict, states[key])

    def reported_metrics(self, reserved: Collection[str]) -> dict[str, float]:
        """Return the metrics that callbacks add to the one that is about to be reported.

        `reserved` has the names that the metric already has.

        Raises:
            TrainingFailure: `config_error` that names a callback whose metrics are not numbers by new names.
        """
        metrics: dict[str, float] = {}
        for name, callback in self._callbacks.values():
            if not hasattr(callback, "report_metrics"):
                continue
            reported = registry.call_guarded("callback", name, callback.report_metrics)
            try:
                numbers = named_numbers(reported)
            except ValueError as error:
                why = f"returned {error} from `report_metrics`, but must return numbers by name"
                raise registry.plugin_error("callback", name, why) from error
            if taken := sorted(numbers.keys() & {*reserved, *metrics}):
                why = f"returned `{taken[0]}` from `report_metrics`, but metrics already have that: use another name"
                raise registry.plugin_error("callback", name, why)
            metrics |= numbers
        return metrics

    def _state_of(self, name: str, callback: Any) -> Any:
        state = registry.call_guarded("callback", name, callback.state_dict)
        try:
            text = json.dumps(state, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise registry.plugin_error("callback", name, f"has a state that is not JSON: {error}") from error
        if len(text) > _MOST_STATE:
            raise registry.plugin_error("callback", name, f"has a state above {_MOST_STATE:,} characters of JSON")
        return json.loads(text)  # a copy: the checkpoint may be written while training continues

    def _on_metrics(self, record: dict[str, Any]) -> None:
        trainer = self._trainer
        self._call_callbacks("on_metrics", trainer.args, trainer.state, trainer.control, metrics=record)

    def _call_callbacks(self, event: str, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        for name, callback in self._callbacks.values():
            for method in _event_methods(callback, event):
                own_control = copy.copy(control)
                arguments = {key: copy.deepcopy(value) if key == "metrics" else value for key, value in more.items()}
                returned = registry.call_guarded("callback", name, method, args, state, own_control, **arguments)
                if event in _DECIDING:
                    self._apply_control(
                        returned if isinstance(returned, TrainerControl) else own_control, state, control
                    )

    def _apply_control(self, requested: TrainerControl, state: TrainerState, control: TrainerControl) -> None:
        if control.should_training_stop or state.global_step >= state.max_steps:
            return
        run = self._trainer.run
        control.should_log |= bool(requested.should_log)
        control.should_evaluate |= bool(requested.should_evaluate) and self._trainer.eval_dataset is not None
        if requested.should_save and not control.should_save:
            control.should_save = True
            run.save_kind = "periodic"
        if requested.should_training_stop:
            self._trainer.end_early("callback", "checkpoint")
            run.save_kind = "final"


def _create_callback(plugin: Plugin) -> Any:
    callback = registry.call_plugin("callback", plugin.type, **plugin.parameters)
    registry.check_type("callback", plugin.type, callback, TrainerCallback, "transformers.TrainerCallback")
    halves = [name for name in ("state_dict", "load_state_dict") if callable(getattr(callback, name, None))]
    if len(halves) == 1:
        missing = {"state_dict", "load_state_dict"}.difference(halves).pop()
        raise registry.plugin_error("callback", plugin.type, f"has a method {halves[0]}, but no {missing}")
    return callback


def _has_method(callback: Any, event: str) -> bool:
    return bool(_event_methods(callback, event))


def _event_methods(callback: Any, event: str) -> list[Any]:
    """Return the methods of a callback for an event of transformers; those that it inherits do nothing."""
    names = [event, "on_step_start"] if event == "on_step_begin" else [event]
    base = vars(TrainerCallback)
    return [getattr(callback, name) for name in names if getattr(type(callback), name, None) is not base.get(name)]
