"""Fidelity check: a pinned text must give the same result before a save and after the load."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from worker.checkpoint_files import resume_fidelity
from worker.training.trainer_protocol import ServiceTrainer

LONGEST = 512
"""Maximum number of tokens used: enough for every weight to take part, and negligible next to a save."""


def fidelity_value(trainer: ServiceTrainer, ids: Sequence[int]) -> float:
    """Return the mean over the text's tokens of the log-sum-exp of the model's logits.

    Changes nothing: no gradient, no dropout and no random number, and the model's mode is restored.
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


def compare_fidelity(trainer: ServiceTrainer, checkpoint: Path) -> dict[str, Any]:
    """Return facts about what was loaded from a checkpoint: `fidelity_difference`, and what follows from it.

    Empty if the checkpoint has no result of the fidelity check.
    """
    before = resume_fidelity.stored_fidelity_check(checkpoint)
    if before is None:
        return {}
    after = fidelity_value(trainer, trainer.pinned_text())
    facts: dict[str, Any] = {"fidelity_difference": abs(after - before)}
    if after != before:
        why = f"The fidelity check gave {before:.9g} before the save of the checkpoint, and {after:.9g} after its load."
        facts |= resume_fidelity.fidelity_facts([*trainer.facts.get("fidelity_reasons", ()), why])
    return facts
