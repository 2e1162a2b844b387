"""Model card of an output: its base and data, how it was trained, and how to load it."""

import json
from typing import Any

from anneal.contracts.attempt.job import MERGED_BASE
from anneal.contracts.methods import METHODS
from app.infra.ids import is_id
from worker.training.context import TrainingContext


def model_card(
    run: TrainingContext,
    facts: dict[str, Any],
    versions: dict[str, str],
    weights: str,
    *,
    has_own_base: bool,
    has_gguf: bool = False,
) -> str:
    """Return the text of `README.md`: YAML front matter for hubs, then prose for people.

    It names no path of this machine. `weights` says which weights the output contains; `has_own_base` is
    true if the adapter's base is part of it, `has_gguf` if the model is in it as a GGUF file, too.
    """
    job, config, state, objective = run.job, run.config, run.state, run.method.eval_metric
    adapter = config.lora_r is not None and config.output == "adapter"
    is_reward_model = METHODS[config.method].has_reward_head
    name, hub = job.base_model.name, job.base_model.hub
    data, held_out = run.dataset, job.eval_dataset
    last = state.last_metric
    figures = {
        "steps": last.get("step"),
        "epochs": last.get("epoch"),
        "training loss (last)": last.get("loss"),
        "training loss (best)": state.best_loss,
        f"{objective} (last)": state.objective,
        f"{objective} (best)": state.best_objective,
        "tokens trained on": state.tokens,
        "seconds in training": round(state.seconds, 1) or None,
    }
    lines = [
        "---",
        # The hub would read a local name as one of its own models, and refuses a name that it does not have.
        *([f"base_model: {json.dumps(hub or name)}"] if hub or config.push_to_hub is None else []),
        f"library_name: {'peft' if adapter else 'transformers'}",
        f"pipeline_tag: {'text-classification' if is_reward_model else 'text-generation'}",
        f"tags: [anneal, {config.method}]",
        "---",
        "",
        f"# {name}, fine-tuned ({config.method})",
        "",
        f"Trained by Anneal in run `{job.run_id}`, attempt {job.attempt}: "
        + (f"a LoRA adapter on `{name}`" if config.lora_r is not None else f"all weights of `{name}`")
        + (", merged into it." if config.lora_r is not None and not adapter else "."),
        "",
        f"Exported weights: {weights}.",
        "",
        *([f"The base is commit `{facts['base_revision']}`.", ""] if facts.get("base_revision") else []),
        "## How to load it",
        "",
        "```python",
        *_loading_program(run, adapter=adapter, is_reward_model=is_reward_model, has_own_base=has_own_base),
        "```",
        *(["", _REWARD_USAGE] if is_reward_model else []),
        *(["", _OLLAMA_USAGE] if has_gguf else []),
        "",
        "## Data",
        "",
        f"- training: `{data.id}`, format {data.format}, {data.rows} rows, sha256 `{data.sha256}`",
    ]
    if held_out:
        lines.append(f"- evaluation: `{held_out.id}`, {held_out.rows} rows")
    elif config.eval_split:
        lines.append(f"- evaluation: {config.eval_split:.1%} of the rows, held out by seed {config.seed}")
    lines += [
        f"- evaluation `{name}`: `{one.id}`, {one.rows} rows" for name, one in sorted(job.extra_eval_datasets.items())
    ]
    lines += ["", "## Figures", "", "| figure | value |", "|---|---|"]
    lines += [f"| {what} | {_format_number(value)} |" for what, value in figures.items() if value is not None]
    in_force = json.dumps(config.model_dump(mode="json") | {"base_model": hub or name}, indent=1)
    lines += ["", "## Configuration in force", "", "```json", in_force, "```", "", "## Environment", ""]
    lines += [f"- {library} {version}" for library, version in versions.items()]
    lines += [
        *_cost_lines(facts),
        "",
    ]
    return "\n".join(lines)


_REWARD_USAGE = (
    "The model returns one number, the reward, for a text that ends with the end-of-sequence token: "
    '`model(**tokenizer(text + tokenizer.eos_token, return_tensors="pt")).logits[0, 0]`.'
)

_OLLAMA_USAGE = "With Ollama, in this folder: `ollama create my-model -f Modelfile`, then `ollama run my-model`."


def _cost_lines(facts: dict[str, Any]) -> list[str]:
    """Return the lines about the device and the model; none for an export, which trains nothing."""
    if "parameters_total" not in facts:
        return []
    lines = [
        f"- {_device_line(facts)}",
        f"- rows per step: {facts.get('rows_per_step')}",
        f"- parameters: {facts['parameters_total']:,} in total, {facts['parameters_trainable']:,} trained",
    ]
    if flops := facts.get("flops_per_token"):
        lines.append(f"- FLOPs per trained token: {flops:.4g} (sequences of {facts['flops_sequence_length']})")
    if peak := facts.get("peak_tflops"):
        lines.append(f"- peak of the device: {peak:g} TFLOP/s")
    return lines


def _device_line(facts: dict[str, Any]) -> str:
    """Return the line about the devices of a run and how they shared its model and its sequences."""
    name, count, hosts = facts.get("device_name", facts.get("device")), facts.get("devices", 1), facts.get("hosts", 1)
    if count == 1:
        return f"device: {name}"
    model = "the model is divided among them" if facts.get("sharded") else "each with a replica of the model"
    parts = [f"devices: {count} × {name}" + (f" on {hosts} hosts" if hosts > 1 else ""), model]
    for field, shared in (("sequence_parallel", "each sequence"), ("expert_parallel", "the experts of a layer")):
        if facts.get(field, 1) > 1:
            parts.append(f"{facts[field]} share {shared}")
    return "; ".join(parts)


def _loading_program(run: TrainingContext, *, adapter: bool, is_reward_model: bool, has_own_base: bool) -> list[str]:
    """Return a program that loads the output from the folder it was downloaded to, or from the hub."""
    named, repository = run.job.base_model, run.config.push_to_hub
    where = json.dumps(repository or ".")
    # The base is named by its path and not by `subfolder`: transformers takes the adapter beside it for the model, and
    # then looks for the base below the base.
    downloads_base = has_own_base and repository is not None
    kind = f"AutoModelFor{'SequenceClassification' if is_reward_model else 'CausalLM'}"
    more = ", num_labels=1" if is_reward_model and adapter else ""
    if not adapter:
        load = [f"model = {kind}.from_pretrained({where})"]
    else:
        note = "" if named.hub or has_own_base else f"  # {_way_to(named.name)}"
        adapter_folder = "folder" if downloads_base else where
        if downloads_base:
            base = f'f"{{folder}}/{MERGED_BASE}"'
        elif has_own_base:
            base = json.dumps(MERGED_BASE)
        else:
            revision = f", revision={json.dumps(named.revision)}" if named.hub and named.revision else ""
            base = json.dumps(named.hub or named.name) + revision
        load = [
            *([f"folder = snapshot_download({where})"] if downloads_base else []),
            f"base = {kind}.from_pretrained({base}{more}){note}",
            f"model = PeftModel.from_pretrained(base, {adapter_folder})",
        ]
    return [
        *(["from huggingface_hub import snapshot_download"] if downloads_base else []),
        *(["from peft import PeftModel"] if adapter else []),
        f"from transformers import {kind}, AutoTokenizer",
        "",
        *load,
        f"tokenizer = AutoTokenizer.from_pretrained({where})",
    ]


def _way_to(base_model: str) -> str:
    """Return how to get a base model that is not on the hub."""
    if is_id(base_model, "run"):
        return f"download it first: anneal runs download {base_model}"
    return "or its folder on your machine"


def _format_number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
