"""Command `anneal models`."""

from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.console import (
    AsJson,
    command_group,
    fail,
    format_size,
    open_client,
    plain_errors,
    print_json,
    print_listing,
    print_note,
    print_text,
)

if TYPE_CHECKING:
    from anneal.contracts.schemas.models import ModelRead

commands = command_group("Base models on the server. Example: `anneal models list`.")


@commands.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the base models below the models roots, with what their files say; name one as `config.base_model`.

    Example: `anneal models list --json`
    """
    with open_client() as client:
        models_read = client.models.list()
        rows = [
            (
                it.id, "adapter" if it.is_adapter else it.architecture, _format_parameters(it), it.dtype,
                format_size(it.bytes), "yes" if it.has_chat_template else "no",
            )
            for it in models_read
        ]  # fmt: skip
        if not models_read and not as_json:
            print_note(
                "There are no models. Put their folders below ANNEAL_MODELS_ROOT of the service, set "
                "`config.base_model` to the name of a model of the hub, or make a small one with `anneal models create "
                "tiny`."
            )
            return
        print_listing(
            models_read,
            False,
            as_json,
            ("name", "architecture", "parameters", "dtype", "weights", "chat template"),
            rows,
        )


@commands.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model, such as `tiny`.")],
    as_json: AsJson = False,
) -> None:
    """Make a small model with random weights on this machine, in seconds and without the hub.

    Run it on the machine of the service: the model is written below ANNEAL_MODELS_ROOT. It is good for trying out the
    service: each method trains it on a CPU, and losses fall. What it generates has no meaning, because it has learned
    nothing before. Its tokenizer is trained on the library of this Python.

    Example: `anneal models create tiny`
    """
    from pydantic import TypeAdapter, ValidationError

    from anneal.contracts.field_types import ModelName
    from app.base_models import tiny_model
    from app.config import get_settings

    with plain_errors():
        folder = get_settings().models_folder
        try:
            TypeAdapter(ModelName).validate_python(name)
        except ValidationError:
            name_rule = "use letters, digits and `_.@=+-`, and `/` between folders"
            fail(f"{name[:100]!r} is no name of a model below the models folder: {name_rule}.", code="invalid_name")
        if name.startswith("/"):
            fail("The name is a path: write it relative to the models folder, such as `tiny`.", code="invalid_name")
        try:
            tiny_model.create_tiny_model(folder, name)
            result = f"{folder / name} has a Llama of 2 layers with random weights, to try out the service."
        except FileExistsError:
            result = f"There is a folder {folder / name}: use it, or choose another name."
    if as_json:
        print_json({"name": name, "folder": str(folder / name)})
        return
    print_note(result)
    print_note(f"Use it as `base_model: {name}`, or with `anneal runs create -m {name} -d FILE --lora`.")
    print_text(name)


def _format_parameters(model: "ModelRead") -> str | None:
    if model.parameters is None:
        return None
    return f"{model.parameters / 1e9:.3g} B" if model.parameters >= 1e9 else f"{model.parameters / 1e6:.3g} M"
