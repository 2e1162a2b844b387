"""Training steps replaced by installed plugins: each is created, its type checked, and errors name the plugin.

The protocols define each kind; docs/plugins.md has an example of each.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from transformers import PreTrainedModel

from app.runs.config import Replacement, TrainingConfig
from app.runs.plugins import Plugin, named
from app.runs.rewards import PluginReward
from worker.training import registry
from worker.training.failures import Stopped, TrainingFailure
from worker.training.run import Run

if TYPE_CHECKING:
    from worker.training.trainer import Faithful

_RESULT = {"outcome", "why", "step", "epoch", "error", "output", "hub", "metrics"}
_ROWS_BETWEEN_HEARTBEATS = 256


class Recipe(Protocol):
    """A whole training (`anneal.recipes`) that replaces that of the method."""

    def __call__(self, run: Run, replaced: list[Replacement], /, **parameters: Any) -> dict[str, Any]:
        """Train to the end or to a stop, and return the fields of the result, as `course.finish` does."""


class DataSource(Protocol):
    """Source of rows that replaces the dataset's file (`anneal.data_sources`)."""

    def __call__(self, path: Path, /, purpose: str, **parameters: Any) -> Iterable[Mapping[str, Any]]:
        """Return rows in the dataset's format, the same ones each time; `purpose` is training or evaluation."""


class ModelFactory(Protocol):
    """Factory of the base model, before an adapter is added (`anneal.model_factories`)."""

    def __call__(self, load: Callable[[], PreTrainedModel], /, **parameters: Any) -> PreTrainedModel:
        """Return the model; `load` loads the configured one onto its device."""


class OptimizerFactory(Protocol):
    """Factory of an optimizer (`anneal.optimizers`), such as a class of `torch.optim`."""

    def __call__(self, groups: list[dict[str, Any]], /, lr: float, **parameters: Any) -> torch.optim.Optimizer:
        """Create the optimizer; `groups` has all trained parameters, each group with its `weight_decay`."""


class SchedulerFactory(Protocol):
    """Factory of a learning-rate schedule (`anneal.schedulers`)."""

    def __call__(
        self, optimizer: torch.optim.Optimizer, /, num_training_steps: int, num_warmup_steps: int, **parameters: Any
    ) -> LRScheduler:
        """Create the scheduler, which is stepped once after each optimizer step."""


class CheckpointEngine(Protocol):
    """Storage for checkpoint replicas, created by `anneal.checkpoint_engines` from their parameters."""

    def save(self, folder: Path, name: str) -> None:
        """Store a replica of a complete checkpoint; `name` is `<run>/a<attempt>/checkpoint-<step>`."""

    def fetch(self, name: str, folder: Path) -> bool:
        """Copy the replica into an empty folder; return False if there is none."""


class RewardFunction(Protocol):
    """Reward function created by `anneal.rewards` from its options."""

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], /, **columns: Any) -> Sequence[float | None]:
        """Return one number per completion; None: the completion does not count."""


def check(config: TrainingConfig) -> None:
    """Load all plugins that a configuration names, before anything else is loaded.

    Raises:
        TrainingFailure: `config_error` that names what is not installed, cannot be imported or cannot be called.
    """
    for _, kind, name in named(config.model_dump(mode="json")):
        if kind != "metrics":  # loaded by the recipes that use them
            registry.load(kind, name)


def train(run: Run, replaced: list[Replacement], plugin: Plugin) -> dict[str, Any]:
    """Train with an installed recipe, and return the fields of the result record."""
    name = plugin.type
    result = registry.load("recipe", name)(run, replaced, **plugin.parameters)
    if not isinstance(result, dict) or result.get("outcome") not in ("completed", "stopped"):
        raise registry.wrong(
            "recipe", name, f"returned {str(result)[:100]!r}, not a dict with `outcome`: completed or stopped"
        )
    if unknown := sorted(map(str, result.keys() - _RESULT)):
        raise registry.wrong("recipe", name, f"returned fields that a result does not have: {', '.join(unknown)}")
    return result


def take_rows(run: Run) -> None:
    """Write the rows of an installed data source to files, which replace those of the datasets."""
    plugin = run.config.trainer_options.data_source
    if plugin is None:
        return
    for field, purpose in (("dataset", "training"), ("eval_dataset", "evaluation")):
        if run.job.get(field):
            run.job[field] = {**run.job[field], **_write_rows(run, plugin, Path(run.job[field]["path"]), purpose)}


def drop_rows(run: Run) -> None:
    """Delete the files of `take_rows` once the rows are tokenized."""
    for path in run.folder.glob("rows-*.jsonl"):
        path.unlink()


def _write_rows(run: Run, plugin: Plugin, path: Path, purpose: str) -> dict[str, Any]:
    kind, name = "data_source", plugin.type
    rows = registry.call(kind, name, path, purpose=purpose, **plugin.parameters)
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise registry.wrong(kind, name, f"returned a {type(rows).__name__}, not rows to iterate over")
    digest, count, target = hashlib.sha256(), 0, run.folder / f"rows-{purpose}.jsonl"
    each = iter(rows)
    with target.open("wb") as file:
        while True:
            try:
                row = next(each)
            except StopIteration:
                break
            except (TrainingFailure, Stopped):
                raise
            except Exception as error:
                raise registry.wrong(kind, name, f"failed at row {count}: {error!r}") from error
            if not isinstance(row, Mapping):
                raise registry.wrong(kind, name, f"returned a {type(row).__name__} as row {count}, not a dict")
            try:
                line = json.dumps(dict(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
            except (TypeError, ValueError) as error:
                raise registry.wrong(kind, name, f"returned a row {count} that is not JSON: {error}") from error
            digest.update(line)
            file.write(line)
            count += 1
            if count % _ROWS_BETWEEN_HEARTBEATS == 0:
                run.report.alive()
                run.heed_stop()
    if count == 0:
        raise registry.wrong(kind, name, f"returned no rows of the {purpose} data")
    return {"path": str(target), "rows": count, "sha256": digest.hexdigest()}


def model(run: Run, load: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Load the base model as configured, or through an installed factory."""
    plugin = run.config.trainer_options.model_factory
    if plugin is None:
        return load()
    made = registry.call("model_factory", plugin.type, load, **plugin.parameters)
    return registry.checked("model_factory", plugin.type, made, PreTrainedModel, "transformers.PreTrainedModel")


def optimizer(trainer: "Faithful", network: torch.nn.Module) -> torch.optim.Optimizer | None:
    """Create an installed optimizer for all trained parameters; None: use the configured one."""
    plugin = trainer.run.config.trainer_options.optimizer
    if plugin is None:
        return None
    kind, name = "optimizer", plugin.type
    decaying = set(trainer.get_decay_parameter_names(network))
    training = {name: one for name, one in network.named_parameters() if one.requires_grad}
    groups = [
        {"params": [one for name, one in training.items() if (name in decaying) is decays], "weight_decay": weight}
        for decays, weight in ((True, trainer.args.weight_decay), (False, 0.0))
    ]
    made = registry.call(kind, name, [group for group in groups if group["params"]], lr=trainer.args.learning_rate,
                         **plugin.parameters)  # fmt: skip
    registry.checked(kind, name, made, torch.optim.Optimizer, "torch.optim.Optimizer")
    held = {id(one) for group in made.param_groups for one in group["params"]}
    if left := [name for name, one in training.items() if id(one) not in held]:
        raise registry.wrong(kind, name, f"leaves out {len(left)} trained parameters, {left[0]} among them")
    return made


def scheduler(trainer: "Faithful", steps: int, of: torch.optim.Optimizer) -> LRScheduler | None:
    """Create an installed learning-rate schedule over `steps` steps; None: use the configured one."""
    plugin = trainer.run.config.trainer_options.scheduler
    if plugin is None:
        return None
    kind, name, warmup = "scheduler", plugin.type, trainer.args.get_warmup_steps(steps)
    made = registry.call(kind, name, of, num_training_steps=steps, num_warmup_steps=warmup, **plugin.parameters)
    registry.checked(kind, name, made, LRScheduler, "torch.optim.lr_scheduler.LRScheduler")
    if isinstance(made, ReduceLROnPlateau):
        raise registry.wrong(kind, name, "returned a ReduceLROnPlateau, which depends on a metric and not on steps")
    return made


def makes_rates(config: TrainingConfig) -> bool:
    """Return True if a plugin determines the learning rates."""
    options = config.trainer_options
    return options.optimizer is not None or options.scheduler is not None


def initial_rates(trainer: "Faithful") -> list[float]:
    """Return the initial learning rates of the optimizer's groups by the effective configuration."""
    return [group.get("initial_lr", group["lr"]) for group in trainer.optimizer.param_groups]


def reapply_rates(trainer: "Faithful", weight_decays: list[float], rates: list[float]) -> None:
    """Apply the configured rates after a checkpoint was loaded; rates that are equal stay bitwise unchanged.

    Raises:
        TrainingFailure: `config_error`: they differ, and the effect on the scheduler is unknown.
    """
    course = trainer.lr_scheduler
    for group, decay in zip(trainer.optimizer.param_groups, weight_decays, strict=True):
        group["weight_decay"] = decay
    if initial_rates(trainer) == rates:
        return
    if not isinstance(course, LambdaLR):
        raise TrainingFailure(
            "config_error",
            "`learning_rate` cannot change when a run is resumed with this scheduler: only a "
            "torch.optim.lr_scheduler.LambdaLR can be recomputed for another rate.",
        )
    course.base_lrs = list(rates)
    for group, rate, factor in zip(trainer.optimizer.param_groups, rates, course.lr_lambdas, strict=True):
        group["initial_lr"] = rate
        group["lr"] = rate * factor(course.last_epoch)
    course._last_lr = [group["lr"] for group in trainer.optimizer.param_groups]


def keep(run: Run, folder: Path) -> None:
    """Store a replica of a checkpoint on disk with an installed checkpoint engine; an error loses only the replica.

    Raises:
        TrainingFailure: `config_error`: the plugin is not a checkpoint engine.
    """
    plugin = run.config.trainer_options.checkpoint_engine
    if plugin is None:
        return
    engine = _engine(plugin)
    try:
        engine.save(folder, _replica_name(folder))
    except Exception as error:
        failure = registry.wrong("checkpoint_engine", plugin.type, f"could not keep {folder.name}: {error!r}")
        run.report.message(f"{failure} The checkpoint in the run's own folder is complete.", level="warning")


def fetch(run: Run) -> None:
    """Restore a checkpoint that is missing from its folder into this attempt's folder; its hashes are checked next."""
    plugin, resume = run.config.trainer_options.checkpoint_engine, run.resume_from
    if plugin is None or resume is None or Path(resume["path"]).exists():
        return
    place = Path(resume["path"])
    target = run.folder / f".{place.name}.fetched"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    try:
        found = _engine(plugin).fetch(_replica_name(place), target)
    except Exception as error:
        raise registry.wrong("checkpoint_engine", plugin.type, f"could not fetch {place.name}: {error!r}") from error
    if not isinstance(found, bool):
        raise registry.wrong("checkpoint_engine", plugin.type, f"returned {found!r} from `fetch`, not True or False")
    if found:
        run.report.message(
            f"{place.name} was missing from its folder and was restored from the replica of `{plugin.type}`.",
            level="warning",
        )
        run.job["resume_from"] = {**resume, "path": str(target)}


def _engine(plugin: Plugin) -> CheckpointEngine:
    made = registry.call("checkpoint_engine", plugin.type, **plugin.parameters)
    missing_methods = [method for method in ("save", "fetch") if not callable(getattr(made, method, None))]
    if missing_methods:
        what = f"returned a {type(made).__name__}, which has no method {' and no '.join(missing_methods)}"
        raise registry.wrong("checkpoint_engine", plugin.type, what)
    return made  # type: ignore[no-any-return]


def _replica_name(folder: Path) -> str:
    return "/".join(folder.parts[-3:])


class Reward:
    """An installed reward, called as TRL calls a reward function."""

    def __init__(self, reward: PluginReward, name: str) -> None:
        """Create the reward function; `name` is its name in metrics.

        Raises:
            TrainingFailure: `config_error` that names what cannot be created or called.
        """
        self.__name__ = name
        self._name = reward.name
        self._function: Any = registry.call("reward", reward.name, **reward.options)
        if not callable(self._function):
            raise registry.wrong("reward", reward.name, f"returned a {type(self._function).__name__}, not a function")

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        """Return one number per completion, in order."""
        try:
            found = self._function(prompts, completions, **columns)
        except Exception as error:
            raise registry.wrong("reward", self._name, f"failed: {error!r}") from error
        if not isinstance(found, Sequence) or isinstance(found, str) or len(found) != len(completions):
            what = f"{len(found)} numbers" if isinstance(found, Sequence) else f"a {type(found).__name__}"
            raise registry.wrong("reward", self._name, f"returned {what}, not one for each of {len(completions)}")
        for one in found:
            if one is not None and (isinstance(one, bool) or not isinstance(one, int | float)):
                raise registry.wrong("reward", self._name, f"returned a {type(one).__name__} among its numbers")
        return [None if one is None else float(one) for one in found]
