"""Body of `POST /v1/runs` from a run file, options and `--set`; names and local files become ids."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.console import fail, print_note, show_transfer
from app.cli.names import id_of_dataset, id_of_experiment
from app.infra.ids import is_id

if TYPE_CHECKING:
    from anneal.client.client import Anneal

_CHUNK_BYTES = 1024 * 1024

File = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="Run file in YAML or JSON, as `anneal runs init` writes it; - reads stdin."),
]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="Base model: a folder, a name of the hub, or the id of a run.")
]
Dataset = Annotated[
    str | None, typer.Option("--dataset", "-d", help="Dataset: its id, its name, `last`, or a local file.")
]
Method = Annotated[str | None, typer.Option("--method", help="Training method, such as dpo. Default: qlora.")]
Qlora = Annotated[bool, typer.Option("--qlora", help="Train an adapter on the model in 4 bits: --method qlora.")]
Lora = Annotated[bool, typer.Option("--lora", help="Train an adapter: --method lora.")]
Full = Annotated[bool, typer.Option("--full", help="Train all weights: --method full.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a field, e.g. config.learning_rate=1e-4; repeatable."),
]


@dataclass(frozen=True)
class RunOptions:
    """Description of a run in the options of a command."""

    file: Path | None = None
    model: str | None = None
    dataset: str | None = None
    method: str | None = None
    flags: tuple[str, ...] = ()
    """Methods that are named by a flag."""
    sets: Sequence[str] = ()

    @classmethod
    def from_parameters(
        cls, file: Path | None, model: str | None, dataset: str | None, method: str | None,
        sets: Sequence[str] | None, **flags: bool,
    ) -> "RunOptions":  # fmt: skip
        """Create it from the parameters of a command."""
        named = tuple(name for name, is_set in flags.items() if is_set)
        return cls(file, model, dataset, method, named, sets or ())

    @property
    def chosen_method(self) -> str | None:
        """Method that the options name; None if they name none."""
        methods = {*self.flags, *([self.method] if self.method is not None else [])}
        if len(methods) > 1:
            raise typer.BadParameter(f"{' and '.join(sorted(methods))} are several methods; name one of them.")
        return next(iter(methods), None)

    def build_body(self, client: "Anneal", *, has_dataset: bool = True) -> dict[str, Any]:
        """Return the body of the request; a local file that the service does not have is uploaded.

        Without `has_dataset`, the request names no dataset.
        """
        folder = Path() if self.file is None or str(self.file) == "-" else self.file.parent
        body = self._with_names(has_dataset)
        if not has_dataset:
            body.pop("dataset_id", None)
        return with_ids(client, body, folder)

    def _with_names(self, has_dataset: bool) -> dict[str, Any]:
        """Return the body with names and paths as the user wrote them."""
        from app.cli.runs import run_file  # loads YAML, which `--help` does not need

        if self.file is None and (self.model is None or (has_dataset and self.dataset is None)):
            fail(
                "Name a model and a dataset, as in `anneal runs create -m tiny -d chats.jsonl --lora`, or a run file "
                "with -f; `anneal runs init` writes one.",
                code="no_run_file",
            )
        body = {} if self.file is None else run_file.read_body(self.file)
        config = body.setdefault("config", {})
        options = {"base_model": self.model, "method": self.chosen_method}
        if isinstance(config, dict):
            config |= {name: value for name, value in options.items() if value is not None}
        if self.dataset is not None:
            # Relative to the folder of the command, where that of a run file is relative to its own.
            body["dataset_id"] = str(Path(self.dataset).absolute()) if Path(self.dataset).is_file() else self.dataset
        return run_file.set_values(body, self.sets)


def with_ids(client: "Anneal", body: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Replace names of datasets and experiments by ids, and local files by the datasets of their content.

    Paths are relative to `folder`.
    """
    resolved = dict(body)
    for field in ("dataset_id", "eval_dataset_id"):
        if isinstance(text := body.get(field), str):
            resolved[field] = dataset_of(client, text, folder)
    if isinstance(extra := body.get("extra_eval_datasets"), dict):
        resolved["extra_eval_datasets"] = {
            name: dataset_of(client, text, folder) if isinstance(text, str) else text for name, text in extra.items()
        }
    if isinstance(text := body.get("experiment_id"), str):
        resolved["experiment_id"] = id_of_experiment(text)
    return resolved


def dataset_of(client: "Anneal", text: str, folder: Path) -> str:
    """Return the id of the dataset that `text` names; a local file, relative to `folder`, is uploaded once."""
    if is_id(text, "ds"):
        return text
    try:
        path = folder / Path(text).expanduser()
    except RuntimeError:  # there is no user of this name
        path = folder / text
    if path.is_file():
        return _find_or_upload(client, path)
    if "/" in text or path.suffix in (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".gz"):
        names = [dataset.id for dataset in client.datasets.list(find=text, limit=1)]
        if not names:
            fail(f"There is no file {path} and no dataset {text!r}: correct the path or the name.", code="file_error")
    return id_of_dataset(text)


def _find_or_upload(client: "Anneal", path: Path) -> str:
    """Return the dataset that was uploaded from a file with this content as it is, or upload it.

    One that was uploaded with a format or columns of the user's choice may have other rows than this upload would have.
    """
    from anneal.contracts.schemas.datasets import DatasetSource  # loads pydantic, which `--help` does not need

    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    for summary in client.datasets.list(file_sha256=digest.hexdigest()):
        source = client.datasets.get(summary.id).source
        if isinstance(source, DatasetSource) and source.requested_format is None and source.requested_columns is None:
            print_note(f"{path.name} was uploaded before: {summary.id} {summary.name}, {summary.format}.")
            return str(summary.id)
    with show_transfer(path.name, path.stat().st_size) as update:
        dataset = client.datasets.upload(path, on_progress=update)
    print_note(f"{path.name} is uploaded: {dataset.id}, {dataset.rows} rows, {dataset.format}.")
    return str(dataset.id)
