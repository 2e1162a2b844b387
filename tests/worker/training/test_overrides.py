"""The installed libraries have the private names that the trainer overrides or uses, with the parameters it expects."""

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import worker.training
from worker.training import overrides
from worker.training.methods.dpo import PreferenceTrainer
from worker.training.methods.gkd import DistillationTrainer
from worker.training.methods.kto import RatedAnswerTrainer
from worker.training.methods.reference_free import ReferenceFreeTrainer
from worker.training.methods.reward_model import RewardModelTrainer
from worker.training.methods.rlhf import GroupTrainer, LeaveOneOutTrainer
from worker.training.methods.sft import SupervisedTrainer
from worker.training.overrides import INTERNAL_NAMES, InternalName

TRAINERS = (
    SupervisedTrainer, PreferenceTrainer, RatedAnswerTrainer, ReferenceFreeTrainer, RewardModelTrainer, GroupTrainer,
    LeaveOneOutTrainer, DistillationTrainer,
)  # fmt: skip
OF_TORCH_AND_PYTHON = {
    "_asdict", "_backward_hooks", "_backward_pre_hooks", "_buffers", "_dump_snapshot", "_forward_hooks",
    "_forward_pre_hooks", "_last_lr", "_record_memory_history", "_replace",
}  # fmt: skip


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def advice(checked_with: str) -> str:
    library = checked_with.split()[0]
    return (
        f"It was checked with {checked_with}, and {library} {version(library)} is installed: look at what the library "
        "does now, correct worker/training/overrides.py, and set the version there."
    )


def override_problem(trainer: type, override: Any, name: str) -> str | None:
    """Return what is wrong with a method of `override`, given the library's classes below the trainer's own."""
    library_classes = [base for base in trainer.__mro__ if not base.__module__.startswith("worker.")]
    owner = next((base for base in library_classes if name in vars(base)), None)
    if owner is None:
        return f"`{override.__name__}.{name}` overrides nothing of {trainer.__name__}. {advice(override.CHECKED_WITH)}"
    own, library = (inspect.signature(getattr(base, name)).parameters.values() for base in (override, owner))
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in own):
        return None  # it passes on whatever it gets
    own_names, library_names = ([(each.name, each.default) for each in side] for side in (own, library))
    if own_names != library_names:
        return (
            f"`{override.__name__}.{name}` takes {[name for name, _ in own_names]}, and `{owner.__name__}.{name}` "
            f"takes {[name for name, _ in library_names]} (or has other defaults). {advice(override.CHECKED_WITH)}"
        )
    return None


def internal_name_problem(internal: InternalName) -> str | None:
    """Return what is wrong with a name that is used without an override."""
    module_name, _, class_name = internal.owner.partition(":")
    module = importlib.import_module(module_name)
    if internal.parameters is None:
        if re.search(rf"\b{internal.name}\b", inspect.getsource(module)):
            return None
        return f"`{internal.owner}` has no `{internal.name}`. {advice(internal.checked_with)}"
    function: Callable[..., Any] | None = getattr(
        getattr(module, class_name) if class_name else module, internal.name, None
    )
    if function is None:
        return f"`{internal.owner}` has no `{internal.name}`. {advice(internal.checked_with)}"
    parameters = ", ".join(inspect.signature(inspect.unwrap(function)).parameters)
    if parameters != internal.parameters:
        return (
            f"`{internal.owner}.{internal.name}` takes ({parameters}), not ({internal.parameters}). "
            f"{advice(internal.checked_with)}"
        )
    return None


def overridden_methods() -> Iterator[tuple[type, type, str]]:
    for trainer in TRAINERS:
        for base in trainer.__mro__:
            if base.__module__ == overrides.__name__:
                names = (name for name, value in vars(base).items() if isinstance(value, FunctionType))
                yield from ((trainer, base, name) for name in names)


def test_every_override_overrides_a_method_of_the_installed_library_with_its_parameters() -> None:
    methods = list(overridden_methods())
    assert len(methods) > 60
    assert [problem for method in methods if (problem := override_problem(*method))] == []


def test_installed_libraries_have_every_internal_name_that_is_used() -> None:
    assert [problem for internal in INTERNAL_NAMES if (problem := internal_name_problem(internal))] == []


class TestProblems:
    """What the next version of a library would lead to."""

    class Base:
        def _unchanged(self, folder: str) -> None: ...

        def _changed(self, folder: str, step: int) -> None: ...

    class Override:
        CHECKED_WITH = "transformers 0.1"

        def _unchanged(self, folder: str) -> None: ...

        def _changed(self, folder: str) -> None: ...

        def _removed(self) -> None: ...

    @pytest.mark.parametrize(
        ("name", "problem"),
        [
            ("_unchanged", None),
            ("_changed", "`Base._changed` takes ['self', 'folder', 'step']"),
            ("_removed", "overrides nothing of Base"),
        ],
    )
    def test_override_of_a_removed_or_changed_method_is_named(self, name: str, problem: str | None) -> None:
        # The class stands for one of the library: its module is that of these tests.
        sentence = override_problem(self.Base, self.Override, name)
        if problem is None:
            assert sentence is None
        else:
            assert sentence is not None and problem in sentence
            assert "It was checked with transformers 0.1" in sentence

    @pytest.mark.parametrize(
        ("internal", "problem"),
        [
            (InternalName("transformers.trainer", "_removed_attribute"), "has no `_removed_attribute`"),
            (InternalName("transformers:Trainer", "_removed_method", "self"), "has no `_removed_method`"),
            (InternalName("transformers:Trainer", "_prepare_inputs", "self, batch"), "takes (self, inputs)"),
        ],
    )
    def test_use_of_a_removed_or_changed_name_is_named(self, internal: InternalName, problem: str) -> None:
        sentence = internal_name_problem(internal)
        assert sentence is not None and problem in sentence
        assert f"transformers {version('transformers')} is installed" in sentence


def test_private_methods_of_libraries_are_overridden_in_one_module_only() -> None:
    elsewhere = {
        f"{base.__module__}.{base.__name__}.{name}"
        for trainer in TRAINERS
        for base in trainer.__mro__
        if base.__module__.startswith("worker.") and base.__module__ != overrides.__name__
        for name in vars(base)
        if is_private(name)
        if any(name in vars(other) for other in trainer.__mro__ if not other.__module__.startswith("worker."))
    }
    assert elsewhere == set()


def test_every_private_name_of_a_library_is_listed() -> None:
    defined, used = set(OF_TORCH_AND_PYTHON), set()
    for path in Path(*worker.training.__path__).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(value=ast.Name("self"), attr=name, ctx=ast.Store()):
                    defined.add(name)
                case ast.Attribute(attr=name) if is_private(name):
                    used.add(name)
                case (
                    ast.FunctionDef(name=name)
                    | ast.AsyncFunctionDef(name=name)
                    | ast.ClassDef(name=name)
                    | ast.Name(id=name, ctx=ast.Store())
                ):
                    defined.add(name)
    assert len(used) > 100
    assert sorted(used - defined - {internal.name for internal in INTERNAL_NAMES}) == []
