"""Sentences of an estimate: what it assumes, and why a value is unknown."""

from anneal.contracts.methods import METHODS
from anneal.contracts.schemas.estimates import Confidence, EstimatedDevice, Fit, RunEstimate, Unknown
from anneal.contracts.training_config.resolution import resolve_config
from app.estimator.flops import uncounted_parts
from app.estimator.memory import CONTEXT
from app.estimator.steps import make_step_plan
from app.runs.creating.estimates.devices import assumed_device
from app.runs.creating.estimates.inputs import EstimateInputs, Subject
from app.runs.creating.estimates.run_on_kind import RunOnKind

_WITH_PARAMETERS = "Unknown, because the model's parameters are unknown."


def with_assumed_device(estimate: RunEstimate, missing: str | None) -> RunEstimate:
    """Return the estimate for an assumed device, with the reason; without its time if no worker has such a device."""
    why = missing or "No online worker of this backend has a device for the run."
    what = "a GPU with bfloat16" if estimate.device.kind == "cuda" else "a CPU"
    assumptions = [f"{why.removesuffix('.')}; {what} is assumed.", *estimate.assumptions]
    unknown = list(estimate.unknown)
    if missing and all(one.field != "seconds" for one in unknown):
        unknown += [Unknown(field=name, reason=missing) for name in ("seconds", "cost")]
    return estimate.model_copy(update={"assumptions": assumptions, "unknown": unknown})


def memory_assumptions(on: RunOnKind, device: EstimatedDevice) -> list[str]:
    """Return the sentences about what the memory of a run on a device consists of."""
    config = on.config
    where = "A process with torch" if device.kind == "cpu" else "The context of CUDA and its libraries"
    sentences = [
        f"{where} takes {CONTEXT[device.kind] // 2**20} MiB before any tensor.",
        "Memory is computed for the longest sequences; the total is the peak within a step.",
        *on.plan.assumptions,
        *uncounted_parts(config, on.plan),
    ]
    if METHODS[config.method].has_teacher:
        counted = "are `reference`" if on.teacher_bytes else "are not included, because its configuration is not known"
        sentences.append(
            f"The weights of the teacher {counted}; `flops` and `seconds` do not include its forward passes, and "
            "generating answers."
        )
    if on.uses_liger:
        sentences.append(
            "Norms, rotary embeddings and gated layers are those of liger-kernel, as on every such worker."
        )
    if on.division.shards > 1:
        sentences.append(f"Weights, gradients and optimizer state are divided among {on.division.shards} devices.")
    if on.division.experts > 1:
        count = on.division.experts
        sentences.append(
            f"The experts of a layer are divided among {count} devices, which get equal numbers of tokens."
        )
    if on.sequence_parallel > 1:
        sentences.append(f"The activations of each sequence are divided among {on.sequence_parallel} devices.")
    if plugin := config.trainer_options.optimizer:
        sentences.append(
            f"The state of `extra.optimizer` (`{plugin.type}`) is unknown; two 32-bit values per trainable parameter "
            "are assumed, as for AdamW."
        )
    elif config.optim.startswith("paged_"):
        sentences.append(
            "Paged optimizer state is included, although it moves to the host when memory is scarce and is not part "
            "of the memory that torch reports as allocated."
        )
    return sentences


def unknown_estimate(subject: Subject, known: EstimateInputs, reason: str, *, has_steps: bool = True) -> RunEstimate:
    """Build an estimate without the model; without `has_steps`, they do not follow from its rows either."""
    unknown = [Unknown(field="parameters", reason=reason)]
    unknown += [Unknown(field=name, reason=_WITH_PARAMETERS) for name in ("memory_mb", "seconds")]
    steps = tokens = None
    assumed: list[str] = []
    if has_steps:
        steps, tokens, assumed = _without_model(subject, unknown)
    else:
        unknown += [Unknown(field=name, reason=_WITH_PARAMETERS) for name in ("steps", "tokens")]
    if known.missing is not None:
        assumed = [known.missing, *assumed]
    fits = [
        Fit(device=one, fits=None, total_mb=None, gradient_checkpointing=None, reason=_WITH_PARAMETERS, advice=[])
        for one in known.devices
    ]
    return RunEstimate(
        parameters=None,
        memory_mb=None,
        device=known.devices[0] if known.devices else assumed_device(subject.placement),
        gradient_checkpointing=None,
        steps=steps,
        tokens=tokens,
        flops=None,
        seconds=None,
        cost=None,
        confidence=Confidence(memory=None, seconds=None),
        fits=fits,
        assumptions=assumed,
        unknown=unknown,
    )


def _without_model(subject: Subject, unknown: list[Unknown]) -> tuple[int | None, int | None, list[str]]:
    """Return steps, tokens and assumptions derived from rows and batches; append the rest to `unknown`."""
    config = resolve_config(subject.plan.config, subject.user_set_fields, None).config
    step_plan = make_step_plan(config, subject.data, config.max_seq_length or 2**31, subject.data_parallel)
    if source := config.trainer_options.data_source:
        reason = source_reason(source.type)
        unknown += [Unknown(field="steps", reason=reason)] if step_plan.steps is None else []
        unknown.append(Unknown(field="tokens", reason=reason))
        return step_plan.steps, None, []
    if config.max_seq_length is None:
        reason = "Without `max_seq_length` the sequence length depends on the model, which is not known."
        unknown.append(Unknown(field="tokens", reason=reason))
        return step_plan.steps, None, []
    limit = "The model's own sequence limit is not known, so no sequence is assumed to be cut by it."
    return step_plan.steps, step_plan.tokens, [*step_plan.assumptions, limit]


def source_reason(name: str) -> str:
    """Return why the number of rows of a data source is not known."""
    return f"`extra.data_source` is the plugin `{name}`; its number of rows is not known."
