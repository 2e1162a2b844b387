"""Command `anneal import openai-jobs`: exported fine-tuning jobs of OpenAI as run files."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.console import fail, print_note

_NO_NAME = re.compile(r"[^\w.-]")
"""Characters that names of run files do not have."""


def import_jobs(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Jobs as the API of OpenAI returns them, in JSON or one per line."),
    ],
    model: Annotated[str, typer.Option("--model", "-m", help="Base model of the runs, instead of the one of OpenAI.")],
    files: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder with the training files, named by their ids: file-….jsonl.")
    ] = Path(),
    to: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the run files; created if it is missing.")
    ] = Path(),
) -> None:
    """Write a run file for each fine-tuning job that was exported from OpenAI, with its hyperparameters.

    Files that exist are kept. `anneal runs create -f FILE` starts one of the runs.

    Example: `anneal import openai-jobs jobs.json --model Qwen/Qwen3-0.6B --files exported`
    """
    try:
        jobs = list(_parse_jobs(file.read_text(encoding="utf-8-sig")))
    except (OSError, ValueError) as error:
        fail(f"{file} cannot be read as jobs of OpenAI: {error}.")
    if not jobs:
        fail(f"{file} has no fine-tuning jobs: export them with `client.fine_tuning.jobs.list()`.")
    to.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        path = to / f"{_NO_NAME.sub('_', Path(str(job['id'])).name)}.yaml"
        try:
            text = _run_file(job, model, files.absolute(), path.name)
        except ValueError as error:
            print_note(f"{job['id']} is left out: {error}. Train it with method `rlhf` and rewards of your own.")
            continue
        if path.exists():
            print_note(f"{path} exists, and is kept.")
        else:
            path.write_text(text)
            typer.echo(path)


def _parse_jobs(text: str) -> Iterator[dict[str, Any]]:
    """Yield the jobs in a list of the API, an array, or lines; raises `ValueError`."""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        parsed = [json.loads(line) for line in text.splitlines() if line.strip()]
    if isinstance(parsed, dict) and parsed.get("has_more"):
        print_note("The file has one page of the jobs, and there are more: export those too.")
    listed = parsed.get("data", [parsed]) if isinstance(parsed, dict) else parsed
    for job in listed if isinstance(listed, list) else [None]:
        if not isinstance(job, dict) or not isinstance(job.get("id"), str) or "training_file" not in job:
            raise ValueError("it has something else than jobs with `id` and `training_file`")
        yield job


def _run_file(job: Mapping[str, Any], model: str, files: Path, name: str) -> str:
    """Return the run file of a job; raise `ValueError` with the reason if its grader has no counterpart."""
    method = (job.get("method") or {}).get("type", "supervised")
    data = {"dataset_id": job["training_file"], "eval_dataset_id": job.get("validation_file")}
    body: dict[str, Any] = {key: str(files / f"{file_id}.jsonl") for key, file_id in data.items() if file_id}
    if suffix := job.get("user_provided_suffix"):
        body["name"] = suffix
    body["tags"] = ["openai"]
    own_method = {"dpo": "dpo", "reinforcement": "rlhf"}.get(method, "qlora")
    config = {"base_model": model, "method": own_method, **_config(job, method)}
    if own_method == "qlora" and _has_chats(files / f"{job['training_file']}.jsonl"):
        config["loss_on"] = "assistant"  # as OpenAI trains
    origin = f"Job {job['id']} of OpenAI, {job.get('status')}: {job.get('model')} on {job['training_file']}."
    lines = [
        f"# {' '.join(origin.split())}",
        f"# `anneal runs create -f {name} --watch` starts it.",
        *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in body.items()),
        "config:",
        *(f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in config.items()),
    ]
    return "\n".join(lines) + "\n"


def _has_chats(file: Path) -> bool:
    """Return True if the first row of a training file has messages, or the file is not here: OpenAI's are chats."""
    try:
        with file.open(encoding="utf-8-sig") as rows:
            return "messages" in json.loads(next((row for row in rows if row.strip()), "{}"))
    except (OSError, ValueError):
        return True


def _config(job: Mapping[str, Any], method: str) -> dict[str, Any]:
    from anneal.contracts.methods import METHODS, TrainingMethod
    from anneal.contracts.schemas.openai.hyperparameters import (
        completions_per_prompt,
        learning_rate,
        micro_batches,
    )

    options = (job.get("method") or {}).get(method) or {}
    # `auto` in one place must not hide a number in the other.
    values = {
        name: value
        for sent in (job.get("hyperparameters"), options.get("hyperparameters"))
        for name, value in (sent or {}).items()
        if isinstance(value, int | float)
    }
    methods = {"dpo": TrainingMethod.dpo, "reinforcement": TrainingMethod.rlhf}
    trained_by = METHODS[methods.get(method, TrainingMethod.qlora)]
    config: dict[str, Any] = {}
    completions = 1
    if method == "reinforcement":
        completions = completions_per_prompt(values.get("compute_multiplier", 1))
        config["rlhf"] = {"rewards": _rewards(options.get("grader")), "num_generations": completions}
    if "n_epochs" in values:
        config["epochs"] = values["n_epochs"]
    if "batch_size" in values:
        config |= micro_batches(int(values["batch_size"]) * completions)
    if "learning_rate_multiplier" in values:
        config["learning_rate"] = learning_rate(values["learning_rate_multiplier"], trained_by, 16)
    if "beta" in values and method == "dpo":
        config["dpo"] = {"beta": values["beta"]}
    if job.get("validation_file"):
        config["eval_steps"] = values.get("eval_interval", "epoch")
    if isinstance(job.get("seed"), int):
        config["seed"] = job["seed"]
    return config


def _rewards(grader: Any) -> list[dict[str, Any]]:
    """Return the rewards of a grader; raise `ValueError` with the reason if it has no counterpart."""
    from pydantic import TypeAdapter, ValidationError

    from anneal.contracts.schemas.openai.graders import JUDGE_URL, Grader, to_rewards

    try:
        rewards, errors = to_rewards(TypeAdapter(Grader).validate_python(grader), JUDGE_URL, "grader")
    except ValidationError as error:
        problem = error.errors()[0]
        raise ValueError(
            f"its grader cannot be read ({'.'.join(map(str, problem['loc']))}: {problem['msg']})"
        ) from None
    if errors:
        raise ValueError(f"`{errors[0].field}` {errors[0].message}")
    return rewards
