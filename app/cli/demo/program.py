"""`anneal demo`, and an example of the client: from a service and a dataset to an adapter that loads anywhere."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from anneal.client.client import Anneal
from anneal.client.errors import AnnealError
from anneal.contracts.events import EvalEvent, MetricEvent
from anneal.contracts.schemas.runs.reads import RunRead
from anneal.local_service import is_held, read_json
from app.base_models import tiny_model
from app.cli.console import print_text
from app.cli.demo.docstrings import Documented, Split, encode_jsonl, read_split
from app.cli.runs.watch import show_events
from app.config import Settings, get_settings
from app.infra import home_lock
from app.infra.errors import SetupError
from app.infra.private_files import make_private_folder
from app.infra.process.children import last_lines, start_child, stop_child

SMALL_MODEL = "stdlib-llama"
FROM_SCRATCH = {
    "base_model": SMALL_MODEL, "method": "full", "optim": "adamw_torch", "learning_rate": 4e-3, "max_steps": 300,
    "batch_size": 4, "gradient_accumulation_steps": 1, "packing": True, "max_seq_length": 256, "eval_steps": 100,
    "extra": {"eval_batch_size": 8},
}  # fmt: skip
"""Has a visible effect in minutes on two cores; the loss covers every token."""
SMALL_ADAPTER: dict[str, Any] = {
    "method": "qlora", "loss_on": "assistant", "learning_rate": 5e-3, "max_steps": 120, "batch_size": 12,
    "gradient_accumulation_steps": 1, "max_seq_length": 256, "eval_steps": 40, "extra": {"eval_batch_size": 8},
}  # fmt: skip
HUB_ADAPTER: dict[str, Any] = {
    "method": "qlora", "loss_on": "completion", "learning_rate": 2e-4, "max_steps": 60, "batch_size": 4,
    "gradient_accumulation_steps": 2, "max_seq_length": 512, "eval_steps": 20, "logging_steps": 2,
}  # fmt: skip
LOADING = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base = AutoModelForCausalLM.from_pretrained({base!r})
model = PeftModel.from_pretrained(base, {adapter!r})
tokenizer = AutoTokenizer.from_pretrained({adapter!r})
"""
_SECONDS_TO_START, _SECONDS_TO_STOP, _SECONDS_UNREACHABLE = 90.0, 60.0, 60.0


class DemoError(Exception):
    """A step of the demo failed; the text says which, and where to look."""


def main(hub_model: str | None, keep: bool) -> int:
    """Run the demo with a model of the Hub or with one made here; return 0 if every step succeeded."""
    home = get_settings().home / "demo"
    # Shares no servers, storage, models or port with the user's own service, whose workers would not have its files.
    settings = Settings(
        home=home, storage=home / "storage", models_root=home / "models", database_url=None, redis_url=None,
        host="127.0.0.1", port=0,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as after Ctrl-C
    try:
        if find_spec("torch") is None:
            raise DemoError("The libraries for training are missing on this machine: `make demo` installs them.")
        with run_service(settings, keep) as client:
            fine_tune(client, settings, hub_model)
    except (DemoError, AnnealError, SetupError) as error:
        hint = " Without MODEL, the demo makes its own model and needs no network." if hub_model else ""
        typer.secho(f"\nThe demo failed: {error}{hint}\nLogs: {home / 'logs'}", fg="red", err=True)
        return 1
    except KeyboardInterrupt:
        print_text("\nInterrupted; the run was stopped.")
        return 130
    return 0


def fine_tune(client: Anneal, settings: Settings, hub_model: str | None) -> None:
    """Do all acts, from the data to the adapter; raises `DemoError` if one had another result than expected."""
    began = time.monotonic()
    typer.secho("\n1. Build a dataset from this machine's Python library", bold=True)
    with print_step("Reading the docstrings of the library:") as notes:
        rows = read_split()
        if hub_model is not None:  # a trained model needs few rows
            rows = Split(evenly_spaced(rows.training, 2000), evenly_spaced(rows.held_out, 64))
        notes.append(f"{len(rows.training):,} chats to train on, {len(rows.held_out)} held out")

    if hub_model is None:
        typer.secho("\n2. Train a small model on Python code from scratch (method full)", bold=True)
        trained = train_small_model(client, settings, rows)
        model, base = trained.id, str(trained.fine_tuned_model)  # a run is named as a model by its id
        config, measured = SMALL_ADAPTER, ["loss_on", "extra"]  # the other fields are those of the run
    else:
        model = base = hub_model
        config, measured = HUB_ADAPTER, ["loss_on", "method", "max_seq_length"]

    typer.secho("\n3. Fine-tune an adapter that writes docstrings (method qlora), stop it and resume it", bold=True)
    chats = upload_rows(client, rows, "chat")
    evaluation = {"model": model, "dataset_id": chats["eval_dataset_id"], "config": {it: config[it] for it in measured}}
    before = follow_run(client, client.runs.evaluate(evaluation, wait=False)).held_out[-1]
    print_text(f"  Held-out loss without an adapter: {before:.3f}")
    samples = evenly_spaced([row for row in rows.held_out if row.name[0] != "_" and len(row.docstring) < 70], 3)
    answers_before = ask(client, model, samples)
    request = {"name": "docstrings", "config": {"base_model": model, **config}, **chats}
    tuned = tune_in_two_parts(client, request, config["max_steps"])
    after = tuned.held_out[-1]

    typer.secho("\n4. Ask the model again, with the adapter", bold=True)
    print_answers(samples, answers_before, ask(client, tuned.run.id, samples))
    if hub_model is None:
        print_text("\n  So small a model answers with an English sentence instead of code, not yet with a correct one.")
    adapter = str(tuned.run.fine_tuned_model)
    print_text(
        f"\n  Loss on the {len(rows.held_out)} held-out docstrings: {before:.3f} before, {after:.3f} after "
        f"({(after - before) / before:+.0%}).\n  Adapter: {adapter}\n  Load it with peft:\n"
    )
    print_text("".join(f"    {line}\n" for line in LOADING.format(base=base, adapter=adapter).splitlines()))
    if after >= before:
        raise DemoError("the held-out loss did not decrease. This is a bug; please report it with the logs.")
    print_text(f"  Total time: {time.monotonic() - began:.0f} s.")


def train_small_model(client: Anneal, settings: Settings, rows: Split) -> RunRead:
    """Make a model with random weights on this machine, as `anneal models create` does, and train it on code."""
    with print_step(f"Making the model {SMALL_MODEL} with random weights"), suppress(FileExistsError):
        tiny_model.create_tiny_model(settings.models_folder, SMALL_MODEL)
    texts = upload_rows(client, rows, "text")
    trained = follow_run(client, client.runs.create({"name": "from scratch", "config": FROM_SCRATCH, **texts}))
    first, last = trained.held_out[0], trained.held_out[-1]
    if last >= first:
        raise DemoError(f"run {trained.run.id} did not learn: its held-out loss went from {first} to {last}.")
    print_text(f"  Held-out loss: {first:.3f} at the first evaluation, {last:.3f} at the last")
    return trained.run


def tune_in_two_parts(client: Anneal, request: dict[str, Any], last_step: int) -> "Followed":
    """Create a run, stop it at half of its steps, which saves a checkpoint, and resume it from there."""
    stopped = follow_run(client, client.runs.create(request), stop_at=last_step // 2).run
    print_text(f"  Stopped with a checkpoint at step {stopped.current_step} (POST …/stop)")
    resumed = follow_run(client, client.runs.resume(stopped.id))
    if resumed.steps[0] <= stopped.current_step or resumed.steps[-1] != last_step:
        steps = f"steps {resumed.steps[0]} to {resumed.steps[-1]}, and {stopped.id} ended at {stopped.current_step}"
        raise DemoError(f"run {resumed.run.id} did {steps}; expected the next one to {last_step}.")
    print_text(f"  Resumed, steps {stopped.current_step + 1} to {last_step} (POST …/resume)")
    return resumed


def upload_rows(client: Anneal, rows: Split, data_format: str) -> dict[str, str]:
    """Upload the training rows and the held-out rows; return the fields of a run that name these datasets."""
    with print_step(f"POST /v1/datasets, {data_format}:") as notes:
        for name, part in zip(("docstrings", "docstrings-held-out"), rows, strict=True):
            file = encode_jsonl(getattr(row, data_format) for row in part)
            notes.append(client.datasets.upload(file, name=f"{name}-{data_format}", format=data_format).id)
    return {"dataset_id": notes[0], "eval_dataset_id": notes[1]}


@dataclass
class Followed:
    """Run that has ended, and what its events said."""

    run: RunRead
    steps: list[int] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)


def follow_run(client: Anneal, run: RunRead, stop_at: int | None = None) -> Followed:
    """Show a run until it has ended; request it to stop at step `stop_at`. Ctrl-C discards the run."""
    followed = Followed(run)
    expected = "completed" if stop_at is None else "cancelled"
    try:
        for event in show_events(client, run, _SECONDS_UNREACHABLE):
            if isinstance(event, MetricEvent):
                followed.steps.append(event.step)
                if stop_at is not None and event.step >= stop_at:
                    client.runs.stop(run.id)
                    stop_at = None
            elif isinstance(event, EvalEvent) and isinstance(loss := event.metrics.get("eval_loss"), int | float):
                followed.held_out.append(loss)
    except KeyboardInterrupt:
        with suppress(AnnealError):  # the service has ended, and the run with it
            client.runs.stop(run.id, mode="discard")
        raise
    followed.run = run = client.runs.get(run.id)
    if run.status != expected:
        cause = f" ({run.error_code}: {run.error_message})" if run.error_code else ""
        raise DemoError(f"run {run.id} ended as {run.status}, expected {expected}{cause}.")
    if expected == "completed" and not followed.held_out:
        raise DemoError(f"run {run.id} is completed, but reported no loss on the held-out rows.")
    return followed


def ask(client: Anneal, model: str, rows: list[Documented]) -> list[str]:
    """Return what a model answers to the prompts of some rows, through the service."""
    with print_step(f"POST /openai/v1/chat/completions, model {model}:") as notes:
        chats = [client.chat(model, row.prompt, temperature=0, max_tokens=40) for row in rows]
        notes.append(f"{len(chats)} answers")
    return [" ".join(chat.text.split())[:160] for chat in chats]


def print_answers(rows: list[Documented], answers_before: list[str], answers_after: list[str]) -> None:
    """Print each docstring beside the answers without and with the adapter."""
    for row, before, after in zip(rows, answers_before, answers_after, strict=True):
        print_text(f"\n  {row.name}\n    Python   {row.docstring}\n    before   {before}\n    after    {after}")


@contextmanager
def run_service(settings: Settings, keep: bool) -> Iterator[Anneal]:
    """Connect to an `anneal up` in the home of `settings`, started here unless one runs; stop it unless it is kept."""
    log, child = make_private_folder(settings.home / "logs") / "up.log", None
    if not is_held(settings.home):  # not left running by `--keep`
        child = start_child(
            [sys.executable, "-P", "-m", "app.cli.main", "up"], log=log, death_signal=None if keep else signal.SIGTERM,
            environment=settings.child_environment() | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    try:
        with print_step(
            "Starting PostgreSQL, Valkey, API and worker:" if child else "Using the running service:"
        ) as notes:
            client = connect_client(settings, child, log)
            notes.append(f"ready at {client.url}")
        with client:
            yield client
    finally:
        if child is not None and not keep:
            stop_child(child, _SECONDS_TO_STOP)
        elif is_held(settings.home):
            print_text(
                f"\n  The service is still running; its URL and key are in {settings.connection_file}.\n"
                f"  To stop it: ANNEAL_HOME={settings.home} anneal down"
            )


def connect_client(settings: Settings, child: "subprocess.Popen[bytes] | None", log: Path) -> Anneal:
    """Wait until API and worker are ready, and return a client."""
    deadline = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < deadline and (child is None or child.poll() is None):
        local = read_json(settings.connection_file) or {}
        pids = local.get("pids") or {}
        # The file of a service that was killed names another process, and its key must not be sent anywhere.
        if local.get("api_key") and pids.get("up") == home_lock.holder_pid(settings.home):
            client = Anneal(local["url"], local["api_key"], patience=_SECONDS_UNREACHABLE)
            client.service.ready()
            # A worker that was killed counts as online for a while.
            if any(worker.state == "online" and worker.pid == pids.get("worker") for worker in client.workers.list()):
                return client
            client.close()
        time.sleep(0.1)
    raise DemoError(f"The service did not start ({last_lines(log, 1) or 'no output'}); see {log}.")


@contextmanager
def print_step(text: str) -> Iterator[list[str]]:
    """Print what begins, and when it is done the items of the yielded list and the duration."""
    notes: list[str] = []
    began = time.monotonic()
    typer.echo(f"  {text} ", nl=False)
    yield notes
    print_text(" ".join([*notes, f"({time.monotonic() - began:.1f} s)"]))


def evenly_spaced(rows: list[Documented], most: int) -> list[Documented]:
    """Return at most `most` rows, evenly spaced."""
    return rows[:: max(1, len(rows) // most)][:most]
