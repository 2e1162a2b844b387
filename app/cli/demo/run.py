"""`anneal demo`: the calls of a typical user of the service, in order."""

import platform
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal

from app.cli.demo import base_model, completion, data, plan
from app.cli.demo.errors import DemoError
from app.cli.demo.plan import Plan
from app.cli.demo.service import Connection, Service, demo_settings, service
from app.cli.demo.terminal import Bar, Terminal
from app.client.client import Anneal
from app.client.errors import AnnealError
from app.config import Settings, get_settings
from app.contracts.events import (
    ConfigEvent,
    EndEvent,
    ErrorEvent,
    EvalEvent,
    Event,
    LogEvent,
    MetricEvent,
    ProgressEvent,
)
from app.infra.errors import SetupError

_SMALL_MODEL = "stdlib-llama"
_SAMPLES = 3
_PATIENCE = 60.0
"""Seconds during which the service may be unreachable."""


@dataclass
class Followed:
    """Values collected from the events of a run."""

    id: str
    status: str = ""
    error: str = ""
    step: int = 0
    first_step: int = 0
    total: int | None = None
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)


def main(model: str | None, keep: bool) -> int:
    """Run the demo with a model of the Hub or with one trained here; return 0 if every step succeeded.

    The service is an `anneal up` in `ANNEAL_HOME/demo` with its own servers, port and storage. A service left running
    by an earlier `--keep` is reused; otherwise the service stops with the demo, and its files are kept.
    """
    terminal = Terminal()
    if find_spec("torch") is None:
        terminal.fail("The libraries for training on this machine are missing: use `make demo`, which installs them.")
        return 1
    settings = demo_settings(get_settings())
    demo = Demo(terminal, settings)
    try:
        with _sigterm_as_interrupt(), service(settings, keep, demo.leave) as one:
            try:
                demo.announce(one, model)
            finally:
                if keep or not one.is_ours:
                    demo.report_running_service()
    except (DemoError, AnnealError, SetupError) as error:
        hint = " Without MODEL, the demo trains its own model and needs no network." if model else ""
        terminal.fail(f"{error}{hint}\nLogs: {settings.home / 'logs'}")
        return 1
    except KeyboardInterrupt:
        terminal.say("\nInterrupted; the run was stopped.")
        return 130
    return 0


class Demo:
    """Steps of the demo, and the cleanup if it ends early."""

    def __init__(self, terminal: Terminal, settings: Settings) -> None:
        self._terminal = terminal
        self._settings = settings
        self._client: Anneal | None = None
        self._connection: Connection | None = None
        self._live: str | None = None

    def announce(self, one: Service, model: str | None) -> None:
        """Run all steps, from the data to the adapter.

        Raises:
            DemoError: a step failed.
        """
        terminal = self._terminal
        plan_ = plan.hub() if model else plan.small()
        terminal.heading("Start a service and build a dataset from this machine's Python library")
        rows = self._build_data(plan_)
        if model is None:
            self._build_model(rows)
        client = self._connect(one)
        if model is None:
            terminal.heading("Train a small model on Python code from scratch (method full)")
            model = self._train_base(client, rows)
            base = self._output(client, model)
        else:
            base = model
        terminal.heading("Fine-tune an adapter that writes docstrings (method qlora), stop the run and resume it")
        datasets = self._upload(client, rows, "chat")
        before = self._measure(client, plan_, model, datasets)
        tuned = self._tune(client, plan_, model, datasets)
        after = tuned.held_out[-1]
        adapter = self._output(client, tuned.id)

        terminal.heading("Compare the model without and with the adapter")
        self._show_samples(plan_, rows, base, adapter)
        if plan_.remark:
            terminal.say(f"\n  {plan_.remark}")
        terminal.say(
            f"\n  Loss on the {len(rows.held_out)} held-out docstrings: {before:.3f} before, {after:.3f} after "
            f"({_percent(before, after)}).\n"
            f"  Adapter: {adapter}\n"
            "  Load it with peft:\n"
        )
        terminal.say(
            "".join(f"    {line}\n" for line in completion.LOADING.format(base=base, adapter=adapter).splitlines())
        )
        if after >= before:
            raise DemoError(
                "the loss on the held-out rows did not decrease. This is a bug; please report it with the logs."
            )
        terminal.say(f"  Total time: {terminal.seconds:.0f} s.")

    def leave(self) -> None:
        """Stop the live run, which would continue at the next start of the service, and close the client."""
        if self._client is None:
            return
        if self._live is not None:
            try:
                self._client.runs.stop(self._live, save_checkpoint=False)
            except AnnealError:
                pass  # the service has ended, and the run with it
        self._client.close()

    def report_running_service(self) -> None:
        """Print the URL of a service that is left running, and how to stop it."""
        if self._connection is not None:
            self._terminal.say(
                f"\n  The service is still running at {self._connection.url}. Its key and process ids are in "
                f"{self._settings.connection_file}.\n  To stop it: kill {self._connection.pids['up']}"
            )

    # Data and model

    def _build_data(self, plan_: Plan) -> data.Rows:
        with self._terminal.step(f"Reading the docstrings of the Python {platform.python_version()} library:") as notes:
            rows = data.build()
            rows = data.Rows(_evenly(rows.training, plan_.most_rows), _evenly(rows.held_out, plan_.most_held_out))
            notes.append(f"{len(rows.training):,} chats to train on, {len(rows.held_out)} held out")
        return rows

    def _build_model(self, rows: data.Rows) -> None:
        with self._terminal.step("Training a tokenizer:") as notes:
            texts = (text for row in rows.training for text in (data.SYSTEM, row.text["text"]))
            tokenizer = base_model.train_tokenizer(texts)
            base_model.write_model(self._settings.models_folder / _SMALL_MODEL, tokenizer)
            notes.append(f"{tokenizer.get_vocab_size():,} tokens")

    def _connect(self, one: Service) -> Anneal:
        what = (
            "Starting PostgreSQL, Valkey, API and worker in the background:"
            if one.is_ours
            else "Using the running service:"
        )
        with self._terminal.step(what) as notes:
            connection = self._connection = one.wait()
            notes.append(f"ready at {connection.url}")
        self._client = Anneal(connection.url, connection.key, patience=_PATIENCE)
        return self._client

    def _upload(self, client: Anneal, rows: data.Rows, format: Literal["chat", "text"]) -> dict[str, str]:
        """Upload both parts of the rows; return the fields of a run that reference them."""
        with self._terminal.step(f"POST /v1/datasets, {format}:") as notes:
            ids = []
            for name, part in (("docstrings", rows.training), ("docstrings-held-out", rows.held_out)):
                rows_of_part = data.jsonl(getattr(row, format) for row in part)
                dataset = client.datasets.upload(rows_of_part, name=f"{name}-{format}")
                if dataset.rows != len(part) or dataset.format != format:
                    raise DemoError(f"of {len(part)} rows, the service counted {dataset.rows} of {dataset.format}.")
                ids.append(dataset.id)
            notes.append(f"{ids[0]}, held out {ids[1]}")
        return {"dataset_id": ids[0], "eval_dataset_id": ids[1]}

    # Runs

    def _train_base(self, client: Anneal, rows: data.Rows) -> str:
        datasets = self._upload(client, rows, "text")
        run = client.runs.create({"name": "from scratch", "config": plan.from_scratch(_SMALL_MODEL), **datasets})
        found = self._follow(client, run.id, "from scratch")
        _expect(found, "completed")
        first, last = found.held_out[0], found.held_out[-1]
        self._terminal.say(
            f"  {found.id}: {found.step} steps in {found.seconds:.1f} s, loss {found.losses[0]:.3f} to "
            f"{found.losses[-1]:.3f}; held-out loss {first:.3f} at the first evaluation, {last:.3f} at the last"
        )
        if last >= first:
            raise DemoError(f"run {found.id} did not learn: its loss on the held-out rows went from {first} to {last}.")
        return found.id

    def _measure(self, client: Anneal, plan_: Plan, model: str, datasets: dict[str, str]) -> float:
        """Measure the loss of the base model on the held-out rows, quantized as for the adapter."""
        config = {"base_model": model, **plan_.baseline_options}
        run = client.runs.create({"name": "the base model, measured", "config": config, **datasets})
        found = self._follow(client, run.id, "base model")
        _expect(found, "completed")
        self._terminal.say(
            f"  {found.id}: held-out loss of the base model without an adapter: {found.held_out[-1]:.3f} "
            f"({found.seconds:.1f} s)"
        )
        return found.held_out[-1]

    def _tune(self, client: Anneal, plan_: Plan, model: str, datasets: dict[str, str]) -> Followed:
        steps = int(plan_.tuning["max_steps"])
        config = {"base_model": model, **plan_.tuning}
        run = client.runs.create({"name": "docstrings", "config": config, **datasets})
        stopped = self._follow(client, run.id, "adapter", stop_at=steps // 2)
        _expect(stopped, "cancelled")
        checkpoint = client.runs.get(stopped.id).checkpoint_path
        self._terminal.say(
            f"  {stopped.id}: stopped with a checkpoint at step {stopped.step} (POST …/stop, {stopped.seconds:.1f} s)"
        )
        if not checkpoint:
            raise DemoError(f"run {stopped.id} was stopped, but has no checkpoint.")
        resumed = self._follow(client, client.runs.resume(stopped.id).id, "adapter, resumed")
        _expect(resumed, "completed")
        if resumed.first_step <= stopped.step or resumed.step != steps:
            raise DemoError(
                f"run {resumed.id} went from step {resumed.first_step} to {resumed.step}; expected to start "
                f"where {stopped.id} had stopped (step {stopped.step}) and to end at {steps}."
            )
        self._terminal.say(
            f"  {resumed.id}: resumed, steps {stopped.step + 1} to {resumed.step} (POST …/resume, "
            f"{resumed.seconds:.1f} s)"
        )
        return resumed

    def _follow(self, client: Anneal, run_id: str, label: str, stop_at: int | None = None) -> Followed:
        """Follow a run to its end; request a stop when it reaches step `stop_at`."""
        self._live = run_id
        began = time.monotonic()
        found = Followed(run_id)
        asked = False
        with self._terminal.bar(label) as bar:
            for event in client.runs.events(run_id, patience=_PATIENCE):
                _take(found, event, bar)
                if stop_at is not None and found.step >= stop_at and not asked:
                    asked = True
                    client.runs.stop(run_id)
        self._live = None
        found.seconds = time.monotonic() - began
        return found

    # The result

    def _output(self, client: Anneal, run_id: str) -> str:
        folder = client.runs.get(run_id).fine_tuned_model
        if not folder:
            raise DemoError(f"run {run_id} is completed, but has no output.")
        return folder

    def _show_samples(self, plan_: Plan, rows: data.Rows, base: str, adapter: str) -> None:
        # Not the best ones: evenly spaced among the rows that are short enough to print.
        short = [row for row in rows.held_out if row.name[0] != "_" and len(row.docstring) < 70]
        chosen = _evenly(short, _SAMPLES)
        with self._terminal.step("Loading the adapter with peft and completing held-out code without and with it"):
            prompts = [row.prompt for row in chosen]
            answers = completion.complete(self._settings, base, adapter, prompts, plan_.offline)
        for row, answer in zip(chosen, answers, strict=True):
            self._terminal.say(
                f"\n  {row.name}\n    Python   {row.docstring}\n    before   {_short(answer.before)}\n"
                f"    after    {_short(answer.after)}"
            )


def _take(found: Followed, event: Event, bar: Bar) -> None:
    if isinstance(event, MetricEvent):
        found.step = event.step
        found.first_step = found.first_step or found.step
        if event.loss is not None:
            found.losses.append(event.loss)
        bar.step(found.step, found.total, event.loss)
    elif isinstance(event, EvalEvent):
        if isinstance(loss := event.metrics["eval_loss"], int | float):
            found.held_out.append(loss)
        bar.evaluated(found.held_out[-1])
    elif isinstance(event, ConfigEvent):
        found.total = event.total_steps
    elif isinstance(event, ProgressEvent):
        bar.phase(event.phase)
    elif isinstance(event, LogEvent) and event.stream == "anneal":
        bar.say(event.line)
    elif isinstance(event, ErrorEvent):
        found.error = f"{event.code}: {event.message}"
    elif isinstance(event, EndEvent):
        found.status = event.status


def _expect(found: Followed, status: str) -> None:
    if found.status != status:
        why = f" ({found.error})" if found.error else ""
        raise DemoError(f"run {found.id} ended as {found.status or 'unknown'}, expected {status}{why}.")
    if status == "completed" and not (found.losses and found.held_out):
        raise DemoError(f"run {found.id} is completed, but reported no loss on training or held-out rows.")


def _evenly(rows: list[data.Documented], most: int | None) -> list[data.Documented]:
    """Return at most `most` rows, evenly spaced."""
    return rows if most is None else rows[:: max(1, len(rows) // most)][:most]


def _percent(before: float, after: float) -> str:
    return f"{(after - before) / before:+.0%}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 160 else line[:159] + "…"


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that the cleanup runs."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
