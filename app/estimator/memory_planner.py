"""Memory planner: chooses gradient checkpointing from the memory estimate and the device's memory."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import TrainingConfig
from app.estimator.activations import Checkpointing, Precision
from app.estimator.architecture import Architecture
from app.estimator.forward_pass import Batch
from app.estimator.memory import WHOLE, Division, Memory, estimate_memory
from app.estimator.parameters import CannotTrain
from app.estimator.steps import attention_of, micro_batch

USABLE_FRACTION = 0.9
"""Fraction of a device's memory that the planner uses; the rest is reserved for fragmentation and estimate errors."""
CHOICES: tuple[Checkpointing, ...] = ("off", "selective", "full")
"""All choices, from the fastest to the smallest."""
Needs = Callable[[Checkpointing], Memory]
Value = bool | Literal["auto", "selective"]
_RANK = 16
"""Rank of the advised adapter."""
_MOST_MICRO_BATCHES: int = next(
    bound.le for bound in TrainingConfig.model_fields["gradient_accumulation_steps"].metadata if hasattr(bound, "le")
)
"""Maximum of `gradient_accumulation_steps` in the configuration."""


@dataclass(frozen=True)
class Choice:
    """Chosen checkpointing, its memory, and the reason."""

    checkpointing: Checkpointing
    memory: Memory
    fits: bool
    reason: str


def to_config_value(checkpointing: Checkpointing) -> Value:
    """Convert to the value used in the configuration."""
    return checkpointing if checkpointing == "selective" else checkpointing == "full"


def allowed_choices(value: Value) -> tuple[Checkpointing, ...]:
    """Return the choices that a configuration value allows."""
    if value == "auto":
        return CHOICES
    return ("selective",) if value == "selective" else ("full",) if value else ("off",)


def choose_checkpointing(
    model: Architecture,
    config: TrainingConfig,
    precision: Precision,
    batch: Batch,
    room: int | None,
    choices: tuple[Checkpointing, ...] = CHOICES,
    division: Division = WHOLE,
) -> Choice:
    """Return the first choice whose peak fits in `room` bytes (None: not known), else the last.

    Raises:
        CannotTrain: The model cannot be trained with this configuration.
    """
    return first_that_fits(memory_of_choices(model, config, precision, batch, division), room, choices)


def memory_of_choices(
    model: Architecture, config: TrainingConfig, precision: Precision, batch: Batch, division: Division = WHOLE
) -> Needs:
    """Return a function that gives the memory of each choice; results are cached, so devices can share it."""
    attention = attention_of(model, config)

    @cache
    def needed_memory(checkpointing: Checkpointing) -> Memory:
        return estimate_memory(model, config, precision, batch, checkpointing, attention, division)

    return needed_memory


def first_that_fits(needs: Needs, room: int | None, choices: tuple[Checkpointing, ...]) -> Choice:
    """Return the first choice that fits in `room` bytes, else the last; `needs` gives the memory of each."""
    for checkpointing in choices:
        needed = needs(checkpointing)
        fits = room is not None and needed.peak <= room * USABLE_FRACTION
        if fits or checkpointing == choices[-1]:
            break
    if room is None:
        return Choice(checkpointing, needed, False, "The memory of the device is not known.")
    have, need = _format_gigabytes(room), _format_gigabytes(needed.peak)
    if fits:
        reason = f"The run needs about {need} of the {have} that the device has."
    else:
        reason = f"The run needs about {need}; the device has {have}, of which {USABLE_FRACTION:.0%} can be used."
    return Choice(checkpointing, needed, fits, reason)


class MemoryAdvice:
    """Changes that make a run fit on devices of one kind; the memory of each change is computed once.

    No change alters the training objective.
    """

    def __init__(
        self,
        model: Architecture,
        config: TrainingConfig,
        precision: Precision,
        length: int,
        rows: int | None,
        division: Division = WHOLE,
        sequence_parallel: int = 1,
    ) -> None:
        """Prepare the changes; `length` and `rows` have the meaning that they have in `micro_batch`.

        `sequence_parallel` is the number of devices that share each sequence.
        """
        self._division, self._sequence_parallel = division, sequence_parallel
        self._model, self._config, self._precision = model, config, precision
        self._length, self._rows = length, rows
        self._known: list[tuple[str, Needs]] = []
        self._more = self._compute_changes()

    def advise_within(self, room: int) -> list[str]:
        """Return the smallest single change with which the run fits in `room` bytes, or a sentence that none does."""
        for text, needs in self._iterate_changes():
            with suppress(CannotTrain):  # an adapter that this family does not support with the requested options
                if first_that_fits(needs, room, CHOICES).fits:
                    return [f"It fits with {text}."]
        return ["No smaller batch, 4-bit base or shorter sequence makes it fit. Use a smaller model."]

    def _iterate_changes(self) -> Iterator[tuple[str, Needs]]:
        yield from self._known
        for change in self._more:
            self._known.append(change)
            yield change

    def _compute_changes(self) -> Iterator[tuple[str, Needs]]:
        model, config, precision = self._model, self._config, self._precision
        for text, changed in _possible_changes(config):
            loaded = Precision.for_device(changed, precision.device, has_liger=precision.has_liger)
            batch = replace(
                micro_batch(model, changed, self._length, self._rows), sequence_parallel=self._sequence_parallel
            )
            yield text, memory_of_choices(model, changed, loaded, batch, self._division)
        size, steps = _smallest_batch(config)
        single = {"batch_size": size, "gradient_accumulation_steps": steps, "gradient_checkpointing": "auto"}
        least = max(64, config.generation.max_completion_length + 1 if config.generation else 0)
        rows = None if config.packing else self._rows  # shorter packed sequences hold less, so there are more of them
        shorter = self._length // 2
        while shorter >= least:
            changed = config.model_copy(update={**single, "max_seq_length": shorter})
            text = f"`batch_size` {size}, `gradient_accumulation_steps` {steps} and `max_seq_length` {shorter}"
            batch = replace(micro_batch(model, changed, shorter, rows), sequence_parallel=self._sequence_parallel)
            yield text, memory_of_choices(model, changed, precision, batch, self._division)
            shorter //= 2


def _possible_changes(config: TrainingConfig) -> Iterator[tuple[str, TrainingConfig]]:
    """Yield changes as a user would write them, each with the resulting effective configuration."""

    def with_update(**update: Any) -> TrainingConfig:
        return config.model_copy(update={"gradient_checkpointing": "auto", **update})

    if config.gradient_checkpointing != "auto":
        yield "`gradient_checkpointing: auto`", with_update()
    steps = config.gradient_accumulation_steps
    for divisor in (2, 4, 8, 16, 32):
        size, rest = divmod(config.batch_size, divisor)
        if rest == 0 and size >= METHODS[config.method].min_batch_size and steps * divisor <= _MOST_MICRO_BATCHES:
            text = f"`batch_size` {size} with `gradient_accumulation_steps` {steps * divisor}"
            yield text, with_update(batch_size=size, gradient_accumulation_steps=steps * divisor)
    smaller = METHODS[config.method].smaller
    four_bit = {"load_in_4bit": True, "load_in_8bit": False}
    if config.lora_r is not None:
        if config.load_in_8bit:
            yield "a 4-bit base (`load_in_4bit: true` instead of `load_in_8bit`)", with_update(**four_bit)
        elif not config.load_in_4bit:
            how = f"method: {smaller}" if smaller else "load_in_4bit: true"
            yield f"a 4-bit base (`{how}`)", with_update(**four_bit)
        return
    if smaller is not None and METHODS[config.method].adapter == "forbidden":
        how, how_4bit = (f"`method: {name}`" for name in (smaller, METHODS[smaller].smaller))
    else:
        how, how_4bit = (f"`lora_r: {_RANK}` with `load_in_4bit: {value}`" for value in ("false", "true"))
    yield f"an adapter ({how}) instead of full training", with_update(lora_r=_RANK, load_in_4bit=False)
    yield f"an adapter on a 4-bit base ({how_4bit}) instead of full training", with_update(lora_r=_RANK, **four_bit)


def _smallest_batch(config: TrainingConfig) -> tuple[int, int]:
    """Return the smallest micro-batch size and the accumulation steps that keep the step size unchanged."""
    together = config.batch_size * config.gradient_accumulation_steps
    least = METHODS[config.method].min_batch_size
    sizes = (size for size in range(least, config.batch_size + 1) if together % size == 0)
    size = next(size for size in sizes if together // size <= _MOST_MICRO_BATCHES)
    return size, together // size


def _format_gigabytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
