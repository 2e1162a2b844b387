"""Supervised fine-tuning (`sft`, `full`, `lora`, `qlora`): model → data → trainer → facts → train → export."""

import math
from pathlib import Path
from typing import Any, Literal

import transformers
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig

from app.runs.config import Machine, Replacement, TrainingConfig
from worker.training import base, checkpoints, data, fidelity, model, rows
from worker.training.base import Base
from worker.training.callbacks import StepWatcher
from worker.training.chat import ensure_template
from worker.training.data import Tokens
from worker.training.export import export
from worker.training.failures import TrainingFailure
from worker.training.pulse import each, while_growing
from worker.training.run import Run
from worker.training.token_cache import TokenCache
from worker.training.trainer import EndedBeforeStep, SupervisedTrainer

_COMPLETES = {None, "early_stopping"}
_EXPORTS = _COMPLETES | {"time_limit", "stop_at_step"}


def train(run: Run, replaced: list[Replacement]) -> dict[str, Any]:
    """Train one run to its end or to a stop; returns the fields of its result record.

    Raises:
        TrainingFailure: with a stable code.
        Stopped: a stop came before there was anything to save.
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

    # Data before weights: bad rows are told before hours of loading or merging.
    run.report.phase("tokenizing")
    max_length = _max_length(run, found.architecture, tokenizer, replaced)
    tokens = _tokens(run, tokenizer, max_length)
    alive = run.report.alive
    # transformers shows a bar wherever it goes through many weights: loading them, writing them.
    transformers.utils.logging.set_tqdm_hook(
        lambda bar, what, options: bar(*(each(things, alive) for things in what), **options)
    )
    dtype = model.weights_dtype(run.config, run.machine)
    with base.merged(found, run.folder / "base_model", dtype, alive) as start:
        return _train(run, replaced, found, start, tokenizer, tokens, max_length)


def _train(
    run: Run,
    replaced: list[Replacement],
    found: Base,
    start: Base,
    tokenizer: PreTrainedTokenizerBase,
    tokens: tuple[Tokens, Tokens | None],
    max_length: int,
) -> dict[str, Any]:
    """From the weights on; `found` is the base that was asked for, `start` the same with an adapter merged in."""
    training, held_out = tokens
    resume = run.resume_from
    total_steps = _total_steps(run.config, training)
    run.report.phase("loading")
    if found.from_scratch and resume is None:
        run.report.message(
            f"The folder {run.job['base_model']['name']} holds no weights: they start as random numbers drawn with "
            f"seed {run.config.seed}, and the model is trained from scratch."
        )
    with while_growing(run.report.alive, start.folder):
        network = model.load_model(start, run.config, run.machine)
    run.config = run.config.model_copy(update={"attn_implementation": network.config._attn_implementation})
    ids = [tokenizer.pad_token_id, training.highest_id, held_out.highest_id if held_out else 0]
    model.check_vocabulary(network, max(ids))
    run.heed_stop()
    trainer = _trainer(
        run,
        model=network,
        args=_arguments(run.config, run.machine, run.folder, total_steps, max_length),
        train_dataset=_seen(run.config, training),
        eval_dataset=held_out.dataset if held_out else None,
        processing_class=tokenizer,
        peft_config=model.lora_config(run.config, start.revision),
    )
    model.keep_full_precision(trainer.model, run.machine)
    StepWatcher(run).watch(trainer)
    facts = model.first_facts(trainer.model, run.machine)
    facts |= {
        "rows": training.rows, "tokens": training.tokens, "sequences": len(training.dataset),
        "eval_rows": held_out.rows if held_out else 0, "total_steps": total_steps,
        "tokenized": "cached" if training.are_cached and (not held_out or held_out.are_cached) else "now",
        "max_length": max_length, "weights_dtype": str(model.weights_dtype(run.config, run.machine)),
        "base_revision": found.revision,
    }  # fmt: skip
    run.fingerprint = _fingerprint(run, found, facts)
    facts |= fidelity.facts(_differences(run))
    run.report.config(run.config.model_dump(mode="json"), [one.model_dump(mode="json") for one in replaced], facts)

    if resume is None:
        run.history.begin(None)
        trainer.train()
    else:
        _go_on(trainer, Path(resume["path"]), total_steps)
    if trainer.state.global_step >= total_steps:
        run.ended_by = None

    outcome = "completed" if run.ended_by in _COMPLETES else "stopped"
    output = export(trainer, start, facts) if run.ended_by in _EXPORTS else None
    return {
        "outcome": outcome,
        "why": run.ended_by,
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "output": output,
        "metrics": {
            "loss": run.state.loss,
            "best_loss": run.state.best_loss,
            "eval_loss": run.state.eval_loss,
            "best_eval_loss": run.state.best_eval_loss,
            "tokens": run.state.tokens,
        },
    }


def _go_on(trainer: SupervisedTrainer, checkpoint: Path, total_steps: int) -> None:
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


def _trainer(run: Run, **options: Any) -> SupervisedTrainer:
    try:
        trainer = SupervisedTrainer(run, **options)
    except ValueError as error:  # how TRL and peft refuse options that do not go together, or with this model
        raise TrainingFailure("config_error", str(error)) from error
    model.check_modules(trainer.model, run.config)
    return trainer


def _fingerprint(run: Run, found: Base, facts: dict[str, Any]) -> dict[str, Any]:
    held_out = run.job.get("eval_dataset")
    return {
        "base_model": found.identity,
        "dataset": run.job["dataset"].get("sha256"),
        "eval_dataset": held_out.get("sha256") if held_out else None,
        "weights": facts["weights_dtype"],
        **{name: facts.get(name) for name in ("device", "device_name", "cpu_instructions", "threads", "versions")},
    }


def _differences(run: Run) -> list[str]:
    """Why this attempt may not go on exactly where the checkpoint stands."""
    if run.resume_from is None:
        return []
    found = fidelity.reasons(Path(run.resume_from["path"]), run.fingerprint)
    return [*found, fidelity.ON_A_GPU] if run.machine.kind == "cuda" else found


def _max_length(run: Run, architecture: Any, tokenizer: PreTrainedTokenizerBase, replaced: list[Replacement]) -> int:
    """Tokens a sequence is cut to: as configured, and never more than the model can take."""
    own = getattr(architecture.get_text_config(), "max_position_embeddings", None)
    limit = own or min(tokenizer.model_max_length, 1_000_000)
    asked = run.config.max_seq_length
    if asked is None or asked <= limit:
        return asked or limit
    if "max_seq_length" in run.given:
        raise TrainingFailure(
            "config_error", f"`max_seq_length` is {asked}, but this model takes at most {limit} tokens."
        )
    run.config = run.config.model_copy(update={"max_seq_length": limit})
    reason = f"The model takes at most {limit} tokens."
    replaced.append(Replacement(field="max_seq_length", requested=asked, used=limit, reason=reason))
    return int(limit)


def _tokens(run: Run, tokenizer: PreTrainedTokenizerBase, max_length: int) -> tuple[Tokens, Tokens | None]:
    """The data to train on and the data held out."""
    config, source, other = run.config, run.job["dataset"], run.job.get("eval_dataset")
    formats = {one["format"] for one in (source, other) if one}
    if "chat" in formats and ensure_template(tokenizer):
        run.report.message(
            "The tokenizer has no chat template; a plain one (<|user|>, <|assistant|>) is used and saved with the "
            "output.",
            level="warning",
        )
    chosen = held = None
    if config.eval_split > 0:
        chosen, held = data.split(rows.count_rows(source["path"]), config.eval_split, config.seed)

    def alive() -> None:
        run.heed_stop()
        run.report.alive()

    cache = TokenCache.of_job(run.job, warn=lambda text: run.report.message(text, level="warning"), alive=alive)

    def tokenise(one: dict[str, Any], rows: list[int] | None, purpose: Literal["training", "evaluation"]) -> Tokens:
        return data.tokenise(
            one["path"], one["format"], tokenizer, config, max_length=max_length, chosen=rows, purpose=purpose,
            progress=lambda done, total: run.progress("tokenizing", done, total), sha256=one.get("sha256"), cache=cache,
        )  # fmt: skip

    try:
        training = tokenise(source, chosen, "training")
        rest = source if held else other
        held_out = tokenise(rest, held, "evaluation") if rest else None
    except FileNotFoundError as error:
        raise TrainingFailure("bad_data", "The data set's file is not there any more.") from error
    if training.are_cached:
        run.report.message("An earlier run has tokenised this data in the same way: its tokens are used again.")
    for tokens in (training, held_out):
        for remark in tokens.remarks if tokens else []:
            run.report.message(remark, level="warning")
    return training, held_out


def _total_steps(config: TrainingConfig, training: Tokens) -> int:
    """Optimizer steps of the whole run, as the trainer counts them."""
    steps = config.max_steps or math.ceil(config.epochs * data.steps_in(training.dataset, config))
    return max(steps, config.min_steps or 0)


def _seen(config: TrainingConfig, training: Tokens) -> Any:
    return data.first_batch(training.dataset, config) if config.overfit_first_batch else training.dataset


def _arguments(config: TrainingConfig, machine: Machine, folder: Path, total_steps: int, max_length: int) -> SFTConfig:
    """The configuration in the trainer's own words; every name that is not ours to choose is set here."""
    options, cuda = config.trainer_options, machine.kind == "cuda"
    return SFTConfig(
        output_dir=str(folder),
        max_steps=total_steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=options.eval_batch_size or config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=config.warmup_ratio,
        weight_decay=config.weight_decay,
        optim=config.optim,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_epsilon=options.adam_epsilon,
        max_grad_norm=options.max_grad_norm,
        neftune_noise_alpha=config.neftune_noise_alpha,
        activation_checkpointing=bool(config.gradient_checkpointing),
        use_cpu=not cuda,
        bf16=cuda and machine.bf16,
        fp16=cuda and not machine.bf16,
        seed=config.seed,
        max_length=max_length,
        packing=config.packing,
        packing_strategy=options.packing_strategy,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        dataloader_pin_memory=cuda,
        logging_steps=config.logging_steps,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if config.eval_steps else "no",
        eval_steps=config.eval_steps,
        # When to save is decided after each step, and how is ours: the trainer's own way is not atomic.
        save_strategy="no",
        save_total_limit=None,
        report_to="none",
        disable_tqdm=True,
    )
