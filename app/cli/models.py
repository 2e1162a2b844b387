"""Command `anneal models`."""

from typing import TYPE_CHECKING

from app.cli.console import AsJson, command_group, connected, listing, note, size

if TYPE_CHECKING:
    from app.contracts.schemas.models import ModelRead

commands = command_group("Base models on the server. Example: `anneal models list`.")


@commands.callback()
def models() -> None:
    """Keep `list` a subcommand: Typer merges a single command into its group."""


@commands.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the base models below the models roots, with what their files say; name one as `config.base_model`.

    Example: `anneal models list --json`
    """
    with connected() as client:
        found = client.models.list()
        rows = [
            (
                it.id, "adapter" if it.is_adapter else it.architecture, _parameters(it), it.dtype,
                size(it.bytes), "yes" if it.has_chat_template else "no",
            )
            for it in found
        ]  # fmt: skip
        if not found and not as_json:
            note(
                "There are no models. Put their folders below ANNEAL_MODELS_ROOT of the service, or set "
                "`config.base_model` to the name of a model of the hub."
            )
            return
        listing(
            found, False, as_json, ("name", "architecture", "parameters", "dtype", "weights", "chat template"), rows
        )


def _parameters(model: "ModelRead") -> str | None:
    if model.parameters is None:
        return None
    return f"{model.parameters / 1e9:.3g} B" if model.parameters >= 1e9 else f"{model.parameters / 1e6:.3g} M"
