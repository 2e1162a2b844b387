"""What a training process left behind, in a form that compares exactly."""

import hashlib
import json
from typing import Any

from tests.worker.training.tiny import Outcome


def weights(outcome: Outcome) -> dict[str, str]:
    """Digests of the exported weights."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in outcome.output.glob("*.safetensors")}


def figures(outcome: Outcome) -> list[dict[str, Any]]:
    """The metrics of an output without what depends on the clock and the process."""
    reported = []
    for line in (outcome.output / "metrics.jsonl").read_text().splitlines():
        point = json.loads(line)
        point.update(point.pop("extra", {}))
        clock = ("second", "gpu_memory", "host_memory")
        reported.append({name: value for name, value in point.items() if not any(word in name for word in clock)})
    return reported
