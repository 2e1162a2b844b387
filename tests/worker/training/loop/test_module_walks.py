"""Calls that visit all modules are answered from a list of them as the model itself would."""

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
    callback.on_train_begin(model=model)
    yield model
    callback.on_train_end(model=model)
    assert not {"parameters", "train"} & set(vars(model))


def test_switching_to_evaluation_and_back_reaches_every_module(model: nn.Module) -> None:
    model.eval()
    assert not any(module.training for module in model.modules())
    model.train()
    assert all(module.training for module in model.modules())


def test_a_part_in_evaluation_mode_trains_again_with_the_model_which_is_in_training_mode(model: nn.Module) -> None:
    assert model.training
    model[1].eval()
    model.train()
    assert all(module.training for module in model.modules())


def test_a_parameter_that_replaces_another_is_one_of_the_model(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    assert [*map(id, model.parameters())] == [*map(id, nn.Module.parameters(model))]


def test_tied_parameters_are_listed_once(model: nn.Module) -> None:
    model[2][0].bias = model[0].bias
    assert [*map(id, model.parameters())] == [*map(id, nn.Module.parameters(model))]


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
