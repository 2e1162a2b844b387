"""Checkpoint engine plugins: a thread passes them checkpoints, and only the end of training waits for it, briefly.

They are separate from `worker/checkpoint_store`, which sends checkpoints to the object store of `ANNEAL_STORAGE`, on
purpose. The supervisor does that, because it records them, and therefore holds the credentials of the database. A
run's configuration names a checkpoint engine, and code that it names must never run in the supervisor. So engines run
here, in the trainer process.
"""

import threading
import time
from pathlib import Path
from typing import Protocol

from anneal.contracts.plugins import Plugin
from app.infra.files.tree import remove_tree
from worker.training.context import TrainingContext
from worker.training.failures import TrainingFailure
from worker.training.plugins import registry

_END_SECONDS = 120.0
_STOP_SECONDS = 20.0
"""Short, since a stopping trainer is killed after its grace period; the engine keeps what it has by then."""
_POLL_SECONDS = 0.2


class EngineCopier:
    """Passes complete checkpoints to the engine, the newest first: if it is slow, the older ones matter less.

    An upload does not report its progress, so the thread sends no heartbeat, and a wait for it is limited.
    """

    def __init__(self, run: TrainingContext) -> None:
        self._run = run
        self._changed = threading.Condition()
        self._waiting: list[Path] = []
        self._current: Path | None = None
        self._thread: threading.Thread | None = None
        self._failure: TrainingFailure | None = None

    def queue_copy(self, folder: Path) -> None:
        """Queue a copy of the checkpoint in `folder`, if an engine is configured; does not wait."""
        if self._run.config.trainer_options.checkpoint_engine is None:
            return
        with self._changed:
            self._waiting.append(folder)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._copy_waiting, name="checkpoint engine", daemon=True)
                self._thread.start()

    def raise_failure(self) -> None:
        """Raise the failure that makes the engine unusable, if there is one by now.

        Raises:
            TrainingFailure: `config_error`.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait_for_copies(self) -> None:
        """Wait for the copies at the end of training, for a limited time; report those that are not finished then."""
        began = time.monotonic()
        with self._changed:
            while self._waiting or self._current:
                seconds = _END_SECONDS if self._run.stop_requested is None else _STOP_SECONDS
                if time.monotonic() - began >= seconds:
                    break
                self._changed.wait(_POLL_SECONDS)
            left = sorted({*self._waiting, *([self._current] if self._current else [])})
            self._waiting.clear()
        if left:
            names = ", ".join(path.name for path in left)
            line = (
                f"The checkpoint engine did not finish within {seconds:.0f} s of the end: it may have no copy of "
                f"{names}. The checkpoints in the run's own folder are complete."
            )
            self._run.report.message(line, "warning")

    def _copy_waiting(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                folder = self._current = self._waiting.pop()
            try:
                if folder.is_dir():  # or it was cleaned up before its turn came
                    store_replica(self._run, folder)
            except TrainingFailure as failure:
                self._failure = failure
            finally:
                with self._changed:
                    self._current = None
                    self._changed.notify_all()


class CheckpointEngine(Protocol):
    """Storage for checkpoint replicas, created by `anneal.checkpoint_engines` from their parameters."""

    def save(self, folder: Path, name: str) -> None:
        """Store a replica of a complete checkpoint; `name` is `<run>/a<attempt>/checkpoint-<step>`."""

    def fetch(self, name: str, folder: Path) -> bool:
        """Copy the replica into an empty folder; return False if there is none."""


def store_replica(run: TrainingContext, folder: Path) -> None:
    """Store a replica of a checkpoint on disk with an installed checkpoint engine; an error loses only the replica.

    Raises:
        TrainingFailure: `config_error`: the plugin is not a checkpoint engine.
    """
    plugin = run.config.trainer_options.checkpoint_engine
    if plugin is None:
        return
    engine = _create_engine(plugin)
    try:
        engine.save(folder, _replica_name(folder))
    except Exception as error:
        failure = registry.plugin_error("checkpoint_engine", plugin.type, f"could not keep {folder.name}: {error!r}")
        run.report.message(f"{failure} The checkpoint in the run's own folder is complete.", level="warning")


def restore_replica(run: TrainingContext) -> None:
    """Restore a checkpoint that is missing from its folder into this attempt's folder; its hashes are checked next."""
    plugin, resume = run.config.trainer_options.checkpoint_engine, run.resume_from
    if plugin is None or resume is None or resume.path.exists():
        return
    place = resume.path
    target = run.folder / f".{place.name}.fetched"
    remove_tree(target, ignore_errors=True)
    target.mkdir(parents=True)
    try:
        was_fetched = _create_engine(plugin).fetch(_replica_name(place), target)
    except Exception as error:
        raise registry.plugin_error(
            "checkpoint_engine", plugin.type, f"could not fetch {place.name}: {error!r}"
        ) from error
    if not isinstance(was_fetched, bool):
        raise registry.plugin_error(
            "checkpoint_engine", plugin.type, f"returned {was_fetched!r} from `fetch`, not True or False"
        )
    if was_fetched:
        run.report.message(
            f"{place.name} was missing from its folder and was restored from the replica of `{plugin.type}`.",
            level="warning",
        )
        run.job = run.job.model_copy(update={"resume_from": resume.model_copy(update={"path": target})})


def _create_engine(plugin: Plugin) -> CheckpointEngine:
    engine = registry.call_plugin("checkpoint_engine", plugin.type, **plugin.parameters)
    missing_methods = [method for method in ("save", "fetch") if not callable(getattr(engine, method, None))]
    if missing_methods:
        what = f"returned a {type(engine).__name__}, which has no method {' and no '.join(missing_methods)}"
        raise registry.plugin_error("checkpoint_engine", plugin.type, what)
    return engine  # type: ignore[no-any-return]


def _replica_name(folder: Path) -> str:
    return "/".join(folder.parts[-3:])
