"""Every dependency is pinned to one version, and no pin has a known vulnerability."""

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.nodes import ROOT

PINS = {
    canonicalize_name(pin.name): pin
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
    for pin in [Requirement(line)]
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _version(name: str) -> Version:
    (specifier,) = PINS[canonicalize_name(name)].specifier
    assert specifier.operator == "=="
    return Version(specifier.version)


def test_every_dependency_that_is_declared_is_pinned_within_its_bounds() -> None:
    groups = [
        PROJECT["dependencies"],
        PROJECT["optional-dependencies"]["server"],
        [text for text in PROJECT["optional-dependencies"]["worker"] if text != "anneal[server]"],
        PROJECT["optional-dependencies"]["trackers"],
        PROJECT["optional-dependencies"]["s3"],
        PROJECT["optional-dependencies"]["kernels-liger"],
        PROJECT["optional-dependencies"]["otel"],
        PROJECT["optional-dependencies"]["ray"],
        PROJECT["optional-dependencies"]["torchao"],
        PROJECT["optional-dependencies"]["gguf"],
        [text for text in PROJECT["optional-dependencies"]["dev"] if not text.startswith("anneal")],
        [text for text in PROJECT["optional-dependencies"]["integrations"] if not text.startswith("anneal")],
        PROJECT["optional-dependencies"]["docs"],
    ]
    for text in [text for group in groups for text in group]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(_version(requirement.name), prereleases=True), text


def test_every_pin_names_one_version_and_no_address() -> None:
    assert len(PINS) > 100
    for name, pin in PINS.items():
        assert pin.url is None and _version(name)


@pytest.mark.parametrize(
    ("name", "least"), [("starlette", "0.49.1"), ("python-multipart", "0.0.27"), ("torch", "2.10"), ("celery", "5.7")]
)
def test_versions_with_holes_that_we_know_of_are_not_used(name: str, least: str) -> None:
    assert _version(name) >= Version(least)


@pytest.mark.parametrize("name", ["transformers", "trl", "peft", "accelerate", "bitsandbytes"])
def test_library_whose_internals_the_trainer_uses_is_allowed_only_from_its_tested_minor_version_on(name: str) -> None:
    (requirement,) = (
        parsed for text in PROJECT["optional-dependencies"]["worker"] if (parsed := Requirement(text)).name == name
    )
    (bound,) = requirement.specifier
    tested = _version(name)
    assert (bound.operator, bound.version) == (">=", f"{tested.major}.{tested.minor}")
