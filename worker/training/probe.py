"""One pinned text through the model: what it gives before a save has to come out again after the load."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from worker.training import fidelity

if TYPE_CHECKING:
    from worker.training.trainer import Faithful

LONGEST = 512
"""Tokens that are looked at: enough for every weight to take part, and no time beside a save."""


def measure(trainer: "Faithful", ids: Sequence[int]) -> float:
    """The mean over the text's tokens of the log of the summed exponentials of the model's outputs.

    Changes nothing: no gradient, no dropout and no random number, and a model that trains trains on.
    """
    model: Any = trainer.model
    tokens = torch.tensor([list(ids[:LONGEST])], device=model.device)
    trains = model.training
    model.eval()
    try:
        with torch.no_grad(), trainer.accelerator.autocast():
            outputs = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
    finally:
        model.train(trains)
    return float(outputs.float().logsumexp(-1).mean().item())


def compare(trainer: "Faithful", checkpoint: Path) -> dict[str, Any]:
    """Facts about what was loaded from a checkpoint: `fidelity_difference`, and what follows from it.

    Nothing where the checkpoint does not say what the pinned text gave.
    """
    before = fidelity.probed(checkpoint)
    if before is None:
        return {}
    after = measure(trainer, trainer.pinned_text())
    facts: dict[str, Any] = {"fidelity_difference": abs(after - before)}
    if after != before:
        why = f"A pinned text gave {before:.9g} before the checkpoint was written, and {after:.9g} after it was loaded."
        facts |= fidelity.facts([*trainer.facts.get("fidelity_reasons", ()), why])
    return facts
