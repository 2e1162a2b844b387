"""The memory planner: how much to compute again in the backward pass, from the estimate and the device's memory."""

from dataclasses import dataclass
from typing import Literal

from app.estimates.activations import Checkpointing, Precision
from app.estimates.architecture import Architecture
from app.estimates.layers import Batch
from app.estimates.memory import Memory, memory
from app.estimates.plan import attention_of, micro_batch
from app.runs.config import TrainingConfig

ROOM = 0.9
"""Part of a device's memory that may be planned with: the rest is for fragments and for what was not foreseen."""
CHOICES: tuple[Checkpointing, ...] = ("off", "selective", "full")
"""From the fastest to the smallest."""
Value = bool | Literal["auto", "selective"]


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    checkpointing: Checkpointing
    memory: Memory
    fits: bool
    reason: str


def as_value(checkpointing: Checkpointing) -> Value:
    """As the configuration writes it."""
    return checkpointing if checkpointing == "selective" else checkpointing == "full"


def asked(value: Value) -> tuple[Checkpointing, ...]:
    """Those that a value of the configuration leaves open."""
    if value == "auto":
        return CHOICES
    return ("selective",) if value == "selective" else ("full",) if value else ("off",)


def choose(
    model: Architecture,
    config: TrainingConfig,
    precision: Precision,
    batch: Batch,
    room: int | None,
    choices: tuple[Checkpointing, ...] = CHOICES,
) -> Choice:
    """The first of the choices whose peak stays within `room` bytes, else the last; None: room is not known.

    Raises:
        CannotTrain: not with this configuration.
    """
    attention = attention_of(model, config)
    for one in choices:
        found = memory(model, config, precision, batch, one, attention)
        fits = room is not None and found.peak <= room * ROOM
        if fits or one == choices[-1]:
            break
    if room is None:
        return Choice(one, found, False, "The memory of the device is not known.")
    have, need = _gigabytes(room), _gigabytes(found.peak)
    if fits:
        reason = f"With it the run needs about {need} of the {have} that the device has."
    else:
        reason = f"Even so the run needs about {need}, and the device has {have}."
    return Choice(one, found, fits, reason)


def advice(model: Architecture, config: TrainingConfig, precision: Precision, length: int, room: int) -> list[str]:
    """What would make a run fit that does not, the mildest change first; each alone, or nothing does."""
    found = []
    changes: list[tuple[str, TrainingConfig]] = []
    steps = config.gradient_accumulation_steps
    for divisor in (2, 4, 8, 16, 32):
        if config.batch_size % divisor == 0:
            smaller = {"batch_size": config.batch_size // divisor, "gradient_accumulation_steps": steps * divisor}
            text = f"`batch_size` {smaller['batch_size']} with `gradient_accumulation_steps` {steps * divisor}"
            changes.append((text, config.model_copy(update={**smaller, "gradient_checkpointing": "auto"})))
    if config.lora_r is not None and not config.load_in_4bit:
        update = {"load_in_4bit": True, "load_in_8bit": False, "gradient_checkpointing": "auto"}
        changes.append(("a 4-bit base (`method: qlora`)", config.model_copy(update=update)))
    if config.gradient_checkpointing != "auto":
        automatic = config.model_copy(update={"gradient_checkpointing": "auto"})
        changes.insert(0, ("`gradient_checkpointing: auto`", automatic))
    if config.lora_r is None:
        update = {"lora_r": 16, "load_in_4bit": False, "method": "lora", "gradient_checkpointing": "auto"}
        changes.append(("an adapter (`method: lora`) in place of every weight", config.model_copy(update=update)))
        update = {**update, "load_in_4bit": True, "method": "qlora"}
        changes.append(("an adapter on a 4-bit base (`method: qlora`)", config.model_copy(update=update)))
    for text, changed in changes:
        loaded = Precision.of(changed, precision.device)
        batch = micro_batch(model, changed, length)
        if choose(model, changed, loaded, batch, room).fits:
            found.append(f"It fits with {text}.")
            break
    if not found:
        shorter = length
        while shorter > 64:
            shorter //= 2
            changed = config.model_copy(
                update={"max_seq_length": shorter, "gradient_checkpointing": "auto", "batch_size": 1}
            )
            if choose(model, changed, precision, micro_batch(model, changed, shorter), room).fits:
                found.append(f"It fits with `batch_size` 1 and `max_seq_length` {shorter}.")
                break
    return found or ["No smaller batch, 4-bit base or shorter sequence makes it fit: take a smaller model."]


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
