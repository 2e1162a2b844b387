"""Page of the command line: every command with its arguments and options."""

from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin

import typer.main

from app.cli.main import cli
from docs.generator import markdown


def page() -> str:
    """Return the page."""
    root: Any = typer.main.get_command(cli)
    text = markdown.header("Command line", "the commands in `app/cli`")
    text += f"{markdown.escape(root.help)}\n\n{markdown.escape(root.epilog)}\n\n"
    for name, command in _walk(root, "anneal"):
        text += f"## `{name}`\n\n{markdown.escape(_unwrapped(command.help or ''))}\n\n"
        rows = [_parameter(one) for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
        text += markdown.table(("parameter", "type", "default", "meaning"), rows)
    return text.rstrip("\n") + "\n"


def _walk(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    context = group.make_context(path.rpartition(" ")[2], [], resilient_parsing=True)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command.hidden:
            continue
        yield f"{path} {name}", command
        if hasattr(command, "list_commands"):
            yield from _walk(command, f"{path} {name}")


def _unwrapped(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.replace("\b", "").split("\n\n"))


def _parameter(parameter: Any) -> tuple[str, str, str, str]:
    is_argument = parameter.param_type_name == "argument"
    options = ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))
    name = f"`{parameter.metavar or parameter.name.upper()}`" if is_argument else options
    shown = parameter.default not in (None, False) and not callable(parameter.default)
    default = "required" if parameter.required else f"`{parameter.default}`" if shown else ""
    return name, _type(parameter), default, markdown.escape(parameter.help or "")


def choices(parameter: Any) -> tuple[str, ...]:
    """Return the values that a parameter may have; empty if they are not limited to some."""
    annotation = parameter.type_descriptor.annotation
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return tuple(annotation)
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _type(parameter: Any) -> str:
    annotation = parameter.type_descriptor.annotation
    if getattr(parameter, "is_flag", False):
        return "flag"
    if values := choices(parameter):
        return ", ".join(f"`{value}`" for value in values)
    name = "text" if annotation in (str, list[str]) else getattr(annotation, "__name__", str(annotation)).lower()
    return f"{name}, repeatable" if parameter.multiple else name
