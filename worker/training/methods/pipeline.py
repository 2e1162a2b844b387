"""Training of every method: `train_on_tokens` has all steps in order; `rlhf` orders them itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from transformers import PrinterCallback, TrainingArguments

from anneal.contracts.attempt.messages import TrainingResult
from anneal.contracts.training_config.resolution import Replacement
from app.estimator.activations import Checkpointing
from app.estimator.architecture import UnknownArchitecture
from app.estimator.architecture import read_architecture as read_architecture
from app.estimator.flops import step_operations
from app.estimator.parameters import CannotTrain
from worker.checkpoint_files import resume_fidelity
from worker.training.context import TrainingContext
from worker.training.data import dataset
from worker.training.data.tokenization import tokenizer_digest
from worker.training.failures import TrainingFailure, one_line
from worker.training.loop.callbacks import MetricLines, SharingCallback, StepCallback
from worker.training.loop.checkpoints import EndedBeforeStep
from worker.training.loop.module_walks import CachedModuleWalks
from worker.training.loop.sampling import end_answers_at_turns
from worker.training.loop.trainer import ServiceTrainerMixin
from worker.training.measurement.histograms import HistogramCallback
from worker.training.measurement.memory import MemoryProfiler
from worker.training.methods import preparation
from worker.training.methods.preparation import Rows, RunData, Setup, TokenizeRows
from worker.training.model import adapter_init, kernels, loader
from worker.training.model.base_model import BaseModelSource
from worker.training.model.compilation import compile_layers
from worker.training.model.peak_flops import peak_tflops
from worker.training.output import hub_push
from worker.training.output.export import OUTPUT, export_output
from worker.training.output.save_check import check_saves
from worker.training.planning import memory_plan
from worker.training.planning.step_planning import compile_ahead, plan_step

_COMPLETES = {None, "early_stopping", "callback"}
_EXPORTS = _COMPLETES | {"time_limit", "stop_at_step"}

Trains = TypeVar("Trains", bound=ServiceTrainerMixin)


def train_on_tokens(
    run: TrainingContext,
    replaced: list[Replacement],
    setup: Setup,
    tokenize_rows: TokenizeRows[Rows],
    make: Callable[..., ServiceTrainerMixin],
    arguments: Callable[[dict[str, Any]], TrainingArguments],
) -> TrainingResult:
    """Train one run on tokenized rows to its end or to a stop, and return the fields of its result record.

    Args:
        run: context of the run; its configuration is updated with what the model and the data determine.
        replaced: defaults that this machine, model or data replaced; extended and reported.
        setup: result of `preparation.prepare_start`.
        tokenize_rows: called for the training data, then for the held-out data.
        make: creates the trainer, whose class computes the loss.
        arguments: creates the trainer's configuration from the arguments that all trainers share; called after the
            model is loaded.

    Raises:
        TrainingFailure: with a stable code.
        Stopped: a stop was requested before there was anything to save.
    """
    base, tokenizer, max_length = setup
    data = preparation.read_data(run, tokenize_rows, preparation.token_cache(run))
    training = data.training
    tokenized = preparation.cache_messages(run, data.parts)
    total_steps = preparation.total_steps(
        run, dataset.steps_per_epoch(training.dataset, run.config, run.ranks.data_parallel_size)
    )
    memory_plan.choose_checkpointing(run, replaced, base, training.dataset, max_length)
    head: loader.Head = "reward" if run.method.has_reward_head else "causal"
    with preparation.base_weights(run, base) as start:
        network = preparation.load_network(run, start, preparation.highest_id(tokenizer, data.parts), head)
        trainer = build_trainer(
            make,
            run,
            start,
            model=network,
            args=arguments(trainer_arguments(run, total_steps)),
            train_dataset=preparation.training_rows(run, training),
            eval_dataset=data.evaluated,
            processing_class=tokenizer,
            peft_config=adapter_init.adapter_config(run, network, start.revision, head),
        )
        planned = plan_step(trainer, replaced) | compile_ahead(trainer)
        facts = report_run_info(trainer, base, replaced, data, max_length=max_length, **tokenized, **planned)
        if run.is_inference:
            return evaluate_weights(trainer)
        train_to_end(trainer)
        return finish_run(trainer, start, facts)


def trainer_arguments(run: TrainingContext, total_steps: int) -> dict[str, Any]:
    """Map the configuration to the arguments of transformers that all trainers share."""
    config, options, cuda = run.config, run.config.trainer_options, run.machine.kind == "cuda"
    optimizer_args = options.optim_args.model_dump(exclude_none=True)
    if config.weights_dtype == "bfloat16":
        optimizer_args["bf16_stochastic_round"] = True
    return {
        "output_dir": str(run.folder),
        "max_steps": total_steps,
        "per_device_train_batch_size": config.batch_size,
        "per_device_eval_batch_size": options.eval_batch_size or config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": config.lr_scheduler_type,
        "lr_scheduler_kwargs": options.lr_scheduler_kwargs.model_dump(exclude_none=True),
        "warmup_steps": config.warmup_ratio,
        "weight_decay": config.weight_decay,
        "optim": config.optim,
        "optim_args": ",".join(f"{name}={value}" for name, value in optimizer_args.items()) or None,
        "adam_beta1": options.adam_beta1,
        "adam_beta2": options.adam_beta2,
        "adam_epsilon": options.adam_epsilon,
        "max_grad_norm": options.max_grad_norm,
        "activation_checkpointing": config.gradient_checkpointing in (True, "selective"),
        "use_cpu": not cuda,
        "bf16": config.dtype == "bfloat16",
        "fp16": config.dtype == "float16",
        "seed": config.seed,
        "remove_unused_columns": False,
        "dataloader_pin_memory": cuda,
        "accelerator_config": {"non_blocking": cuda},  # a copy to the device would else wait for the step before it
        # Without a strategy, the callback still logs the last step.
        "logging_strategy": "steps" if run.is_probe or config.logging_steps else "no",
        "logging_steps": 1 if run.is_probe else config.logging_steps,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps" if config.eval_steps else "no",
        "eval_steps": run.eval_every,
        # A resumed run was evaluated when it first started.
        "eval_on_start": options.eval_on_start and run.resume_from is None,
        # Our callback decides after each step whether to save: the Trainer's own saving is not atomic.
        "save_strategy": "no",
        "save_total_limit": None,
        "report_to": "none",
        "disable_tqdm": True,
        # Every parameter that is trained takes part in each step, and no module has buffers that training changes.
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,
        # An argument of TRL, which the trainer that generates does not have.
        **({"activation_offloading": True} if config.activation_offload else {}),
    }


def build_trainer(make: Callable[..., Trains], run: TrainingContext, start: BaseModelSource, **options: Any) -> Trains:
    """Create the trainer and attach the callbacks that run after every step.

    Raises:
        TrainingFailure: options are incompatible with each other or with this model.
    """
    try:
        with loader.unrounded_adapters(run.report.alive):
            trainer = make(run, **options)
    except (ValueError, TypeError, NotImplementedError) as error:  # TRL and peft reject options with them
        raise TrainingFailure("config_error", one_line(error)) from error
    adapter_init.give_bias_to_trained_head(trainer.model)
    trainer.first_values = adapter_init.set_first_values(run, trainer.model, start)
    loader.check_modules(trainer.model, run.config)
    loader.name_base(trainer.model, run.job.base_model.portable_name)
    if run.config.weights_dtype == "float32":
        loader.keep_full_precision(trainer.model)
    is_compiled = run.config.torch_compile and not run.is_inference
    is_half = run.config.dtype != "float32"
    trainer.kernels = kernels.use_kernels(trainer.model, is_half=is_half, is_compiled=is_compiled)
    if run.config.lora_dropout > 0 and not is_compiled and trainer.kernels.get("lora", "fused") != "fused":
        run.report.message(
            f"`lora_dropout` is {run.config.lora_dropout}: each adapter that peft computes (`kernels` in the run "
            "facts) keeps a mask and a copy of its input for the backward pass. Set it to 0 to save this memory."
        )
    if is_compiled:
        compile_layers(trainer.model)
    if not run.is_inference:
        _end_answers_at_turns(trainer)
    if run.ranks.is_first and not run.is_inference and not run.is_probe:
        check_saves(trainer)
    trainer.remove_callback(PrinterCallback)  # it prints dictionaries, in one process of each host
    if run.ranks.is_first:
        trainer.add_callback(MetricLines())
    trainer.add_callback(StepCallback(run, trainer))
    trainer.add_callback(trainer.plugin_callbacks)
    options_of_run = run.config.trainer_options
    if options_of_run.callbacks:
        trainer.add_callback(SharingCallback(trainer))
    if options_of_run.distributions_steps is not None and run.ranks.is_first:
        trainer.add_callback(HistogramCallback(run, options_of_run.distributions_steps))
    if options_of_run.memory_profile:
        trainer.add_callback(MemoryProfiler(run, trainer.gpu_memory))
    if run.ranks.size == 1:
        trainer.add_callback(CachedModuleWalks())  # last: callbacks of plugins may add modules when training begins
    return trainer


def _end_answers_at_turns(trainer: ServiceTrainerMixin) -> None:
    """Let the model end its answers where the chat template does, and report a base whose files do not say so."""
    run, tokenizer = trainer.run, trainer.processing_class
    token = end_answers_at_turns(run, trainer.model, tokenizer)
    if token is None:
        return
    if run.config.lora_r is not None and run.config.output == "adapter":
        ends = trainer.model.generation_config.eos_token_id
        advice = f"Where you load the adapter yourself, pass `eos_token_id={ends}` to `generate`."
    else:
        advice = "The generation_config.json of the output names it."
    run.report.message(
        f"The chat template ends an answer with {token}, which is an end token neither of the tokenizer nor of the "
        f"model. Samples and predictions of this run end there too. {advice}",
        level="warning",
    )


def report_run_info(
    trainer: ServiceTrainerMixin,
    base: BaseModelSource,
    replaced: list[Replacement],
    data: RunData[Any],
    **more: Any,
) -> dict[str, Any]:
    """Report the effective configuration and the initial run info, and set the run's fingerprint."""
    run, training, held_out = trainer.run, data.training, data.held_out
    facts = loader.initial_run_info(trainer.model, run.machine) | {"kernels": trainer.kernels}
    facts |= _count_costs(trainer, base, training, facts.get("device_name"))
    facts |= {
        **_device_facts(run), "rows": training.rows, "tokens": training.tokens, "sequences": len(training.dataset),
        "eval_rows": held_out.rows if held_out else 0,
        "extra_eval_rows": {name: one.rows for name, one in data.extra.items()},
        "total_steps": None if run.is_inference else trainer.args.max_steps,
        "loaded_dtype": str(loader.weights_dtype(run.config, run.machine)), "base_revision": base.revision, **more,
    }  # fmt: skip
    if run.is_probe:
        facts["whole_run_steps"] = preparation.configured_steps(run)
    run.fingerprint = _build_fingerprint(trainer, base, facts)
    facts |= resume_fidelity.fidelity_facts(_fidelity_differences(run))
    trainer.facts, trainer.replaced = facts, replaced
    if run.resume_from is None:
        trainer.report_run_info()  # a resumed run reports it after the fidelity check of the loaded checkpoint
    return facts


def _device_facts(run: TrainingContext) -> dict[str, Any]:
    """Return how many devices train the run, how they share it, and the rows of a step on all of them together."""
    config, ranks = run.config, run.ranks
    return {
        "devices": ranks.size,
        "hosts": ranks.size // ranks.on_host,
        "sharded": run.is_sharded,
        "sequence_parallel": ranks.per_sequence,
        "expert_parallel": run.job.expert_parallel,
        "rows_per_step": config.batch_size * config.gradient_accumulation_steps * ranks.data_parallel_size,
    }


def _count_costs(
    trainer: ServiceTrainerMixin, base: BaseModelSource, training: Rows, device: str | None
) -> dict[str, Any]:
    """Count the operations per token and look up the device's peak, the inputs of MFU."""
    throughput, run = trainer.throughput, trainer.run
    peak = run.config.trainer_options.peak_tflops or peak_tflops(device)
    throughput.peak_tflops = None if peak is None else peak * run.ranks.size
    length = trainer.usual_length(training.tokens / training.rows)
    facts = {
        "flops_sequence_length": round(length), "flops_not_counted": trainer.NOT_COUNTED, "peak_tflops": peak,
    }  # fmt: skip
    if run.config.trainer_options.model_factory is not None:
        return facts | {"flops_unknown": "The layers of a model of `extra.model_factory` are not known."}
    try:
        model = read_architecture(base.architecture.get_text_config().to_dict())
        # Layers are alike, so recomputing some of them costs their part of recomputing all.
        part = trainer.recomputed_part
        checkpointing: Checkpointing = "full" if part else "off"
        step = step_operations(model, run.config, checkpointing, reference_passes=int(trainer.has_reference_pass()))
    except (UnknownArchitecture, CannotTrain) as error:
        return facts | {"flops_unknown": str(error)}
    throughput.operations = step.training
    return facts | {
        "flops_per_token": step.training.per_token(length),
        "flops_per_token_hardware": step.training.per_token(length) + round(part * step.recomputed.per_token(length)),
    }


def train_to_end(trainer: ServiceTrainerMixin) -> None:
    """Train to the end or to a stop, from the first step or from a checkpoint."""
    run = trainer.run
    trainer.prepare_model()
    with trainer.saving.settled():
        if run.resume_from is None:
            for history in run.histories:
                history.start_from(None)
            trainer.train()
        else:
            _resume_training(trainer, run.resume_from.path)
    if trainer.state.global_step >= trainer.args.max_steps:  # `max_steps` grows if the run is extended
        run.ended_by = None


def evaluate_weights(trainer: ServiceTrainerMixin) -> TrainingResult:
    """Evaluate the weights of the job, and return the fields of the result record.

    The evaluation is that of a training: the trainer is created from the base model, so that a reference model is the
    same, and then loads the weights as it does to resume.
    """
    run, weights = trainer.run, trainer.run.job.weights
    for history in run.histories:
        history.start_from(None)
    if weights is not None:
        trainer.load_trained_weights(weights)
    trainer.prepare_model()
    metrics = trainer.evaluate()
    return {
        "outcome": "completed" if run.stop_requested is None else "stopped",
        "why": None if run.stop_requested is None else run.stop_requested.why,
        "output": None,
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "metrics": {name: value for name, value in metrics.items() if name == run.method.eval_metric},
    }


def finish_run(trainer: ServiceTrainerMixin, start: BaseModelSource, facts: dict[str, Any]) -> TrainingResult:
    """Export and push the output if training is over, and return the fields of the result record."""
    run, state = trainer.run, trainer.run.state
    exports = run.ended_by in _EXPORTS and not run.is_probe
    if exports:
        _check_trained(trainer)
        trainer.gather_weights()
    exported = export_output(trainer, start, facts) if exports and run.ranks.is_first else None
    return {
        "outcome": "completed" if run.ended_by in _COMPLETES else "stopped",
        "why": run.ended_by,
        "output": OUTPUT if exported else None,
        "exported": exported,
        "hub": hub_push.push_output(run, run.folder / OUTPUT) if exported else None,
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "metrics": {
            "loss": state.loss,
            "best_loss": state.best_loss,
            run.method.eval_metric: state.objective,
            f"best_{run.method.eval_metric}": state.best_objective,
            "tokens": state.tokens,
        },
    }


def _check_trained(trainer: ServiceTrainerMixin) -> None:
    """Reject weights that no step has changed.

    Raises:
        TrainingFailure: `non_finite_loss`.
    """
    steps = trainer.state.global_step
    if steps and not trainer.run.state.recent_losses:
        raise TrainingFailure(
            "non_finite_loss",
            f"All {steps} steps were skipped, because their loss or their gradients were not finite: nothing was "
            "trained, so there is no output. Lower `learning_rate`, or use another base model or other data.",
        )


def _resume_training(trainer: ServiceTrainerMixin, checkpoint: Path) -> None:
    run = trainer.run
    trainer.restore_from(checkpoint)
    limit = run.state.limit_reached(run.config, trainer.saved_step)
    if limit is not None or trainer.saved_step >= trainer.args.max_steps:
        # Training had already finished; the earlier attempt was lost before its output was written.
        run.ended_by = limit
        trainer.restore_finished(checkpoint)
        # As `on_train_begin` does: the run is `running` while its output is written, and the attempt has a first step.
        start, total = trainer.saved_step, trainer.args.max_steps
        run.report.send({"type": "phase", "name": "training", "start_step": start, "total_steps": total})
        return
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    except EndedBeforeStep:
        pass


def _build_fingerprint(trainer: ServiceTrainerMixin, base: BaseModelSource, facts: dict[str, Any]) -> dict[str, Any]:
    run = trainer.run
    held_out, tokenizer = run.job.eval_dataset, trainer.processing_class
    return {
        "base_model": base.identity,
        # That of the base model is part of its identity.
        "tokenizer": None if run.job.tokenizer is None else tokenizer_digest(tokenizer, is_dated=False),
        "dataset": run.dataset.sha256,
        "eval_dataset": held_out.sha256 if held_out else None,
        "reward_models": facts.get("reward_models"),
        "teacher": preparation.teacher_identity(run),
        resume_fidelity.BATCH_SIZE: run.config.batch_size,
        resume_fidelity.ATTENTION: facts["attention"],
        resume_fidelity.PADDING_FREE: run.config.trainer_options.padding_free,
        resume_fidelity.DEVICES: run.ranks.size,
        resume_fidelity.SHARDED: run.is_sharded,
        resume_fidelity.SEQUENCE_PARALLEL: run.ranks.per_sequence,
        resume_fidelity.EXPERT_PARALLEL: run.job.expert_parallel,
        "weights": facts["loaded_dtype"],
        "kernels": facts["kernels"],
        **{name: facts.get(name) for name in ("device", "device_name", "cpu_instructions", "threads", "versions")},
    }


def _fidelity_differences(run: TrainingContext) -> list[str]:
    """Return the reasons why this attempt may not continue exactly from the checkpoint."""
    if run.resume_from is None:
        return []
    differences = resume_fidelity.fingerprint_differences(run.resume_from.path, run.fingerprint)
    return [*differences, resume_fidelity.ON_A_GPU] if run.machine.kind == "cuda" else differences
