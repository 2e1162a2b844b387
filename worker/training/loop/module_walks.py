"""Calls on a model that walk through all of its modules in every step, answered from one walk.

Between two steps the device waits for the host. A model of 36 layers with adapters has 2,800 modules, and the trainer
of transformers walks through them several times a step: to clip and reset gradients, and to switch to training.
"""

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from transformers import TrainerCallback


class CachedModuleWalks(TrainerCallback):  # type: ignore[misc]
    """Answers `parameters()` and `train()` of the model from its state at the beginning of the training.

    Only for a run whose parameters stay the same tensors: a sharded model exchanges them.
    """

    def on_train_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        model.train()  # the modules of a loaded model may be in another mode than the model
        model.parameters, model.train = _CachedParameters(model), _TrainIfChanged(model)

    def on_train_end(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        vars(model).pop("parameters")
        vars(model).pop("train")


class _MethodOfModel:
    """Replaces a method of one model; a copy of the model has the method of its class."""

    name: str

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __deepcopy__(self, copies: dict[int, Any]) -> MethodType:
        return MethodType(getattr(type(self._model), self.name), copies[id(self._model)])


class _CachedParameters(_MethodOfModel):
    name = "parameters"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._parameters = list(model.parameters())

    def __call__(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        return iter(self._parameters) if recurse else type(self._model).parameters(self._model, recurse=False)


class _TrainIfChanged(_MethodOfModel):
    name = "train"

    def __call__(self, mode: bool = True) -> torch.nn.Module:
        return self._model if self._model.training is mode else type(self._model).train(self._model, mode)
