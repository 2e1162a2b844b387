"""The memory planner: how much to compute again in the backward pass, from the estimate and the device's memory."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
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
Needs = Callable[[Checkpointing], Memory]
Value = bool | Literal["auto", "selective"]
_RANK = 16
"""Of the adapter that is advised."""
_MOST_MICRO_BATCHES: int = next(
    bound.le for bound in TrainingConfig.model_fields["gradient_accumulation_steps"].metadata if hasattr(bound, "le")
)
"""Beyond this the configuration would be refused."""


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
    return first_that_fits(needed(model, config, precision, batch), room, choices)


def needed(model: Architecture, config: TrainingConfig, precision: Precision, batch: Batch) -> Needs:
    """What tells how much each choice takes; it walks through each but once, however many devices ask."""
    attention = attention_of(model, config)

    @cache
    def needs(one: Checkpointing) -> Memory:
        return memory(model, config, precision, batch, one, attention)

    return needs


def first_that_fits(needs: Needs, room: int | None, choices: tuple[Checkpointing, ...]) -> Choice:
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
        reason = f"The run needs about {need} of the {have} that the device has."
    else:
        reason = f"The run needs about {need}; the device has {have}, of which {ROOM:.0%} may be planned with."
    return Choice(one, found, fits, reason)


class Advice:
    """What would make a run fit that does not, on any device of a kind; each change is walked through but once.

    None of it changes what the run learns towards.
    """

    def __init__(
        self, model: Architecture, config: TrainingConfig, precision: Precision, length: int, rows: int | None
    ) -> None:
        """`length` and `rows`: as `micro_batch` takes them."""
        self._model, self._config, self._precision = model, config, precision
        self._length, self._rows = length, rows
        self._known: list[tuple[str, Needs]] = []
        self._more = self._all()

    def within(self, room: int) -> list[str]:
        """The mildest change with which the run needs no more than so many bytes; each alone, or nothing does."""
        for text, needs in self._each():
            with suppress(CannotTrain):  # an adapter, by which this family does not train as it is asked to
                if first_that_fits(needs, room, CHOICES).fits:
                    return [f"It fits with {text}."]
        return ["No smaller batch, 4-bit base or shorter sequence makes it fit: take a smaller model."]

    def _each(self) -> Iterator[tuple[str, Needs]]:
        yield from self._known
        for one in self._more:
            self._known.append(one)
            yield one

    def _all(self) -> Iterator[tuple[str, Needs]]:
        model, config, precision = self._model, self._config, self._precision
        for text, changed in _changes(config):
            loaded = Precision.of(changed, precision.device)
            yield text, needed(model, changed, loaded, micro_batch(model, changed, self._length, self._rows))
        size, steps = _smallest_batch(config)
        single = {"batch_size": size, "gradient_accumulation_steps": steps, "gradient_checkpointing": "auto"}
        least = max(64, config.rlhf.max_completion_length + 1 if config.method is TrainingMethod.rlhf else 0)
        rows = None if config.packing else self._rows  # shorter ones hold less, so there are more of them
        shorter = self._length // 2
        while shorter >= least:
            changed = config.model_copy(update={**single, "max_seq_length": shorter})
            text = f"`batch_size` {size}, `gradient_accumulation_steps` {steps} and `max_seq_length` {shorter}"
            yield text, needed(model, changed, precision, micro_batch(model, changed, shorter, rows))
            shorter //= 2


def _changes(config: TrainingConfig) -> Iterator[tuple[str, TrainingConfig]]:
    """Changes as a user would write them, each with the effective configuration that it leads to."""

    def changed(**update: Any) -> TrainingConfig:
        return config.model_copy(update={"gradient_checkpointing": "auto", **update})

    if config.gradient_checkpointing != "auto":
        yield "`gradient_checkpointing: auto`", changed()
    steps = config.gradient_accumulation_steps
    for divisor in (2, 4, 8, 16, 32):
        if config.batch_size % divisor == 0 and steps * divisor <= _MOST_MICRO_BATCHES:
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


def _smallest_batch(config: TrainingConfig) -> tuple[int, int]:
    """The smallest micro-batch, and how many of them make a step that stays as large as it was."""
    together = config.batch_size * config.gradient_accumulation_steps
    sizes = (size for size in range(1, config.batch_size + 1) if together % size == 0)
    size = next(size for size in sizes if together // size <= _MOST_MICRO_BATCHES)
    return size, together // size


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
