"""Random number generators of the ranks of a run, as its checkpoints hold them: one file for each rank.

A run on one device has the file of transformers.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers.trainer import safe_globals

from worker.training.ranks import Ranks


def file_name(rank: int) -> str:
    """Return the name of the file of a rank."""
    return f"rng_state_{rank}.pth"


def saved_ranks(checkpoint: Path) -> int:
    """Return the number of ranks that have made a checkpoint."""
    return len(list(checkpoint.glob(file_name(0).replace("0", "*")))) or 1


def current_states() -> dict[str, Any]:
    """Return the states of this process: Python's, numpy's and torch's, and that of its own GPU if it has used one.

    The state of another GPU would create a context on it.
    """
    state = {"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.random.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def set_current(state: Mapping[str, Any]) -> None:
    """Set every generator of this process to a state that `current` returned."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def restore_states(checkpoint: Path, ranks: Ranks) -> bool:
    """Restore the states of this rank; return False if the checkpoint was made by another number of ranks."""
    if saved_ranks(checkpoint) != ranks.size:
        return False
    with safe_globals():
        state = torch.load(checkpoint / file_name(ranks.rank), weights_only=True)
    set_current(state)
    return True


def seed_generators(parts: Sequence[int]) -> None:
    """Seed every generator of this process from several numbers, such as seed, step and rank."""
    digest = hashlib.sha256(repr(tuple(parts)).encode()).digest()
    number = int.from_bytes(digest[:4], "little")
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)
