"""Whether a resumed run can equal one that was never interrupted: what its numbers depend on, then and now.

Imports nothing heavy: the `fake` backend uses it too.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.training.manifest import MANIFEST

FINGERPRINT = "fingerprint"
"""Its name in the manifest of a checkpoint."""
BATCH_SIZE = "batch_size"
"""Sums of a step are taken micro-batch by micro-batch; an out-of-memory repair changes that."""
PROBE = "probe"
"""Name of what a pinned text gave, in the manifest of a checkpoint: `float.hex`."""

_SAID = {
    "base_model": "The base model is another one than at the checkpoint.",
    "dataset": "The data set is another one than at the checkpoint.",
    "reward_models": "A reward model is another one than at the checkpoint.",
    "eval_dataset": "The evaluation data set is another one than at the checkpoint.",
}
ON_A_GPU = "A GPU does not always add numbers in the same order."


def identity(folder: Path, config_name: str = "config.json") -> str:
    """What tells a model folder from another without reading its weights: sizes of its files, and its configuration."""
    sizes = sorted((path.relative_to(folder).as_posix(), path.stat().st_size) for path in _files(folder))
    digest = hashlib.sha256(json.dumps(sizes).encode())
    digest.update((folder / config_name).read_bytes())
    return f"sha256:{digest.hexdigest()}"


def reasons(checkpoint: Path, present: Mapping[str, Any]) -> list[str]:
    """Why training may go on otherwise than before the checkpoint, in sentences; empty: exactly."""
    saved = json.loads((checkpoint / MANIFEST).read_text()).get(FINGERPRINT)
    if saved is None:
        return ["The checkpoint does not say what it was made with."]
    then, now = _flat(saved), _flat(present)
    if BATCH_SIZE not in then:  # a checkpoint of a version that never changed it
        now.pop(BATCH_SIZE, None)
    return [
        _SAID.get(name, f"{name}: {then.get(name)} at the checkpoint, {now.get(name)} now.")
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]


def probed(checkpoint: Path) -> float | None:
    """What a pinned text gave when the checkpoint was written, if that was measured."""
    told = json.loads((checkpoint / MANIFEST).read_text()).get(PROBE)
    return None if told is None else float.fromhex(told)


def facts(why: list[str]) -> dict[str, Any]:
    """The two facts that a run tells: `fidelity` and `fidelity_reasons`."""
    return {"fidelity": "approximate" if why else "exact", "fidelity_reasons": why}


def _flat(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in fingerprint.items() if not isinstance(value, Mapping)}
    for value in fingerprint.values():
        if isinstance(value, Mapping):
            plain |= value
    return plain


def _files(folder: Path) -> list[Path]:
    """What a model is made of: its description and hidden files may change without changing it."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".md")
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
