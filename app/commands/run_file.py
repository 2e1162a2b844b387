"""`run.yaml`: the body of `POST /v1/runs` as YAML or JSON, with changes from the command line."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from app.strict_json import parse


class RunFileError(ValueError):
    """What is wrong with the file, or with a `--set`."""


def read(path: Path) -> dict[str, Any]:
    """The object in a file; `-` is standard input."""
    raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        value = parse(raw) if path.suffix == ".json" else _from_yaml(raw.decode())
    except (yaml.YAMLError, ValueError) as error:
        raise RunFileError(f"{path} cannot be used: {_reason(error)}.") from None
    if not isinstance(value, dict):
        raise RunFileError(f"{path} cannot be used: it holds no fields; write `dataset_id: …` and `config: …`.")
    return value


def change(body: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """`body` with values set as `config.learning_rate=1e-4` says; values are read as in YAML."""
    for setting in settings:
        path, equals, text = setting.partition("=")
        names = path.strip().split(".")
        if not equals or not all(names):
            raise RunFileError(f"--set {setting} is not understood: write --set config.learning_rate=1e-4.")
        try:
            value = _from_yaml(text)
        except (yaml.YAMLError, ValueError) as error:
            raise RunFileError(f"--set {setting} is not understood: {_reason(error)}.") from None
        place = body
        for depth, name in enumerate(names[:-1], 1):
            below = place.setdefault(name, {})
            if not isinstance(below, dict):
                raise RunFileError(f"--set {setting} cannot be done: {'.'.join(names[:depth])} holds no fields.")
            place = below
        place[names[-1]] = value
    return body


class _Loader(yaml.SafeLoader):
    """YAML as people mean it here: 1e-4 is a number, `no` and 2026-01-02 are texts, and no key comes twice."""

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
    except AttributeError:  # PyYAML's own, of a `!!timestamp` that is none
        raise RunFileError("it has a value that is not what its tag says") from None
    finally:
        loader.dispose()
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise RunFileError("it has a value that JSON cannot tell: texts, numbers, true, false, null, lists") from None
    return value


def _check_keys(node: yaml.Node, checked: set[int]) -> None:
    """Every key is a text and there once. Before anything is built: merges (`<<`) may well bring a key again."""
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
            raise RunFileError(f"a key in line {line} is no text")
        if key.value in seen:
            raise RunFileError(f"the key {key.value!r} is there twice, again in line {line}")
        seen.add(key.value)
        if key.tag != "tag:yaml.org,2002:merge":
            key.tag = "tag:yaml.org,2002:str"
        _check_keys(value, checked)


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return " ".join(str(error).split())
