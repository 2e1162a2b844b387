"""Calls that walk through all modules are answered from one walk, as the model itself would."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from worker.training.loop.module_walks import CachedModuleWalks


@pytest.fixture
def model() -> Iterator[nn.Module]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 2)))
    callback = CachedModuleWalks()
    model[1].eval()  # as modules of a base model are that an adapter has been added to
    callback.on_train_begin(model=model)
    yield model
    callback.on_train_end(model=model)
    assert not {"parameters", "train"} & set(vars(model))


def test_all_modules_train_once_the_training_begins(model: nn.Module) -> None:
    assert all(module.training for module in model.modules())


def test_switching_to_evaluation_and_back_reaches_every_module(model: nn.Module) -> None:
    model.eval()
    assert not any(module.training for module in model.modules())
    model.train()
    assert all(module.training for module in model.modules())


def test_parameters_are_those_of_the_model(model: nn.Module) -> None:
    assert [*map(id, model.parameters())] == [*map(id, nn.Module.parameters(model))]
    assert list(model.parameters(recurse=False)) == []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.zero_grad()
    assert all(parameter.grad is None for parameter in nn.Module.parameters(model))


def test_a_copy_of_the_model_answers_for_itself(model: nn.Module) -> None:
    twin = copy.deepcopy(model).eval()
    assert model.training and all(module.training for module in model.modules())
    assert not any(module.training for module in twin.modules())
    assert not {*map(id, twin.parameters())} & {*map(id, model.parameters())}
    assert [*map(id, twin.parameters())] == [*map(id, nn.Module.parameters(twin))]
