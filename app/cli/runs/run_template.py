"""Commented run file that `anneal runs init` writes."""

import json
import re
from typing import Any

from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import TrainingConfig
from app.cli.console import RunFileError

_FIELDS = (
    "epochs", "max_steps", "learning_rate", "batch_size", "gradient_accumulation_steps", "max_seq_length", "lora_r",
    "lora_alpha", "eval_split", "eval_steps", "save_steps", "logging_steps", "seed", "output",
)  # fmt: skip
"""Fields that users change most; the others are in the reference."""
_WIDTH = 36


def text_of(model: str | None, dataset: str | None, method: str | None) -> str:
    """Return a run file with these values; the other fields are comments with their defaults.

    Raises:
        RunFileError: There is no such method.
    """
    chosen = method or "qlora"
    if chosen not in METHODS:
        raise RunFileError(f"There is no method {chosen!r}: name one of {', '.join(METHODS)}.")
    defaults = TrainingConfig.model_validate({"base_model": "any", "method": chosen}).model_dump(mode="json")
    base_models = "A folder below the models root, a name of the hub, or the id of a run."
    lines = [
        "# A run: `anneal runs validate -f FILE` checks it, `anneal runs create -f FILE --watch` starts it.",
        "# Lines behind `# ` show defaults and examples: remove it to set the field.",
        "",
        _yaml_line("dataset_id", dataset or "chats.jsonl", "Id or name of a dataset, or a file, relative to this one."),
        _yaml_line("# eval_dataset_id", "heldout.jsonl", "Data to evaluate on, every `eval_steps`."),
        _yaml_line("# name", "my-run", "Name of the run."),
        _yaml_line("# experiment_id", "default", "Id or name of an experiment."),
        _yaml_line("# tags", ["trial"], "Words by which runs are listed."),
        "",
        "config:",
        _yaml_line("  base_model", model or "Qwen/Qwen3-0.6B", base_models),
        _yaml_line("  method", chosen, f"One of {', '.join(METHODS)}."),
        *(_yaml_line(f"  # {name}", defaults[name], _field_summary(name)) for name in _FIELDS),
        "",
        "# resources:",
        _yaml_line("#   devices", 1, "Number of devices that train together, or `all`."),
    ]
    return "\n".join(lines) + "\n"


def _field_summary(field: str) -> str:
    """Return the first clause of the description of a field."""
    description = TrainingConfig.model_fields[field].description or ""
    return re.split(r"[.;:] | \(|, and |\.$", description)[0].replace("`", "") + "."


def _yaml_line(name: str, value: Any, comment: str) -> str:
    """Return a line of YAML with a comment; JSON is YAML."""
    plain = isinstance(value, str) and value.isascii() and value.replace("_", "").replace("-", "").isalnum()
    value_text = value if plain and not value[0].isdigit() else json.dumps(value, ensure_ascii=False)
    return f"{f'{name}: {value_text}':<{_WIDTH}}  # {comment}"
