"""Commands of `anneal datasets`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.console import (
    After,
    AsJson,
    Limit,
    command_group,
    fail,
    format_size,
    open_client,
    print_details,
    print_json,
    print_listing,
    print_note,
    print_text,
    report_deleted,
    show_transfer,
    split_page,
)
from app.cli.names import DatasetId, Sources, id_of_dataset

if TYPE_CHECKING:
    from anneal.contracts.schemas.datasets import DatasetView

commands = command_group("Datasets: files of training rows. Example: `anneal datasets upload chats.jsonl`.")

Format = Annotated[str | None, typer.Option(help="Dataset format. Default: detected from the columns.")]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column", metavar="OURS=THEIRS", help="Map a column of the format to a column of the file; repeatable."
    ),
]
Tokenizer = Annotated[str | None, typer.Option(metavar="MODEL", help="Count tokens with this model's tokenizer.")]


@commands.command()
def upload(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to upload; `-`: standard input.")],
    name: Annotated[str | None, typer.Option(help="Name of the dataset. Default: the file name.")] = None,
    format: Format = None,
    file_format: Annotated[
        str | None, typer.Option(help="jsonl, json, csv, tsv or parquet. Default: from the file's name or content.")
    ] = None,
    column: Columns = None,
    tokenizer: Tokenizer = None,
    as_json: AsJson = False,
) -> None:
    """Upload a file, validate every row and print the id of the dataset.

    Example: `anneal datasets upload chats.jsonl --name "support, May"`, or `… | anneal datasets upload - --name chats`
    """
    columns = _parse_columns(column)
    with open_client() as client:
        is_piped = str(file) == "-"
        with show_transfer(file.name, None if is_piped else file.stat().st_size) as update:
            dataset = client.datasets.upload(
                sys.stdin.buffer if is_piped else file,
                name=name,
                format=format,
                file_format=file_format,
                columns=columns,
                tokenizer=tokenizer,
                on_progress=update,
            )
        _print_created(dataset, as_json)


@commands.command("import")
def load_from_hub(
    hub: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Dataset on the Hugging Face Hub.")],
    split: Annotated[str, typer.Option(help="Split to import.")] = "train",
    subset: Annotated[
        str | None, typer.Option(help="Subset (configuration); required if the dataset has several.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit. Default: the main branch.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the dataset. Default: its Hub name and split.")] = None,
    format: Format = None,
    column: Columns = None,
    tokenizer: Tokenizer = None,
    as_json: AsJson = False,
) -> None:
    """Import a dataset from the Hugging Face Hub and print its id in this service.

    Example: `anneal datasets import openai/gsm8k --subset main --column prompt=question --column completion=answer`
    """
    columns = _parse_columns(column)
    with open_client() as client:
        dataset = client.datasets.load_from_hub(
            hub, split=split, subset=subset, revision=revision, name=name, format=format, columns=columns,
            tokenizer=tokenizer,
        )  # fmt: skip
        _print_created(dataset, as_json)


@commands.command()
def mix(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new dataset.")],
    sources: Sources,
    weight_column: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column with the number of times that a row is used; 0 leaves it out."),
    ] = None,
    all_exhausted: Annotated[
        bool, typer.Option("--all", help="Use every row of every source; smaller sources start again.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the order.")] = 42,
    as_json: AsJson = False,
) -> None:
    """Make a dataset of rows of others and print its id.

    Without weights the datasets follow each other. With weights a random dataset gives each row, until one has no more.

    Example: `anneal datasets mix "chats and code" chats:0.7 code:0.3`
    """
    strategy = "all_exhausted" if all_exhausted else "first_exhausted"
    with open_client() as client:
        mixed = client.datasets.mix(
            name, [_mix_source(source, weight_column) for source in sources], stopping_strategy=strategy, seed=seed
        )
        _print_created(mixed, as_json)


def _mix_source(text: str, weight_column: str | None) -> dict[str, Any]:
    named, colon, weight = text.rpartition(":")
    try:
        parts = (
            {"dataset_id": id_of_dataset(named), "weight": float(weight)}
            if colon
            else {"dataset_id": id_of_dataset(text)}
        )
    except ValueError:
        raise typer.BadParameter(f"{text}: write DATASET:WEIGHT, for example chats:0.7") from None
    return parts if weight_column is None else {**parts, "weight_column": weight_column}


def _parse_columns(pairs: list[str] | None) -> dict[str, str] | None:
    columns = {}
    for pair in pairs or []:
        ours, equals, theirs = pair.partition("=")
        if not (ours and equals and theirs):
            raise typer.BadParameter(f"--column {pair}: write OURS=THEIRS, for example prompt=question")
        columns[ours] = theirs
    return columns or None


def _print_created(dataset: "DatasetView", as_json: bool) -> None:
    if as_json:
        print_json(dataset)
        return
    tokens = f", {dataset.token_statistics.total:,} tokens" if dataset.token_statistics else ""
    print_note(f"{dataset.name}: {dataset.rows:,} rows, {dataset.format}, {format_size(dataset.bytes)}{tokens}")
    print_text(dataset.id)


def _source_text(dataset: "DatasetView") -> str:
    """Return how the dataset was made in words, such as `csv with semicolons, gzip, alpaca`."""
    from anneal.contracts.schemas.datasets import MixRecipe

    source = dataset.source
    if isinstance(source, MixRecipe):
        return f"mix: {source.stopping_strategy}, seed {source.seed}"
    delimiters = {";": " with semicolons", "\t": " with tabs"} if source.file_format == "csv" else {}
    parts = [source.file_format + delimiters.get(source.delimiter or "", ""), source.gzip and "gzip", source.layout]
    return ", ".join(part for part in parts if part)


def _mixed_from(dataset: "DatasetView") -> dict[str, str]:
    """Return a line for each source of a mix."""
    used = getattr(dataset.source, "mixed_from", [])
    return {
        f"source {number}": f"{one.dataset_id}  {one.name}  {one.rows:,} rows"
        + (f", weight {one.weight:g}" if one.weight is not None else "")
        + (f", weighted by `{one.weight_column}`" if one.weight_column else "")
        for number, one in enumerate(used, 1)
    }


@commands.command("list")
def list_datasets(limit: Limit = 50, after: After = None, as_json: AsJson = False) -> None:
    """List datasets, newest first.

    Example: `anneal datasets list --limit 10`
    """
    with open_client() as client:
        datasets, has_more = split_page(client.datasets.list(limit=limit + 1, after=after), limit)
        rows = [(it.id, it.name, it.format, f"{it.rows:,}", format_size(it.bytes), it.created_at) for it in datasets]
        print_listing(datasets, has_more, as_json, ("id", "name", "format", "rows", "size", "created"), rows)


@commands.command()
def show(dataset_id: DatasetId, as_json: AsJson = False) -> None:
    """Show a dataset with its first rows.

    Example: `anneal datasets show ds_01k3x9m6q2v8s4t0w7y5z1a3b7`
    """
    with open_client() as client:
        dataset = client.datasets.get(dataset_id)
        if as_json:
            print_json(dataset)
            return
        print_details(
            {
                "id": dataset.id, "name": dataset.name, "format": dataset.format, "rows": f"{dataset.rows:,}",
                "size": format_size(dataset.bytes), "sha256": dataset.sha256, "columns": dataset.columns,
                "made from": _source_text(dataset), "created": dataset.created_at, "tokens": dataset.token_statistics,
                **_mixed_from(dataset), **{f"row {number}": row for number, row in enumerate(dataset.preview, 1)},
            }
        )  # fmt: skip


@commands.command()
def content(
    dataset_id: DatasetId,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: standard output.")
    ] = None,
) -> None:
    """Print the stored rows as JSONL, or write them to a file.

    Example: `anneal datasets content ds_01k3x9m6q2v8s4t0w7y5z1a3b7 -o chats.jsonl`
    """
    with open_client() as client:
        pieces = client.datasets.content(dataset_id)
        if output is None:
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            return
        if output.is_dir():
            fail(f"{output} is a folder: name a file in it.")
        part = output.with_name(f".{output.name}.part")
        try:
            with part.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
            part.replace(output)
        finally:
            part.unlink(missing_ok=True)


@commands.command()
def delete(dataset_id: DatasetId, as_json: AsJson = False) -> None:
    """Delete a dataset that no run uses.

    Example: `anneal datasets delete ds_01k3x9m6q2v8s4t0w7y5z1a3b7`
    """
    with open_client() as client:
        client.datasets.delete(dataset_id)
    report_deleted(dataset_id, as_json)
