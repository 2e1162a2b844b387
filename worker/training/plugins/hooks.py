"""Training steps replaced by installed plugins: each is created, its type checked, and errors name the plugin.

The protocols define each kind; docs/guides/plugins.md has an example of each.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from anneal.contracts.attempt.job import DataSource
from anneal.contracts.plugins import Plugin, is_template_name, named_plugins
from anneal.contracts.rewards import PluginReward
from anneal.contracts.training_config.fields import TrainingConfig
from worker.training.context import TrainingContext
from worker.training.failures import Stopped, TrainingFailure
from worker.training.plugins import registry
from worker.training.trainer_protocol import ServiceTrainer

_ROWS_BETWEEN_HEARTBEATS = 256


def load_plugins(config: TrainingConfig) -> None:
    """Load all plugins that a configuration names, before anything else is loaded.

    Raises:
        TrainingFailure: `config_error` that names what is not installed, cannot be imported or cannot be called.
    """
    for _, kind, name in named_plugins(config.model_dump(mode="json")):
        if kind != "metrics":  # they are loaded for the method
            registry.load_plugin(kind, name)


def write_source_rows(run: TrainingContext) -> None:
    """Write the rows of an installed data source to files, which replace those of the datasets."""
    plugin = run.config.trainer_options.data_source
    if plugin is None:
        return
    job = run.job
    purpose = "evaluation" if run.is_inference else "training"
    changes = {"dataset": _write_rows(run, plugin, run.dataset, purpose)}
    if job.eval_dataset is not None:
        changes["eval_dataset"] = _write_rows(run, plugin, job.eval_dataset, "evaluation")
    extra = {
        name: _write_rows(run, plugin, source, "evaluation", f"-{name}")
        for name, source in job.extra_eval_datasets.items()
    }
    run.job = job.model_copy(update=changes | {"extra_eval_datasets": extra})


def delete_source_rows(run: TrainingContext) -> None:
    """Delete the files of `write_source_rows` once the rows are tokenized."""
    for path in run.folder.glob("rows-*.jsonl"):
        path.unlink()


def _write_rows(run: TrainingContext, plugin: Plugin, source: DataSource, purpose: str, suffix: str = "") -> DataSource:
    kind, name = "data_source", plugin.type
    rows = registry.call_plugin(kind, name, source.path, purpose=purpose, **plugin.parameters)
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise registry.plugin_error(kind, name, f"returned a {type(rows).__name__}, not rows to iterate over")
    digest, count, target = hashlib.sha256(), 0, run.folder / f"rows-{purpose}{suffix}.jsonl"
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
                raise registry.plugin_error(kind, name, f"failed at row {count}: {error!r}") from error
            if not isinstance(row, Mapping):
                raise registry.plugin_error(kind, name, f"returned a {type(row).__name__} as row {count}, not a dict")
            try:
                line = json.dumps(dict(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
            except (TypeError, ValueError) as error:
                raise registry.plugin_error(kind, name, f"returned a row {count} that is not JSON: {error}") from error
            digest.update(line)
            file.write(line)
            count += 1
            if count % _ROWS_BETWEEN_HEARTBEATS == 0:
                run.report.alive()
                run.raise_if_stopped()
    if count == 0:
        raise registry.plugin_error(kind, name, f"returned no rows of the {purpose} data")
    return source.model_copy(update={"path": target, "rows": count, "sha256": digest.hexdigest()})


def load_model(run: TrainingContext, load: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Load the base model as configured, or through an installed factory."""
    plugin = run.config.trainer_options.model_factory
    if plugin is None:
        return load()
    created = registry.call_plugin("model_factory", plugin.type, load, **plugin.parameters)
    return registry.check_type("model_factory", plugin.type, created, PreTrainedModel, "transformers.PreTrainedModel")


def load_tokenizer(run: TrainingContext, load: Callable[[], PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    """Load the base model's tokenizer, or through an installed factory."""
    plugin = run.config.trainer_options.tokenizer
    if plugin is None:
        return load()
    created = registry.call_plugin("tokenizer", plugin.type, load, **plugin.parameters)
    called = "transformers.PreTrainedTokenizerBase"
    return registry.check_type("tokenizer", plugin.type, created, PreTrainedTokenizerBase, called)


def chat_template(run: TrainingContext, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the chat template of the configuration, or that of an installed plugin; None: the tokenizer's own."""
    configured = run.config.chat_template
    if configured is None or not is_template_name(configured):
        return configured
    template = registry.call_plugin("chat_template", configured, tokenizer)
    registry.check_type("chat_template", configured, template, str, "str with a Jinja template")
    return str(template)


class Collator:
    """An installed collator around that of the method, whose batches it changes or replaces."""

    def __init__(self, plugin: Plugin, own: Callable[[list[Any]], Mapping[str, Any]], tokenizer: Any) -> None:
        self._name = plugin.type
        self._own = own
        self._columns: set[str] | None = None
        self._function: Any = registry.call_plugin("collator", plugin.type, own, tokenizer, **plugin.parameters)
        if not callable(self._function):
            raise registry.plugin_error(
                "collator", self._name, f"returned a {type(self._function).__name__}, not a function"
            )

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the batch of these examples.

        Raises:
            TrainingFailure: `config_error`: the plugin failed, or its batch lacks a column of the method's own.
        """
        batch = registry.call_guarded("collator", self._name, self._function, examples)
        if not isinstance(batch, Mapping):
            raise registry.plugin_error("collator", self._name, f"returned a {type(batch).__name__}, not a dict")
        if self._columns is None:
            self._columns = set(self._own(examples))
        if missing := sorted(self._columns - batch.keys()):
            raise registry.plugin_error("collator", self._name, f"returned a batch without {', '.join(missing)}")
        return dict(batch)


def build_collator(run: TrainingContext, own: Any, tokenizer: Any) -> Any:
    """Return the collator of the method, or an installed one around it."""
    plugin = run.config.trainer_options.collator
    return own if plugin is None else Collator(plugin, own, tokenizer)


def create_optimizer(trainer: ServiceTrainer, network: torch.nn.Module) -> torch.optim.Optimizer | None:
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
    trained = [group for group in groups if group["params"]]
    created = registry.call_plugin(kind, name, trained, lr=trainer.args.learning_rate, **plugin.parameters)
    registry.check_type(kind, name, created, torch.optim.Optimizer, "torch.optim.Optimizer")
    held = {id(one) for group in created.param_groups for one in group["params"]}
    if left := [name for name, one in training.items() if id(one) not in held]:
        raise registry.plugin_error(kind, name, f"leaves out {len(left)} trained parameters, {left[0]} among them")
    return created


def create_scheduler(trainer: ServiceTrainer, steps: int, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """Create an installed learning-rate schedule over `steps` steps; None: use the configured one."""
    plugin = trainer.run.config.trainer_options.scheduler
    if plugin is None:
        return None
    kind, name, warmup = "scheduler", plugin.type, trainer.args.get_warmup_steps(steps)
    created = registry.call_plugin(
        kind, name, optimizer, num_training_steps=steps, num_warmup_steps=warmup, **plugin.parameters
    )
    registry.check_type(kind, name, created, LRScheduler, "torch.optim.lr_scheduler.LRScheduler")
    if isinstance(created, ReduceLROnPlateau):
        raise registry.plugin_error(
            kind, name, "returned a ReduceLROnPlateau, which depends on a metric and not on steps"
        )
    return created


def controls_learning_rate(config: TrainingConfig) -> bool:
    """Return True if a plugin determines the learning rates."""
    options = config.trainer_options
    return options.optimizer is not None or options.scheduler is not None


def initial_rates(trainer: ServiceTrainer) -> list[float]:
    """Return the initial learning rates of the optimizer's groups by the effective configuration."""
    return [group.get("initial_lr", group["lr"]) for group in trainer.optimizer.param_groups]


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group; optimizers of torchao compile their step with it as a tensor."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def reapply_rates(trainer: ServiceTrainer, weight_decays: list[float], rates: list[float]) -> None:
    """Apply the configured rates after a checkpoint was loaded; rates that are equal stay bitwise unchanged.

    Raises:
        TrainingFailure: `config_error`: they differ, and the effect on the scheduler is unknown.
    """
    scheduler = trainer.lr_scheduler
    for group, decay in zip(trainer.optimizer.param_groups, weight_decays, strict=True):
        group["weight_decay"] = decay
    if initial_rates(trainer) == rates:
        return
    if not isinstance(scheduler, LambdaLR):
        raise TrainingFailure(
            "config_error",
            "`learning_rate` cannot change when a run is resumed with this scheduler: only a "
            "torch.optim.lr_scheduler.LambdaLR can be recomputed for another rate.",
        )
    scheduler.base_lrs = list(rates)
    for group, rate, factor in zip(trainer.optimizer.param_groups, rates, scheduler.lr_lambdas, strict=True):
        group["initial_lr"] = rate
        set_learning_rate(group, rate * factor(scheduler.last_epoch))
    scheduler._last_lr = [group["lr"] for group in trainer.optimizer.param_groups]


class Reward:
    """An installed reward, called as TRL calls a reward function."""

    def __init__(self, reward: PluginReward, name: str) -> None:
        """Create the reward function; `name` is its name in metrics.

        Raises:
            TrainingFailure: `config_error` that names what cannot be created or called.
        """
        self.__name__ = name
        self._name = reward.name
        self._function: Any = registry.call_plugin("reward", reward.name, **reward.options)
        if not callable(self._function):
            raise registry.plugin_error(
                "reward", reward.name, f"returned a {type(self._function).__name__}, not a function"
            )

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        """Return one number per completion, in order."""
        try:
            scores = self._function(prompts, completions, **columns)
        except Exception as error:
            raise registry.plugin_error("reward", self._name, f"failed: {error!r}") from error
        if not isinstance(scores, Sequence) or isinstance(scores, str) or len(scores) != len(completions):
            what = f"{len(scores)} numbers" if isinstance(scores, Sequence) else f"a {type(scores).__name__}"
            raise registry.plugin_error(
                "reward", self._name, f"returned {what}, not one for each of {len(completions)}"
            )
        for score in scores:
            if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
                raise registry.plugin_error(
                    "reward", self._name, f"returned a {type(score).__name__} among its numbers"
                )
        return [None if one is None else float(one) for one in scores]
