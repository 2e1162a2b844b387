"""Fidelity of a resume: compares what a run's numeric results depend on, at the checkpoint and now.

If nothing differs, a resumed run can equal one that was never interrupted.
Imports nothing heavy: the `fake` backend uses it too.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.infra.files.file_manifest import MANIFEST
from app.infra.files.tree import files_below

FINGERPRINT = "fingerprint"
"""Key of the fingerprint in the manifest of a checkpoint."""
BATCH_SIZE = "batch_size"
"""Key of the micro-batch size in the fingerprint: it affects a step's sums, and an out-of-memory repair changes it."""
ATTENTION = "attention"
"""Key of the attention implementation in the fingerprint: each rounds in its own way."""
PADDING_FREE = "padding_free"
"""Key of the form of a micro-batch in the fingerprint: it affects a step's sums, and what dropout drops."""
DEVICES = "devices"
"""Key of the number of devices in the fingerprint: each draws its own random numbers and sums its own rows."""
SHARDED = "sharded"
"""Key of the division of the model among the devices in the fingerprint: it affects how gradients are summed."""
SEQUENCE_PARALLEL = "sequence_parallel"
"""Key of the number of devices that share each sequence in the fingerprint."""
EXPERT_PARALLEL = "expert_parallel"
"""Key of the number of devices that share the experts of a layer in the fingerprint."""
FIDELITY_CHECK = "probe"
"""Key of the fidelity check's result in the manifest of a checkpoint; the value is a `float.hex`."""

_MESSAGES = {
    "base_model": "The base model differs from that of the checkpoint.",
    "tokenizer": "The tokenizer differs from that of the checkpoint.",
    "dataset": "The dataset differs from that of the checkpoint.",
    "reward_models": "A reward model differs from that of the checkpoint.",
    "teacher": "The teacher differs from that of the checkpoint.",
    "eval_dataset": "The evaluation dataset differs from that of the checkpoint.",
}
_SUBJECTS = {
    BATCH_SIZE: "The number of rows in a micro-batch",
    ATTENTION: "The attention implementation",
    PADDING_FREE: "`extra.padding_free`",
    DEVICES: "The number of devices",
    SEQUENCE_PARALLEL: "The number of devices that share each sequence",
    EXPERT_PARALLEL: "The number of devices that share the experts of a layer",
    "weights": "The data type of the weights",
    "lora": "The implementation of LoRA layers",
    "head": "The implementation of the loss head",
    "norms": "The implementation of norms, rotary embeddings and gated layers",
    "device": "The device",
    "device_name": "The name of the device",
    "cpu_instructions": "The instruction set of the CPU",
    "threads": "The number of CPU threads",
}
"""Subjects of the sentences about a difference; a package is its own."""
_UNRECORDED = {
    DEVICES: 1,
    SHARDED: False,
    SEQUENCE_PARALLEL: 1,
    EXPERT_PARALLEL: 1,
    "lora": "peft",
    "head": "trl",
    "norms": "transformers",
}
"""Value of versions that did not record it."""
ON_A_GPU = "A GPU does not always add numbers in the same order."


def model_fingerprint(folder: Path, config_name: str = "config.json") -> str:
    """Return a digest of a model folder without reading its weights: sizes of its files, and its configuration."""
    sizes = sorted((path.relative_to(folder).as_posix(), path.stat().st_size) for path in _model_files(folder))
    digest = hashlib.sha256(json.dumps(sizes).encode())
    digest.update((folder / config_name).read_bytes())
    return f"sha256:{digest.hexdigest()}"


def fingerprint_differences(checkpoint: Path, present: Mapping[str, Any]) -> list[str]:
    """Return why training may continue differently than before the checkpoint, in sentences; empty if it is exact."""
    saved = json.loads((checkpoint / MANIFEST).read_text()).get(FINGERPRINT)
    if saved is None:
        return ["The checkpoint does not record what it was made with."]
    then, now = _flatten_fingerprint(saved), _flatten_fingerprint(present)
    if BATCH_SIZE not in then:  # written by a version that never changed it
        now.pop(BATCH_SIZE, None)
    then = {name: value for name, value in _UNRECORDED.items() if name in now} | then
    return [
        _difference_sentence(name, then.get(name), now.get(name))
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]


def batch_size(checkpoint: Path) -> int | None:
    """Return the rows of the micro-batches that a checkpoint was made with; None if it does not record them."""
    saved = json.loads((checkpoint / MANIFEST).read_text()).get(FINGERPRINT) or {}
    rows = saved.get(BATCH_SIZE)
    return rows if isinstance(rows, int) else None


def _difference_sentence(name: str, then: Any, now: Any) -> str:
    """Return in words what differs from the checkpoint."""
    if name in _MESSAGES:
        return _MESSAGES[name]
    if name == SHARDED:
        return f"The model was {'' if then else 'not '}sharded at the checkpoint and is {'' if now else 'not '}now."
    was, present = ("unknown" if value is None else value for value in (then, now))
    return f"{_SUBJECTS.get(name, name)} was {was} at the checkpoint and is {present} now."


def stored_fidelity_check(checkpoint: Path) -> float | None:
    """Return the result of the fidelity check when the checkpoint was written, if it was run."""
    stored = json.loads((checkpoint / MANIFEST).read_text()).get(FIDELITY_CHECK)
    return None if stored is None else float.fromhex(stored)


def fidelity_facts(why: list[str]) -> dict[str, Any]:
    """Return the two facts that a run reports: `fidelity` and `fidelity_reasons`."""
    return {"fidelity": "approximate" if why else "exact", "fidelity_reasons": why}


def _flatten_fingerprint(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in fingerprint.items() if not isinstance(value, Mapping)}
    for value in fingerprint.values():
        if isinstance(value, Mapping):
            plain |= value
    return plain


def _model_files(folder: Path) -> list[Path]:
    """Return the files that make up a model: its description and hidden files may change without changing it."""
    paths = (Path(entry.path) for entry in files_below(folder) if entry.is_file() and not entry.name.endswith(".md"))
    return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
