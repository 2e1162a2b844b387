"""Supervised fine-tuning (`sft`, `full`, `lora`, `qlora`): model → data → trainer → facts → train → export."""

import math
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig

from app.runs.config import Machine, Replacement, TrainingConfig
from worker.training import checkpoints, data, model
from worker.training.callbacks import StepWatcher
from worker.training.chat import ensure_template
from worker.training.data import Tokens
from worker.training.export import export
from worker.training.failures import TrainingFailure
from worker.training.run import Run
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
        checkpoints.check(Path(resume["path"]), resume["manifest_sha256"])

    run.report.phase("loading")
    run.report.progress("loading", 0, 2, "tokenizer and configuration")
    base = model.find_base(run.job, run.config, run.machine)
    tokenizer = model.load_tokenizer(base)
    architecture = model.load_config(base)
    run.heed_stop()

    run.report.phase("tokenizing")
    max_length = _max_length(run, architecture, tokenizer, replaced)
    training, held_out = _tokens(run, tokenizer, max_length)
    total_steps = _total_steps(run.config, training)

    run.report.phase("loading")
    if base.from_scratch and resume is None:
        run.report.message(
            f"The folder {run.job['base_model']['name']} holds no weights: they start as random numbers drawn with "
            f"seed {run.config.seed}, and the model is trained from scratch."
        )
    network = model.load_model(base, run.config, run.machine)
    run.heed_stop()
    trainer = _trainer(
        run,
        model=network,
        args=_arguments(run.config, run.machine, run.folder, total_steps, max_length),
        train_dataset=_seen(run.config, training),
        eval_dataset=held_out.dataset if held_out else None,
        processing_class=tokenizer,
        peft_config=model.lora_config(run.config),
    )
    StepWatcher(run).watch(trainer)
    facts = model.first_facts(trainer.model, run.machine)
    facts |= {
        "rows": training.rows, "tokens": training.tokens, "sequences": len(training.dataset),
        "eval_rows": held_out.rows if held_out else 0, "total_steps": total_steps,
        "max_length": max_length, "weights_dtype": str(model.weights_dtype(run.config, run.machine)),
    }  # fmt: skip
    run.report.config(run.config.model_dump(mode="json"), [one.model_dump(mode="json") for one in replaced], facts)

    if resume is None:
        run.history.begin(None)
        trainer.train()
    else:
        _go_on(trainer, Path(resume["path"]), total_steps)
    if trainer.state.global_step >= total_steps:
        run.ended_by = None

    outcome = "completed" if run.ended_by in _COMPLETES else "stopped"
    output = export(trainer, base, facts) if run.ended_by in _EXPORTS else None
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
    for wanted in run.config.modules_to_save or ():
        if not any(f"{wanted}.modules_to_save" in name for name, _ in trainer.model.named_modules()):
            raise TrainingFailure("config_error", f"`modules_to_save`: this model has no module {wanted}.")
    return trainer


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
        chosen, held = data.split(data.count_rows(source["path"]), config.eval_split, config.seed)

    def tokenise(one: dict[str, Any], rows: list[int] | None) -> Tokens:
        return data.tokenise(
            one["path"], one["format"], tokenizer, config, max_length=max_length, chosen=rows,
            progress=lambda done, total: run.progress("tokenizing", done, total),
        )  # fmt: skip

    try:
        training = tokenise(source, chosen)
        held_out = tokenise(source, held) if held else tokenise(other, None) if other else None
    except FileNotFoundError as error:
        raise TrainingFailure("bad_data", "The data set's file is not there any more.") from error
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
    extra, cuda = config.extra, machine.kind == "cuda"
    return SFTConfig(
        output_dir=str(folder),
        max_steps=total_steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=extra.get("eval_batch_size") or config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=config.warmup_ratio,
        weight_decay=config.weight_decay,
        optim=config.optim,
        adam_beta1=extra.get("adam_beta1", 0.9),
        adam_beta2=extra.get("adam_beta2", 0.999),
        adam_epsilon=extra.get("adam_epsilon", 1e-8),
        max_grad_norm=extra.get("max_grad_norm", 1.0),
        neftune_noise_alpha=config.neftune_noise_alpha,
        activation_checkpointing=bool(config.gradient_checkpointing),
        use_cpu=not cuda,
        bf16=cuda and machine.bf16,
        fp16=cuda and not machine.bf16,
        seed=config.seed,
        max_length=max_length,
        packing=config.packing,
        packing_strategy=extra.get("packing_strategy", "bfd"),
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
