"""State of a trainer at one step: gathered in the loop, copied to host memory, written by any thread."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import peft.peft_model
import safetensors.torch
import torch
import transformers.modeling_utils
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from worker.training.checkpointing.pinned_memory import ALIGNED, PinnedMemory
from worker.training.model.parallel.sharding import Layouts, Sharding, local_part
from worker.training.overrides import keep_published_generation_config
from worker.training.trainer_protocol import ServiceTrainer
from worker.wire.heartbeat import HeartbeatCallback, no_heartbeat

TRAINING_CONFIG = "training_config.json"
"""File of a checkpoint with the configuration in effect."""


@dataclass(frozen=True)
class WeightFile:
    """File of weights that a library was about to write."""

    path: Path
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]


@dataclass(frozen=True)
class Snapshot:
    """Parts of a checkpoint that are not in its folder yet."""

    weights: list[WeightFile]
    optimizer: Any
    """Result of its `state_dict()`: tensors in dictionaries and lists, and plain values."""
    files: dict[str, bytes]
    """Small files that are the same in every checkpoint of the process: tokenizer, configuration."""
    histories: list[Callable[[Path], None]] = field(default_factory=list)
    """Functions, each of which writes a file with the lines so far into a folder."""
    write_optimizer: Callable[[Any, Path], None] = lambda state, folder: torch.save(state, folder / OPTIMIZER_NAME)
    """Writes the state of the optimizer into a folder; in a sharded run, each rank its part."""
    owns_weights: bool = False
    """True if the weights are a copy already, gathered from the devices of a sharded run."""

    def copied_to(self, memory: PinnedMemory) -> "Snapshot":
        """Return a copy, which training no longer changes.

        Raises:
            InsufficientHostMemory: there is no memory for a copy.
        """
        copies = memory.copy_tensors(self._own_tensors())
        weights = self.weights
        if not self.owns_weights:
            weights = [replace(one, tensors=_replace_tensors(one.tensors, copies)) for one in weights]
        return replace(self, weights=weights, optimizer=_replace_tensors(self.optimizer, copies))

    def write(self, folder: Path, alive: HeartbeatCallback = no_heartbeat) -> None:
        """Write all of it into `folder`, which has the rest; `alive` is called after each file.

        Raises:
            OSError, RuntimeError: the disk is full.
        """
        # First, since a rank of a sharded run that fails here makes this fail on every rank.
        self.write_optimizer(self.optimizer, folder)
        alive()
        for name, content in self.files.items():
            if not (folder / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
        for put in self.histories:
            put(folder)
        for weight_file in self.weights:
            safetensors.torch.save_file(weight_file.tensors, weight_file.path, metadata=weight_file.metadata)
            alive()

    def _own_tensors(self) -> Iterator[torch.Tensor]:
        if not self.owns_weights:
            yield from _tensors_in([one.tensors for one in self.weights])
        yield from _tensors_in(self.optimizer)


class SnapshotBuilder:
    """Gathers one trainer's snapshots; caches the files that are the same in each of them."""

    def __init__(self) -> None:
        self._constant_files: dict[str, bytes] | None = None

    @property
    def same_bytes(self) -> int:
        """Size in bytes of the files that every checkpoint repeats; 0 before the first."""
        return sum(map(len, (self._constant_files or {}).values()))

    def gather_state(
        self, trainer: ServiceTrainer, folder: Path, whole: Mapping[str, torch.Tensor] | None = None
    ) -> Snapshot:
        """Gather the current state: small files that change are written to `folder` at once, the rest is referenced.

        The tensors are the trainer's own, and change with its next step. `whole` are the weights of a sharded model.
        Of another rank than 0, only its part of the optimizer state is gathered.

        Raises:
            OSError: the disk is full.
        """
        optimizer, write = trainer.optimizer.state_dict(), Snapshot.write_optimizer
        if trainer.sharding is not None:
            optimizer, layouts = trainer.sharding.optimizer_parts(trainer.optimizer)
            write = partial(_write_part, trainer.sharding, layouts)
        if not trainer.run.ranks.is_first:
            return Snapshot([], optimizer, {}, write_optimizer=write)
        with _collected_weights() as weights:
            save_weights(trainer.model, folder, whole)
        if self._constant_files is None:
            # Once only: a large tokenizer takes longer to write than an adapter to copy.
            trainer.save_constant_files(folder)
            present = (path for path in sorted(folder.rglob("*")) if path.is_file())
            self._constant_files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in present}
        (folder / TRAINING_CONFIG).write_text(trainer.run.config.model_dump_json(indent=1))
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
        trainer._save_scaler(str(folder))
        trainer._save_rng_state(str(folder))
        trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))
        trainer.save_metric_averages()
        trainer.run.state.save(folder)
        histories = [history.capture_lines() for history in trainer.run.histories]
        return Snapshot(weights, optimizer, self._constant_files, histories, write, owns_weights=whole is not None)


def _write_part(sharding: Sharding, layouts: Layouts, parts: dict[str, torch.Tensor], folder: Path) -> None:
    sharding.save_optimizer(parts, layouts, folder)


def save_weights(model: Any, folder: Path, whole: Mapping[str, torch.Tensor] | None = None) -> None:
    """Save the model, or its adapter alone, with its configuration; `whole` are the weights of a sharded one.

    Without the option, peft asks the hub for the base model's vocabulary size each time. No vocabulary is ever resized
    here, so a checkpoint needs no copy of the embeddings. Nor does it need a model card, whose template peft compiles
    each time while training waits.
    """
    options: dict[str, Any] = {}
    if isinstance(model, peft.peft_model.PeftModel):
        options["save_embedding_layers"] = False
        model.create_or_update_model_card = lambda output_dir: None
    else:
        keep_published_generation_config(model)
    if whole is not None:
        options["state_dict"] = dict(whole)
    model.save_pretrained(str(folder), **options)


def save_without_weights(model: Any, folder: Path) -> int:
    """Save what `save_weights` does except the weights themselves, and return their size in bytes."""
    with _collected_weights() as weights:
        save_weights(model, folder)
    return sum(tensor.nbytes for file in weights for tensor in file.tensors.values())


def expected_bytes(trainer: ServiceTrainer) -> int:
    """Estimate the size in bytes of a snapshot's tensors, from the current model and optimizer."""
    model: Any = trainer.model
    all_of_them = not isinstance(model, peft.peft_model.PeftModel)
    saved = (one for one in model.parameters() if one.requires_grad or all_of_them)
    weights: dict[int, int] = {local_part(one).data_ptr() or id(one): one.nbytes for one in saved}
    state = [int(one.nbytes) for one in _tensors_in(trainer.optimizer.state_dict())]
    return sum(weights.values()) + sum(state) + (len(weights) + len(state)) * ALIGNED


@contextmanager
def _collected_weights() -> Iterator[list[WeightFile]]:
    """During the block, collect the weights that transformers and peft would write, instead of writing them.

    So they still decide what belongs to a checkpoint and under which name, whichever thread writes it, and when.
    """
    weight_files: list[WeightFile] = []

    def add_file(tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
        weight_files.append(WeightFile(Path(filename), dict(tensors), dict(metadata or {})))

    libraries = (transformers.modeling_utils, peft.peft_model)
    writers = [library.safe_save_file for library in libraries]
    for library in libraries:
        library.safe_save_file = add_file
    try:
        yield weight_files
    finally:
        for library, writer in zip(libraries, writers, strict=True):
            library.safe_save_file = writer


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all plain tensors in `value`; a tensor that is made of others, such as a quantized one, yields those."""
    if is_traceable_wrapper_subclass(value):
        yield from _tensors_in([getattr(value, name) for name in value.__tensor_flatten__()[0]])
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _replace_tensors(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return `value` with every tensor replaced by its copy, in new containers."""
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        parts = {name: _replace_tensors(getattr(value, name), copies) for name in names}
        return type(value).__tensor_unflatten__(parts, context, value.size(), value.stride())
    if isinstance(value, torch.Tensor):
        return copies[id(value)]
    if isinstance(value, dict):
        same = {key: _replace_tensors(one, copies) for key, one in value.items()}
        return same if type(value) is dict else type(value)(same)
    if isinstance(value, list):
        return [_replace_tensors(one, copies) for one in value]
    if type(value) is tuple:
        return tuple(_replace_tensors(one, copies) for one in value)
    return value
