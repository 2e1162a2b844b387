"""Run facts, which the trainer reported, as text: device, kernels, precision and the planned step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anneal.contracts.schemas.runs.reads import RunRead

_KERNEL_PARTS = {"norms": "norms", "lora": "adapters", "dropout": "dropout", "head": "loss head"}


def fact_lines(run: "RunRead") -> dict[str, str | None]:
    """Format the facts that explain memory and speed of a run; None for those that its trainer did not report."""
    facts = run.facts or {}
    plan, compile_seconds = facts.get("step_plan"), facts.get("compile_seconds")
    return {
        "device": facts.get("device_name"),
        "kernels": _kernels_text(facts),
        "precision": _precision_text(run.effective_config or {}),
        "planned step": None if plan is None else _planned_step(plan),
        "compilation": None if compile_seconds is None else f"{compile_seconds:.3g} s before the first step",
    }


def remark_lines(run: "RunRead") -> dict[str, str]:
    """Format the defaults that were replaced, with the reasons, and the warnings of the validation."""
    replaced = {
        f"replaced {it.get('field')}": f"{it.get('requested')} by {it.get('used')}: {it.get('reason')}"
        for it in run.replaced
    }
    return replaced | {f"warning {warning.field}": warning.message for warning in run.warnings}


def _kernels_text(facts: Mapping[str, Any]) -> str | None:
    used = facts.get("kernels") or {}
    attention = used.get("attention") or facts.get("attention")
    parts = {"attention": attention, **{part: used.get(key) for key, part in _KERNEL_PARTS.items()}}
    return ", ".join(f"{part} {kernel}" for part, kernel in parts.items() if kernel) or None


def _precision_text(effective: Mapping[str, Any]) -> str | None:
    """Format the data types of computation and weights; None for a trainer that loads no model."""
    computation = effective.get("dtype")
    if computation is None:
        return None
    if effective.get("load_in_4bit"):
        weights = f"base in 4 bits ({effective.get('bnb_4bit_quant_type')})"
    elif effective.get("load_in_8bit"):
        weights = "base in 8 bits"
    elif effective.get("lora_r") is not None:
        weights = f"base in {computation}"
    else:
        weights = f"weights in {effective.get('weights_dtype')}"
    return f"computes in {computation}, {weights}"


def _planned_step(plan: Mapping[str, Any]) -> str:
    """Format the fastest step that fits; `rows` are those of a micro-batch."""
    usable = f"{plan['usable_bytes'] / 2**30:.1f} GiB"
    needed, seconds = plan["needed_bytes"], plan["step_seconds"]
    parts = (
        f"{_count_text(plan['batch_size'], 'row')} × "
        f"{_count_text(plan['gradient_accumulation_steps'], 'micro-batch', 'es')}",
        f"{plan['recomputed_layers']} of {plan['layers']} layers recomputed",
        f"measured peak above {usable}" if needed is None else f"measured peak {needed / 2**30:.1f} of {usable}",
        None if seconds is None else f"{seconds:.3g} s",
        None if plan["fits"] else "may run out of memory",
    )
    return ", ".join(part for part in parts if part)


def _count_text(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
