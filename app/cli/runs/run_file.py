"""Reader of `run.yaml`: the body of `POST /v1/runs` in YAML or JSON, with overrides from `--set`."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from app.cli.console import RunFileError
from app.infra.strict_json import parse_json


def read_body(path: Path) -> dict[str, Any]:
    """Read the object in a file; `-` is standard input."""
    raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        value = parse_json(raw) if path.suffix == ".json" else _from_yaml(raw.decode())
    except (yaml.YAMLError, ValueError) as error:
        raise RunFileError(f"{path} cannot be read: {_error_reason(error)}.") from None
    if not isinstance(value, dict):
        raise RunFileError(f"{path} cannot be used: it is not a mapping. Write `dataset_id: …` and `config: …`.")
    return value


def set_values(body: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Set values in `body` from settings such as `config.learning_rate=1e-4`; values are parsed as YAML."""
    for setting in settings:
        path, equals, text = setting.partition("=")
        names = path.strip().split(".")
        if not equals or not all(names):
            raise typer.BadParameter(
                f"--set {setting} is invalid: write PATH=VALUE, for example --set config.learning_rate=1e-4."
            )
        try:
            value = _from_yaml(text)
        except (yaml.YAMLError, ValueError) as error:
            raise typer.BadParameter(
                f"--set {setting} is invalid: {_error_reason(error)}. The value is YAML; a text with other signs in it "
                f"needs double quotes: --set '{path}=\"…\"'."
            ) from None
        place = body
        for depth, name in enumerate(names[:-1], 1):
            below = place.setdefault(name, {})
            if not isinstance(below, dict):
                where = ".".join(names[:depth])
                raise typer.BadParameter(f"--set {setting} cannot be applied: {where} is not a mapping.")
            place = below
        place[names[-1]] = value
    return body


class _Loader(yaml.SafeLoader):
    """YAML loader in which 1e-4 is a number, `no` and 2026-01-02 are strings, and keys are unique."""

    yaml_implicit_resolvers: dict[str, Any] = {}


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _from_yaml(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_keys(node, set())
        value = loader.construct_document(node)
    except AttributeError:  # raised by PyYAML for an invalid `!!timestamp`
        raise RunFileError("a value does not match its tag") from None
    finally:
        loader.dispose()
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise RunFileError(
            "it contains a value that JSON cannot represent: use strings, numbers, true, false, null and lists"
        ) from None
    return value


def _check_keys(node: yaml.Node, checked: set[int]) -> None:
    """Check that every key is a string and unique, before construction: merges (`<<`) may repeat a key."""
    if id(node) in checked or isinstance(node, yaml.ScalarNode):
        return
    checked.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, checked)
        return
    seen = set()
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise RunFileError(f"the key in line {line} is not a string")
        if key.value in seen:
            raise RunFileError(f"the key {key.value!r} is repeated in line {line}")
        seen.add(key.value)
        if key.tag != "tag:yaml.org,2002:merge":
            key.tag = "tag:yaml.org,2002:str"
        _check_keys(value, checked)


def _error_reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return " ".join(str(error).split())
