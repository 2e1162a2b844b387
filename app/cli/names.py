"""Arguments that name a run, dataset or experiment: by id, the beginning of one, a name, or `last`; with completion."""

import shlex
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app.cli.console import ca_file, fail, open_client
from app.infra.ids import is_id

if TYPE_CHECKING:
    from anneal.client.client import Anneal
    from anneal.contracts.schemas.runs.reads import RunSummary

Noun = Literal["run", "dataset", "experiment"]
_PREFIXES: dict[Noun, str] = {"run": "run", "dataset": "ds", "experiment": "exp"}
_LAST = "last"
_CREATED_BY: dict[Noun, str] = {"run": "runs create", "dataset": "datasets upload", "experiment": "experiments create"}
_NONE_YET = {
    "action": "The run has no action yet; `anneal actions checkpoint` requests one.",
    "checkpoint": "The run has no checkpoint yet; `anneal runs checkpoints` lists them once it has saved one.",
    "delivery": "The webhook has no delivery yet; `anneal webhooks test` sends one.",
    "webhook": "There is no webhook yet; `anneal webhooks create` creates one.",
}
_MOST_CANDIDATES = 5
_MOST_OFFERED = 100
"""Items that one request reads, to offer them to the shell or to see whether a name is unique."""


def _list_all(client: "Anneal", noun: Noun, **options: Any) -> "Iterable[Any]":
    resources: dict[Noun, Any] = {"run": client.runs, "dataset": client.datasets, "experiment": client.experiments}
    listed: Iterable[Any] = resources[noun].list(**options)
    return listed


def _id_resolver(noun: Noun) -> "Callable[[typer.Context, Any], Any]":
    """Return a callback of an argument or option, which replaces what the user typed by an id."""

    def resolve_id(context: typer.Context, value: Any) -> Any:
        if value is None or context.resilient_parsing:
            return value
        return _id_of(noun, value) if isinstance(value, str) else [_id_of(noun, one) for one in value]

    return resolve_id


def _id_of(noun: Noun, text: str) -> str:
    if is_id(text, _PREFIXES[noun]):
        return text
    with open_client() as client:
        if text == _LAST:
            return _id_of_newest(client, noun)
        how = f"Use an id, the beginning of one, a name, or `last`; `anneal {noun}s list` lists them."
        if noun == "dataset" and Path(text).is_file():
            how = f"Upload the file first: `anneal datasets upload {shlex.quote(text)}`."
        matches = list(_list_all(client, noun, find=text, limit=_MOST_OFFERED))
        return _only_match(noun, text, matches[:1] if noun == "run" and _is_chain(text, matches) else matches, how)


def _id_of_newest(client: "Anneal", noun: Noun, **filters: Any) -> str:
    """Return the id of the newest item; serving runs, which questions create, are left out."""
    if noun == "run":
        items: Iterator[Any] = (run for run in client.runs.list(**filters) if run.task != "serve")
    else:
        items = iter(_list_all(client, noun, limit=1))
    newest = next(items, None)
    if newest is None:
        fail(f"There is no {noun} yet; `anneal {_CREATED_BY[noun]}` creates one.", code=f"{noun}_not_found")
    return str(newest.id)


def _is_chain(name: str, runs: "list[RunSummary]") -> bool:
    """Return True if these runs, newest first, are all those of a name and each resumes the next one."""
    return len(runs) < _MOST_OFFERED and all(
        newer.name == older.name == name and newer.task == "train" and newer.parent_run_id == older.id
        for newer, older in pairwise(runs)
    )


def id_of_dataset(text: str) -> str:
    """Return the id of the dataset that `text` names: an id, the beginning of one, a name, or `last`."""
    return _id_of("dataset", text)


def id_of_experiment(text: str) -> str:
    """Return the id of the experiment that `text` names: an id, the beginning of one, a name, or `last`."""
    return _id_of("experiment", text)


def checkpoint_or_model(client: "Anneal", model: str, checkpoint: str | None) -> str:
    """Return the id of a checkpoint of the run that `model` names; without `checkpoint`, return `model`."""
    if checkpoint is None:
        return model
    return id_within("checkpoint", checkpoint, client.runs.checkpoints(_id_of("run", model)))


def run_or_other(context: typer.Context, text: str) -> str:
    """Replace `last` or the beginning of a run's id by the id; return anything else unchanged."""
    if context.resilient_parsing or not (text == _LAST or text.startswith("run_")):
        return text
    if text != _LAST:
        return _id_of("run", text)
    with open_client() as client:
        return _id_of_newest(client, "run", task="train")  # the model of others is that of a training


def id_within(noun: str, text: str, items: "Iterable[Any]") -> str:
    """Return the id of the item that `text` names: an id, the beginning of one, or `last` for the newest."""
    if is_id(text, text.partition("_")[0]):
        return text
    if text == _LAST:
        newest = next(iter(items), None)
        if newest is None:
            fail(_NONE_YET[noun], code=f"{noun}_not_found")
        return str(newest.id)
    matches = (it for it in items if it.id.startswith((text, f"{it.id.partition('_')[0]}_{text}")))
    how = "Use an id, the beginning of one, or `last`, of those that exist here."
    return _only_match(noun, text, islice(matches, _MOST_CANDIDATES), how)


def _only_match(noun: str, text: str, items: "Iterable[Any]", how: str) -> str:
    matches = list(items)
    if not matches:
        fail(f"There is no {noun} {text!r}. {how}", code=f"{noun}_not_found")
    if len(matches) > 1:
        candidates = (f"  {it.id}  {getattr(it, 'name', '')}".rstrip() for it in matches[:_MOST_CANDIDATES])
        fail(f"{text!r} is not unique. Use more of the id:", *candidates, code="not_unique")
    return str(matches[0].id)


def _completer(noun: Noun) -> "Callable[[str], Iterator[tuple[str, str]]]":
    """Return a function that offers ids and names to the shell, and nothing if the service is not there."""

    def offer_names(incomplete: str) -> Iterator[tuple[str, str]]:
        from pydantic import ValidationError

        from anneal.client.client import Anneal
        from anneal.client.errors import AnnealError

        try:
            with Anneal(ca_file=ca_file(), patience=0) as client:
                for it in _list_all(client, noun, limit=_MOST_OFFERED):
                    if it.id.startswith(incomplete):
                        yield it.id, it.name
                    elif it.name.startswith(incomplete) and not any(map(str.isspace, it.name)):
                        yield it.name, it.id
        except (AnnealError, ValidationError, OSError):
            return

    return offer_names


def _help_text(noun: str) -> str:
    return f"{noun.capitalize()}: its id or the beginning of it, its name, or `last` for the newest."


complete_dataset = _completer("dataset")
RunId = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help=_help_text("run"), callback=_id_resolver("run"), autocompletion=_completer("run")
    ),
]
RunIds = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN RUN…", help="2 to 20 runs, by id or name.", callback=_id_resolver("run"),
        autocompletion=_completer("run"),
    ),
]  # fmt: skip
SomeRunIds = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN…]", help="Runs, by id or name; or choose some with the filters.", callback=_id_resolver("run"),
        autocompletion=_completer("run"),
    ),
]  # fmt: skip
ParentId = Annotated[
    str | None,
    typer.Option(
        "--parent",
        help="Only runs resumed from this one.",
        callback=_id_resolver("run"),
        autocompletion=_completer("run"),
    ),
]
DatasetId = Annotated[
    str,
    typer.Argument(
        metavar="DATASET", help=_help_text("dataset"), callback=_id_resolver("dataset"), autocompletion=complete_dataset
    ),
]
OfDataset = Annotated[
    str | None,
    typer.Option(
        "--dataset", help="Only runs on this dataset.", callback=_id_resolver("dataset"),
        autocompletion=complete_dataset,
    ),
]  # fmt: skip
Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="DATASET[:WEIGHT]…", help="Datasets of one format. Weights: for all of them or for none.",
        autocompletion=complete_dataset,
    ),
]  # fmt: skip
ExperimentId = Annotated[
    str,
    typer.Argument(
        metavar="EXPERIMENT", help=_help_text("experiment"), callback=_id_resolver("experiment"),
        autocompletion=_completer("experiment"),
    ),
]  # fmt: skip
OfExperiment = Annotated[
    str | None,
    typer.Option(
        "--experiment", help="Only runs of this experiment.", callback=_id_resolver("experiment"),
        autocompletion=_completer("experiment"),
    ),
]  # fmt: skip
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Run (its id, or `last` for the newest training) for its output, checkpoint (`ckpt_…`), or base model.",
        callback=run_or_other,
    ),
]
CheckpointOfModel = Annotated[
    str | None,
    typer.Option("--checkpoint", help="Checkpoint of the run: its id or the beginning of it, or `last`."),
]
