"""Model card of an output: its base and data, how it was trained, and how to load it."""

import json
from typing import Any

from app.contracts.attempt.job import JobSpec
from app.contracts.methods import METHODS
from app.contracts.training_config.fields import TrainingConfig
from worker.training.run_state import RunState


def model_card(
    job: JobSpec,
    config: TrainingConfig,
    facts: dict[str, Any],
    versions: dict[str, str],
    state: RunState,
    where: str,
    objective: str,
) -> str:
    """Return the text of `README.md`: YAML front matter for hubs, then prose for people.

    `where` is the folder or hub name to load the output from; `objective` is the metric that evaluations are compared
    by.
    """
    adapter = config.lora_r is not None
    is_reward_model = METHODS[config.method].has_reward_head
    name, hub = job.base_model.name, job.base_model.hub
    data, held_out = job.dataset, job.eval_dataset
    last = state.last_metric
    figures = {
        "steps": last.get("step"),
        "epochs": last.get("epoch"),
        "training loss (last)": last.get("loss"),
        "training loss (best)": state.best_loss,
        f"{objective} (last)": state.objective,
        f"{objective} (best)": state.best_objective,
        "tokens trained on": state.tokens,
        "seconds in training": round(state.seconds, 1),
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
        + (f"a LoRA adapter on `{name}`." if adapter else f"all weights of `{name}`."),
        "",
        *([f"The base is commit `{facts['base_revision']}`.", ""] if facts.get("base_revision") else []),
        "## How to load it",
        "",
        "```python",
        *_loading(adapter, is_reward_model, where),
        "```",
        *(["", _REWARD_USAGE] if is_reward_model else []),
        "",
        "## Data",
        "",
        f"- training: `{data.id}`, format {data.format}, {data.rows} rows, sha256 `{data.sha256}`",
    ]
    if held_out:
        lines.append(f"- evaluation: `{held_out.id}`, {held_out.rows} rows")
    elif config.eval_split:
        lines.append(f"- evaluation: {config.eval_split:.1%} of the rows, held out by seed {config.seed}")
    lines += ["", "## Figures", "", "| figure | value |", "|---|---|"]
    lines += [f"| {what} | {_number(value)} |" for what, value in figures.items() if value is not None]
    lines += ["", "## Configuration in force", "", "```json"]
    lines += [json.dumps(config.model_dump(mode="json"), indent=1), "```", "", "## Environment", ""]
    lines += [f"- {library} {version}" for library, version in versions.items()]
    lines += [
        f"- device: {facts.get('device_name', facts.get('device'))}",
        f"- parameters: {facts.get('parameters_total'):,} in total, {facts.get('parameters_trainable'):,} trained",
        f"- FLOPs per trained token: {facts['flops_per_token']:.4g} (sequences of {facts['flops_sequence_length']})",
        *([f"- peak of the device: {facts['peak_tflops']:g} TFLOP/s"] if facts["peak_tflops"] else []),
        "",
    ]
    return "\n".join(lines)


_REWARD_USAGE = (
    "The model returns one number, the reward, for a text that ends with the end-of-sequence token: "
    '`model(**tokenizer(text + tokenizer.eos_token, return_tensors="pt")).logits[0, 0]`.'
)


def _loading(adapter: bool, is_reward_model: bool, place: str) -> list[str]:
    where = json.dumps(place)
    kind = f"Auto{'Peft' if adapter else ''}ModelFor{'SequenceClassification' if is_reward_model else 'CausalLM'}"
    # An adapter's configuration does not contain `num_labels`; that of a full model does.
    more = ", num_labels=1" if is_reward_model and adapter else ""
    library = ["from peft import " + kind, "from transformers import AutoTokenizer"]
    return [
        *(library if adapter else [f"from transformers import {kind}, AutoTokenizer"]),
        "",
        f"model = {kind}.from_pretrained({where}{more})",
        f"tokenizer = AutoTokenizer.from_pretrained({where})",
    ]


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
