"""Calls on a model that visit all of its modules in every step, without a walk through their tree.

Between two steps the device waits for the host. A model of 36 layers with adapters has 2,800 modules, and the trainer
of transformers walks through them several times a step: to clip and reset gradients, and to switch to training.
"""

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from transformers import TrainerCallback


class CachedModuleWalks(TrainerCallback):  # type: ignore[misc]
    """Answers `parameters()` and `train()` of the model from a list of its modules when the training begins.

    Parameters and modes are those that the modules have when they are called. Only modules that are added or removed
    during the training are not noticed.
    """

    def on_train_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        modules = list(model.modules())
        model.parameters, model.train = _ListedParameters(model, modules), _TrainIfNecessary(model, modules)

    def on_train_end(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        vars(model).pop("parameters")
        vars(model).pop("train")


class _MethodOfModel:
    """Replaces a method of one model; a copy of the model has the method of its class."""

    name: str

    def __init__(self, model: torch.nn.Module, modules: list[torch.nn.Module]) -> None:
        self._model, self._modules = model, modules

    def __deepcopy__(self, copies: dict[int, Any]) -> MethodType:
        return MethodType(getattr(type(self._model), self.name), copies[id(self._model)])


class _ListedParameters(_MethodOfModel):
    name = "parameters"

    def __call__(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        modules = self._modules if recurse else [self._model]
        every = (parameter for module in modules for parameter in module._parameters.values() if parameter is not None)
        return iter(dict.fromkeys(every))  # tied ones once


class _TrainIfNecessary(_MethodOfModel):
    name = "train"

    def __call__(self, mode: bool = True) -> torch.nn.Module:
        # Of each module: some code switches a part of a model to evaluation.
        if all(module.training is mode for module in self._modules):
            return self._model
        return type(self._model).train(self._model, mode)
