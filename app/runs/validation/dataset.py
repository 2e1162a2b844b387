"""Checks of a dataset against a configuration: its format, its columns and its number of rows."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from app.contracts import rewards
from app.contracts.errors import FieldError
from app.contracts.methods import PREFERENCE, SUPERVISED, TrainingMethod
from app.tables.datasets import Dataset

_FORMATS: dict[TrainingMethod, tuple[str, ...]] = {
    **dict.fromkeys(SUPERVISED, ("chat", "prompt_completion", "text")),
    **dict.fromkeys(PREFERENCE, ("preference",)),
    TrainingMethod.rlhf: ("prompt",),
}
"""Dataset formats that each method accepts."""

Place = Literal["dataset_id", "eval_dataset_id"]


def data_problems(
    config: Mapping[str, Any], place: Place, dataset: Dataset | None, splits: bool
) -> Iterator[FieldError]:
    """Yield errors of a dataset for a configuration as the user wrote it; `dataset` None: there is none to check.

    `splits`: True if the backend holds out the fraction `eval_split`.
    """
    if dataset is None:
        return
    yield from _format(config, place, dataset)
    yield from _answers(config, place, dataset)
    if splits and place == "dataset_id":
        yield from _split(config, dataset)


def rewards_of(config: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the index and the content of each reward as the user wrote it, if it is an object."""
    options = config.get("rlhf") if config.get("method") == TrainingMethod.rlhf else None
    listed = options.get("rewards") if isinstance(options, Mapping) else None
    for at, reward in enumerate(listed if isinstance(listed, list) else []):
        if isinstance(reward, Mapping):
            yield at, reward


def _format(config: Mapping[str, Any], place: Place, dataset: Dataset) -> Iterator[FieldError]:
    method = config.get("method", TrainingMethod.qlora)
    formats = _FORMATS.get(TrainingMethod(method), ()) if method in list(TrainingMethod) else ()
    if formats and dataset.format not in formats:
        wanted = ", ".join(f"`{item}`" for item in formats)
        message = (
            f"method `{method}` trains on {wanted}, and this dataset is `{dataset.format}`; upload the rows "
            "in that format, or choose another method"
        )
        yield FieldError(field=place, code="wrong_dataset_format", message=message)


def _answers(config: Mapping[str, Any], place: Place, dataset: Dataset) -> Iterator[FieldError]:
    if dataset.format != "prompt" or "answer" in dataset.columns:
        return
    for _, reward in rewards_of(config):
        if reward.get("type") in rewards.WITH_ANSWER:
            message = (
                f"the reward `{reward['type']}` compares completions with a column `answer`, and this dataset has "
                "none; upload it with answers, or choose other rewards"
            )
            yield FieldError(field=place, code="no_answers", message=message)
            return


def _split(config: Mapping[str, Any], dataset: Dataset) -> Iterator[FieldError]:
    part, extra = config.get("eval_split"), config.get("extra")
    # A plugin decides itself how it uses the file.
    if isinstance(extra, Mapping) and (extra.get("data_source") or extra.get("recipe")):
        return
    if isinstance(part, int | float) and 0 < part < 1 and dataset.rows < 2:
        message = "`eval_split` needs at least two rows, one of them to train on, and this dataset has one."
        yield FieldError(field="config.eval_split", code="conflict", message=message)
