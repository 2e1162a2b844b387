"""The memory planner: how much to compute again in the backward pass, from the estimate and the device's memory."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from app.estimates.activations import Checkpointing, Precision
from app.estimates.architecture import Architecture
from app.estimates.layers import Batch
from app.estimates.memory import Memory, memory
from app.estimates.parameters import CannotTrain
from app.estimates.plan import attention_of, micro_batch
from app.runs.config import TrainingConfig, TrainingMethod

ROOM = 0.9
"""Part of a device's memory that may be planned with: the rest is for fragments and for what was not foreseen."""
CHOICES: tuple[Checkpointing, ...] = ("off", "selective", "full")
"""From the fastest to the smallest."""
Value = bool | Literal["auto", "selective"]
_RANK = 16
"""Of the adapter that is advised."""


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
    return first_that_fits(lambda one: memory(model, config, precision, batch, one, attention), room, choices)


def first_that_fits(
    needs: Callable[[Checkpointing], Memory], room: int | None, choices: tuple[Checkpointing, ...]
) -> Choice:
    """The same, where `needs` tells what each choice takes."""
    for one in choices:
        found = needs(one)
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
    """What would make a run fit that does not, the mildest change first; each alone, or nothing does.

    None of it changes what the run learns towards.
    """
    for text, changed in _changes(config):
        loaded, batch = Precision.of(changed, precision.device), micro_batch(model, changed, length)
        with suppress(CannotTrain):  # an adapter, by which this family does not train as it is asked to
            if choose(model, changed, loaded, batch, room).fits:
                return [f"It fits with {text}."]
    # A whole step stays as large as it was.
    single = {"batch_size": 1, "gradient_accumulation_steps": config.batch_size * config.gradient_accumulation_steps}
    least = max(64, config.rlhf.max_completion_length + 1 if config.method is TrainingMethod.rlhf else 0)
    shorter = length // 2
    while shorter >= least:
        update = {**single, "max_seq_length": shorter, "gradient_checkpointing": "auto"}
        changed = config.model_copy(update=update)
        if choose(model, changed, precision, micro_batch(model, changed, shorter), room).fits:
            steps = single["gradient_accumulation_steps"]
            text = f"`batch_size` 1, `gradient_accumulation_steps` {steps} and `max_seq_length` {shorter}"
            return [f"It fits with {text}."]
        shorter //= 2
    return ["No smaller batch, 4-bit base or shorter sequence makes it fit: take a smaller model."]


def _changes(config: TrainingConfig) -> Iterator[tuple[str, TrainingConfig]]:
    """Changes as a user would write them, each with the effective configuration that it leads to."""

    def changed(**update: Any) -> TrainingConfig:
        return config.model_copy(update={"gradient_checkpointing": "auto", **update})

    if config.gradient_checkpointing != "auto":
        yield "`gradient_checkpointing: auto`", changed()
    steps = config.gradient_accumulation_steps
    for divisor in (2, 4, 8, 16, 32):
        if config.batch_size % divisor == 0:
            size = config.batch_size // divisor
            text = f"`batch_size` {size} with `gradient_accumulation_steps` {steps * divisor}"
            yield text, changed(batch_size=size, gradient_accumulation_steps=steps * divisor)
    four_bit = {"load_in_4bit": True, "load_in_8bit": False}
    if config.lora_r is not None:
        if config.load_in_8bit:
            yield "a 4-bit base (`load_in_4bit: true` in place of `load_in_8bit`)", changed(**four_bit)
        elif not config.load_in_4bit:
            how = "method: qlora" if config.method is TrainingMethod.lora else "load_in_4bit: true"
            yield f"a 4-bit base (`{how}`)", changed(**four_bit)
        return
    # Only `full` is a method for the sake of its adapter, of which it has none; others keep theirs, and what it means.
    full = config.method is TrainingMethod.full
    how = "`method: lora`" if full else "`lora_r: 16` with `load_in_4bit: false`"
    yield f"an adapter ({how}) in place of every weight", changed(lora_r=_RANK, load_in_4bit=False)
    how = "`method: qlora`" if full else "`lora_r: 16` with `load_in_4bit: true`"
    yield f"an adapter on a 4-bit base ({how}) in place of every weight", changed(lora_r=_RANK, **four_bit)


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
