"""The steps that every recipe takes, in the order in which it takes them."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import transformers
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from app.runs.config import Replacement
from worker.training import base, checkpoints, data, fidelity, flops, hub, model
from worker.training.base import Base
from worker.training.callbacks import StepWatcher
from worker.training.chat import ensure_template
from worker.training.distributions import DistributionWatcher
from worker.training.export import export
from worker.training.failures import TrainingFailure
from worker.training.memory import MemoryProfiler
from worker.training.pairs import Source, converse
from worker.training.peaks import peak_tflops
from worker.training.pulse import each, while_growing
from worker.training.rows import count_rows
from worker.training.run import Run
from worker.training.token_cache import TokenCache
from worker.training.trainer import EndedBeforeStep, Faithful

_COMPLETES = {None, "early_stopping"}
_EXPORTS = _COMPLETES | {"time_limit", "stop_at_step"}

Purpose = Literal["training", "evaluation"]


class Rows(Protocol):
    """Data that is ready to train on."""

    @property
    def dataset(self) -> Dataset:
        """One row for each thing that a batch holds."""

    @property
    def rows(self) -> int:
        """Rows of the file that it holds."""

    @property
    def tokens(self) -> int:
        """Tokens in all."""

    @property
    def remarks(self) -> list[str]:
        """What the user should know: rows cut or left out."""

    @property
    def highest_id(self) -> int:
        """The highest token id in it."""

    @property
    def are_cached(self) -> bool:
        """An earlier run has made its tokens."""


Some = TypeVar("Some", bound=Rows)
Read = Callable[[dict[str, Any], list[int] | None, Purpose], Some]
"""Makes the rows with these numbers (None: all) of a data set ready to train on."""
Trains = TypeVar("Trains", bound=Faithful)


def begin(run: Run) -> tuple[Base, PreTrainedTokenizerBase]:
    """Seed, a checkpoint that is whole, the base model's place and its tokenizer; loads no weight.

    Raises:
        TrainingFailure: with a stable code.
        Stopped: a stop came.
    """
    transformers.set_seed(run.config.seed)
    resume = run.resume_from
    if resume is not None:
        checkpoints.check(Path(resume["path"]), resume["manifest_sha256"], run.report.alive)
    run.report.phase("loading")
    run.report.progress("loading", 0, 2, "tokenizer and configuration")
    found = base.find_base(run.job, run.config)
    tokenizer = base.load_tokenizer(found)
    run.heed_stop()
    return found, tokenizer


def longest(run: Run, found: Base, tokenizer: PreTrainedTokenizerBase, replaced: list[Replacement]) -> int:
    """Tokens that a sequence may have: as configured, and never more than the model can take."""
    own = getattr(found.architecture.get_text_config(), "max_position_embeddings", None)
    limit = own or min(tokenizer.model_max_length, 1_000_000)
    asked = run.config.max_seq_length
    if asked is None or asked <= limit:
        return asked or limit
    if "max_seq_length" in run.given:
        raise TrainingFailure(
            "config_error", f"`max_seq_length` is {asked}, but this model takes at most {limit} tokens."
        )
    replace(run, replaced, "max_seq_length", limit, f"The model takes at most {limit} tokens.")
    return int(limit)


def replace(run: Run, replaced: list[Replacement], field: str, used: Any, reason: str) -> None:
    """Put another value in the place of a default that cannot be honoured, and remember to tell it."""
    replaced.append(Replacement(field=field, requested=getattr(run.config, field), used=used, reason=reason))
    run.config = run.config.model_copy(update={field: used})


def no_dropout(run: Run, replaced: list[Replacement]) -> bool:
    """Whether to switch all dropout off, which pairs are compared without unless the user asked for some."""
    if run.config.lora_r is None:
        return True
    if "lora_dropout" not in run.given and run.config.lora_dropout > 0:
        replace(run, replaced, "lora_dropout", 0.0, "Dropout would be noise in the comparison of two answers.")
    return run.config.lora_dropout == 0


def chat_template(run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer without chat template a plain one, and say so."""
    if ensure_template(tokenizer):
        run.report.message(
            "The tokenizer has no chat template; a plain one (<|user|>, <|assistant|>) is used and saved with the "
            "output.",
            level="warning",
        )


def read_data(run: Run, read: Read[Some]) -> tuple[Some, Some | None]:
    """The data to train on and the data held out, made ready before any weight is loaded.

    Raises:
        TrainingFailure: `bad_data` that names the rows.
    """
    run.report.phase("tokenizing")
    config, source, other = run.config, run.job["dataset"], run.job.get("eval_dataset")
    try:
        chosen = held = None
        if config.eval_split > 0:
            chosen, held = data.split(count_rows(source["path"]), config.eval_split, config.seed)
        training = read(source, chosen, "training")
        rest = source if held else other
        held_out = read(rest, held, "evaluation") if rest else None
    except FileNotFoundError as error:
        raise TrainingFailure("bad_data", "The data set's file is not there any more.") from error
    for one in (training, held_out):
        for remark in one.remarks if one else []:
            run.report.message(remark, level="warning")
    return training, held_out


def seen(run: Run, training: Rows) -> Dataset:
    """What of the data is trained on: all, or the rows of one step again and again."""
    return data.first_batch(training.dataset, run.config) if run.config.overfit_first_batch else training.dataset


def chat_template_if_needed(run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
    """`chat_template`, where the pairs or prompts of a data set are messages."""
    if any(converse(one["path"]) for one in (run.job["dataset"], run.job.get("eval_dataset")) if one):
        chat_template(run, tokenizer)


def said_of_cache(run: Run, *some: Rows | None) -> dict[str, str]:
    """Tell whether an earlier run has made all of the tokens; returns the fact about it."""
    if not all(one.are_cached for one in some if one):
        return {"tokenized": "now"}
    run.report.message("An earlier run has tokenised this data in the same way: its tokens are used again.")
    return {"tokenized": "cached"}


def pairs_of(run: Run, cache: TokenCache, source: dict[str, Any], chosen: list[int] | None, purpose: Purpose) -> Source:
    """The rows of a data set, for `worker.training.pairs`."""
    return Source(source["path"], source.get("sha256"), chosen, purpose, tokenizing(run), cache)


def token_cache(run: Run) -> TokenCache:
    """What earlier runs have tokenised, where the job names a place for it."""

    def alive() -> None:
        run.heed_stop()
        run.report.alive()

    return TokenCache.of_job(run.job, warn=lambda text: run.report.message(text, level="warning"), alive=alive)


def tokenizing(run: Run) -> Callable[[int, int], None]:
    """What tells how far the data is, and heeds a stop."""
    return lambda done, total: run.progress("tokenizing", done, total)


def steps_in_all(run: Run, steps_in_a_pass: int) -> int:
    """Optimizer steps of the whole run, as the trainer counts them."""
    steps = run.config.max_steps or math.ceil(run.config.epochs * steps_in_a_pass)
    return max(steps, run.config.min_steps or 0)


@contextmanager
def weights(run: Run, found: Base) -> Iterator[Base]:
    """Where the weights to start from are for as long as the block lasts: an adapter is merged into its base."""
    alive = run.report.alive
    # transformers shows a bar wherever it goes through many weights: loading them, writing them.
    transformers.utils.logging.set_tqdm_hook(
        lambda bar, what, options: bar(*(each(things, alive) for things in what), **options)
    )
    run.report.phase("loading")
    dtype = model.weights_dtype(run.config, run.machine)
    with base.merged(found, run.folder / "base_model", dtype, alive) as start:
        yield start


def load(run: Run, start: Base, highest_id: int, head: model.Head = "causal") -> PreTrainedModel:
    """The model on its device, able to take every token of the data."""
    if start.from_scratch and run.resume_from is None:
        run.report.message(
            f"The folder {run.job['base_model']['name']} holds no weights: they start as random numbers drawn with "
            f"seed {run.config.seed}, and the model is trained from scratch."
        )
    with while_growing(run.report.alive, start.folder):
        network = model.load_model(start, run.config, run.machine, head)
    run.config = run.config.model_copy(update={"attn_implementation": network.config._attn_implementation})
    model.check_vocabulary(network, highest_id)
    run.heed_stop()
    return network


def highest_id(tokenizer: PreTrainedTokenizerBase, *some: Rows | None) -> int:
    """The highest token id that the model will be given."""
    return max([int(tokenizer.pad_token_id or 0), *(one.highest_id for one in some if one)])


def arguments(run: Run, total_steps: int) -> dict[str, Any]:
    """The configuration in the words of every trainer; names that are not ours to choose are all set here."""
    config, options, cuda = run.config, run.config.trainer_options, run.machine.kind == "cuda"
    return {
        "output_dir": str(run.folder),
        "max_steps": total_steps,
        "per_device_train_batch_size": config.batch_size,
        "per_device_eval_batch_size": options.eval_batch_size or config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": config.lr_scheduler_type,
        "warmup_steps": config.warmup_ratio,
        "weight_decay": config.weight_decay,
        "optim": config.optim,
        "adam_beta1": options.adam_beta1,
        "adam_beta2": options.adam_beta2,
        "adam_epsilon": options.adam_epsilon,
        "max_grad_norm": options.max_grad_norm,
        "activation_checkpointing": bool(config.gradient_checkpointing),
        "use_cpu": not cuda,
        "bf16": cuda and run.machine.bf16,
        "fp16": cuda and not run.machine.bf16,
        "seed": config.seed,
        "remove_unused_columns": False,
        "dataloader_pin_memory": cuda,
        "logging_steps": config.logging_steps,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps" if config.eval_steps else "no",
        "eval_steps": config.eval_steps,
        # A resumed run has begun before.
        "eval_on_start": options.eval_on_start and run.resume_from is None,
        # When to save is decided after each step, and how is ours: the trainer's own way is not atomic.
        "save_strategy": "no",
        "save_total_limit": None,
        "report_to": "none",
        "disable_tqdm": True,
    }


def build(make: type[Trains], run: Run, **options: Any) -> Trains:
    """The trainer, watched after every step.

    Raises:
        TrainingFailure: options that do not go together, or not with this model.
    """
    try:
        trainer = make(run, **options)
    except ValueError as error:  # how TRL and peft refuse them
        raise TrainingFailure("config_error", str(error)) from error
    model.check_modules(trainer.model, run.config)
    model.keep_full_precision(trainer.model, run.machine)
    trainer.add_callback(StepWatcher(run, trainer))
    asked = run.config.trainer_options
    if asked.distributions_steps is not None:
        trainer.add_callback(DistributionWatcher(run, asked.distributions_steps))
    if asked.memory_profile:
        trainer.add_callback(MemoryProfiler(run, trainer.gpu_memory))
    return trainer


def tell(
    trainer: Faithful, found: Base, replaced: list[Replacement], training: Rows, held_out: Rows | None, **more: Any
) -> dict[str, Any]:
    """Tell the configuration in force and the first facts, and remember what the numbers depend on."""
    run = trainer.run
    facts = model.first_facts(trainer.model, run.machine)
    facts |= _costs(trainer, training, facts.get("device_name"))
    facts |= {
        "rows": training.rows, "tokens": training.tokens, "sequences": len(training.dataset),
        "eval_rows": held_out.rows if held_out else 0, "total_steps": trainer.args.max_steps,
        "weights_dtype": str(model.weights_dtype(run.config, run.machine)), "base_revision": found.revision, **more,
    }  # fmt: skip
    run.fingerprint = _fingerprint(run, found, facts)
    facts |= fidelity.facts(_differences(run))
    trainer.facts, trainer.replaced = facts, replaced
    if run.resume_from is None:
        trainer.tell_facts()  # else once it is known how well the checkpoint was loaded
    return facts


def _costs(trainer: Faithful, training: Rows, device: str | None) -> dict[str, Any]:
    """Operations of a token, and what the device can do of them: what MFU is made of."""
    throughput, run = trainer.throughput, trainer.run
    throughput.flops = flops.count(
        trainer.model,
        checkpointing=bool(run.config.gradient_checkpointing),
        reference=trainer.passes_reference(),
    )
    throughput.peak_tflops = run.config.trainer_options.peak_tflops or peak_tflops(device)
    length = trainer.usual_length(training.tokens / training.rows)
    return {
        "flops_per_token": throughput.flops.per_token(length),
        "flops_per_token_hardware": throughput.flops.per_token_of_hardware(length),
        "flops_sequence_length": round(length),
        "flops_not_counted": trainer.NOT_COUNTED,
        "peak_tflops": throughput.peak_tflops,
    }


def train(trainer: Faithful) -> None:
    """Train to the end or to a stop, from the beginning or from the checkpoint."""
    run, total_steps = trainer.run, trainer.args.max_steps
    if run.resume_from is None:
        for history in run.histories:
            history.begin(None)
        trainer.train()
    else:
        _go_on(trainer, Path(run.resume_from["path"]), total_steps)
    if trainer.state.global_step >= total_steps:
        run.ended_by = None


def finish(trainer: Faithful, start: Base, facts: dict[str, Any]) -> dict[str, Any]:
    """Export where training is over, and push; returns the fields of the result record."""
    run, state = trainer.run, trainer.run.state
    output = export(trainer, start, facts) if run.ended_by in _EXPORTS else None
    return {
        "outcome": "completed" if run.ended_by in _COMPLETES else "stopped",
        "why": run.ended_by,
        "output": output,
        "hub": hub.push(run, run.folder / output) if output else None,
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "metrics": {
            "loss": state.loss,
            "best_loss": state.best_loss,
            trainer.OBJECTIVE: state.objective,
            f"best_{trainer.OBJECTIVE}": state.best_objective,
            "tokens": state.tokens,
        },
    }


def _go_on(trainer: Faithful, checkpoint: Path, total_steps: int) -> None:
    run = trainer.run
    trainer.go_on_from(checkpoint)
    limit = run.state.limit_reached(run.config, trainer.saved_step)
    if limit is not None or trainer.saved_step >= total_steps:
        # Trained as far as it is to go already, and lost before its output was written.
        run.ended_by = limit
        trainer.restore_finished(checkpoint)
        return
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    except EndedBeforeStep:
        pass


def _fingerprint(run: Run, found: Base, facts: dict[str, Any]) -> dict[str, Any]:
    held_out = run.job.get("eval_dataset")
    return {
        "base_model": found.identity,
        "dataset": run.job["dataset"].get("sha256"),
        "eval_dataset": held_out.get("sha256") if held_out else None,
        "reward_models": facts.get("reward_models"),
        "weights": facts["weights_dtype"],
        **{name: facts.get(name) for name in ("device", "device_name", "cpu_instructions", "threads", "versions")},
    }


def _differences(run: Run) -> list[str]:
    """Why this attempt may not go on exactly where the checkpoint stands."""
    if run.resume_from is None:
        return []
    found = fidelity.reasons(Path(run.resume_from["path"]), run.fingerprint)
    return [*found, fidelity.ON_A_GPU] if run.machine.kind == "cuda" else found
