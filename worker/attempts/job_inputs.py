"""Data and models that the job of a run names: located on this worker, and fetched from the object store first."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

from sqlalchemy import Connection, Executable, and_, select

from anneal.contracts.attempt.job import EXPORT, MERGED_BASE, DataSource, ModelSource, TrainedWeights
from anneal.contracts.methods import models_of
from anneal.contracts.run_task import RunTask
from app.base_models import resolver
from app.base_models.model_folder import ModelFolder
from app.infra.files.object_store import StoreUnavailable, WrongStore
from app.tables.datasets import Dataset
from app.tables.runs import Attempt, Run
from worker.attempts.job_error import JobError, storage_unavailable
from worker.checkpoint_store.remote_store import CorruptInStore, MissingInStore
from worker.checkpoint_store.restore import RestoreControl
from worker.checkpoint_store.working_copy import WorkingCopy
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext


class DatasetFields(TypedDict):
    """Fields of a job that name the datasets of its run."""

    dataset: DataSource | None
    eval_dataset: DataSource | None
    extra_eval_datasets: dict[str, DataSource]


class ModelFields(TypedDict):
    """Fields of a job that name the models of its run."""

    base_model: ModelSource
    tokenizer: ModelSource | None
    reward_models: list[ModelSource]
    teacher: ModelSource | None


class JobInputs:
    """Inputs of one attempt on this worker; a run on several hosts has the same on each of them.

    Every method that fetches raises `JobError` if something cannot be had, `TransferCancelled` if the run is to end,
    and OSError if the storage of this worker cannot be read or written.
    """

    def __init__(self, context: WorkerContext, run: ClaimedRun, control: RestoreControl) -> None:
        self.run = run
        self._context, self._control = context, control
        self._copy = context.working_copy
        self.folder = context.storage.attempt_dir(run.id, run.attempt)
        """Folder of the attempt."""

    def check_store(self, copy: WorkingCopy) -> None:
        """Raise `JobError` unless the object store could take what the attempt will write."""
        try:
            copy.check_store()
        except StoreUnavailable as error:
            # An attempt would train its last steps again, only to wait for the storage once more.
            reason = f"the storage {self._context.settings.storage_url} cannot be used now ({error})"
            is_refused = error.is_refused or isinstance(error, WrongStore)
            raise storage_unavailable(self._context.engine, self.run, reason, is_refused=is_refused) from error

    def fetch_datasets(
        self, train_id: str | None, eval_id: str | None, extra_eval_ids: Mapping[str, str]
    ) -> DatasetFields:
        """Fetch the datasets with these ids; return the fields of the job that name them."""
        return {
            "dataset": self._fetch_dataset(train_id) if train_id else None,
            "eval_dataset": self._fetch_dataset(eval_id) if eval_id else None,
            "extra_eval_datasets": {name: self._fetch_dataset(id) for name, id in sorted(extra_eval_ids.items())},
        }

    def fetch_models(self) -> ModelFields:
        """Fetch the models of the run, if they are outputs; return the fields of the job that name them.

        The reward models are those of the rewards of type `model`, in the order of these rewards. The tokenizer is
        that of another model; None if the run uses that of its base model.
        """
        run = self.run
        of_options = [] if run.task == RunTask.export else list(models_of(run.config))
        rewards, teachers = ([name for _, name, it in of_options if it == role] for role in ("reward", "teacher"))
        if self._copy is not None and run.backend != "fake":
            for name in (run.config["base_model"], *rewards, *teachers):
                self.fetch_output(name)
        tokenizer = None
        if (other := run.config.get("tokenizer")) is not None and run.backend != "fake":
            settings, storage = self._context.settings, self._context.storage
            tokenizer = _resolve_model_source(lambda: resolver.locate_tokenizer(settings, storage, other))
        with self._context.engine.connect() as connection:
            return {
                "base_model": self._locate_model(connection, run.config["base_model"], run.config.get("revision")),
                "tokenizer": tokenizer,
                "reward_models": [self._locate_model(connection, name) for name in rewards],
                "teacher": self._locate_model(connection, teachers[0]) if teachers else None,
            }

    def fetch_output(self, name: str) -> None:
        """Fetch the output that a model names, and that of its base, from the object store, if there is one."""
        while self._copy is not None and resolver.is_run(name):
            written_by = and_(Attempt.run_id == Run.id, Attempt.attempt == Run.output_attempt)
            query = select(Run.output_attempt, Run.base_model, Attempt.output_sha256).join(Attempt, written_by)
            producer = next(iter(self._fetch_rows(query.where(Run.id == name))), None)
            if producer is None or producer.output_sha256 is None:
                return  # the search for the model says what is missing
            with self._store_errors(f"the output of run {name}", "model_not_found", "resume that run"):
                output = self._copy.fetch_output(
                    self.run.id,
                    (name, producer.output_attempt),
                    producer.output_sha256,
                    self._context.id,
                    self._control.raise_if_ended,
                )
            described = ModelFolder(self._context.storage, output).read_json("adapter_config.json")
            if described.get("base_model_name_or_path", MERGED_BASE) == MERGED_BASE:
                return
            name = producer.base_model

    def fetch_adapter(self, run_id: str) -> Path:
        """Fetch the output of a run, which is an adapter, and return its folder.

        Raises:
            JobError: It does not exist any more, or is not reachable now.
        """
        self.fetch_output(run_id)
        rows = self._fetch_rows(select(Run.output_attempt).where(Run.id == run_id, Run.output_attempt.is_not(None)))
        place = self._context.storage.output_dir(run_id, rows[0].output_attempt) if rows else None
        if place is None or not place.is_dir():
            message = (
                f"The output of run {run_id} is not in the storage of this worker: resume the run to create it again."
            )
            raise JobError("model_not_found", message)
        return place

    def fetch_trained_output(self) -> TrainedWeights | None:
        """Fetch the output of the run whose weights this one uses; None if that is the base model itself.

        Raises:
            JobError: It does not exist any more, or is not reachable now.
        """
        run_id = self.run.base_run_id
        if run_id is None or run_id == self.run.config["base_model"]:
            return None
        self.fetch_output(run_id)
        query = select(Run.output_attempt, Run.current_step, Run.current_epoch).where(Run.id == run_id)
        trained = self._fetch_rows(query)[0]
        storage = self._context.storage
        place = storage.output_dir(run_id, trained.output_attempt)
        if not place.is_dir():
            message = f"the output of run {run_id} is not in this worker's storage ({storage.root}); use one "
            raise JobError("model_not_found", message + "of its checkpoints, or resume the run to create it again")
        last, step = trained.current_step, ModelFolder(storage, place).read_json(EXPORT).get("step")
        if not isinstance(step, int) or not 0 < step < last:
            step = last
        epoch = trained.current_epoch if step == last else trained.current_epoch * step / last
        return TrainedWeights(path=place, step=step, epoch=epoch)

    def _fetch_dataset(self, dataset_id: str) -> DataSource:
        """Return a dataset, fetched from the object store if there is one."""
        (row,) = self._fetch_rows(select(Dataset.__table__).where(Dataset.id == dataset_id))
        path = self._context.storage.dataset_file(row.id, row.extension)
        if self._copy is not None:
            with self._store_errors(f"the file of dataset {row.id}", "bad_data", "upload it again"):
                self._copy.fetch_dataset(self.run.id, path, row.bytes, row.sha256, self._control.raise_if_ended)
        if not path.is_file():
            raise JobError(
                "bad_data",
                f"the file of dataset {row.id} is not in this worker's storage ({self._context.storage.root}): "
                "set the same ANNEAL_STORAGE for API and workers",
                is_transient=True,
            )
        return DataSource(id=row.id, path=path, format=row.format, rows=row.rows, sha256=row.sha256)

    @contextmanager
    def _store_errors(self, what: str, code: str, advice: str) -> Iterator[None]:
        """Convert errors of a fetch to `JobError`."""
        try:
            yield
        except StoreUnavailable as error:
            reason = f"{what} cannot be fetched now ({error})"
            raise storage_unavailable(self._context.engine, self.run, reason, is_refused=error.is_refused) from error
        except (MissingInStore, CorruptInStore) as error:
            # This worker may have another ANNEAL_STORAGE than the API, so that others may find it.
            how = "is not in" if isinstance(error, MissingInStore) else f"is not what was stored ({error}) in"
            message = f"{what} {how} the storage of this worker ({self._context.settings.storage_url}): set the same "
            message += f"ANNEAL_STORAGE for API and workers; if it is the same, {advice}"
            raise JobError(code, message, is_transient=True) from error

    def _locate_model(
        self, connection: Connection, name: str, revision: str | None = None, *, follow: bool = True
    ) -> ModelSource:
        """Locate a model by its name; with `follow`, also the base of an adapter."""
        if self.run.backend == "fake":
            return ModelSource(name=name, path=None, hub=name if resolver.is_hub_name(name) else None, revision=None)
        context = self._context
        output_attempt, trained_on = None, None
        if resolver.is_run(name):
            query = select(Run.output_attempt, Run.base_model).where(Run.id == name)
            output_attempt, trained_on = connection.execute(query).one_or_none() or (None, None)
        model = _resolve_model_source(
            lambda: resolver.locate_model(context.settings, context.storage, name, output_attempt, revision)
        )
        base = self._base_of_adapter(connection, model.path, trained_on) if model.path and follow else None
        return model.model_copy(update={"base": base})

    def _base_of_adapter(self, connection: Connection, adapter: Path, trained_on: str | None) -> ModelSource | None:
        """Locate the base of an adapter; None for a whole model, or if the base is on the hub or an absolute path.

        `trained_on` is `base_model` of the run whose output it is: the adapter names its base without a folder of this
        server, and several models roots may have one of that name. A downloaded output is named by its folder, not by
        its run. A base that is an adapter itself is part of the output, merged.
        """
        folder = ModelFolder(self._context.storage, adapter)
        described = folder.read_json("adapter_config.json")
        name, revision = described.get("base_model_name_or_path"), described.get("revision")
        if not isinstance(name, str):
            return None
        if trained_on is None and not resolver.is_run(name):
            path = resolver.base_folder(self._context.settings, self._context.storage, folder, name)
            return None if path is None else ModelSource(name=name, path=path, hub=None, revision=None)
        if name == MERGED_BASE:
            return ModelSource(name=name, path=adapter / MERGED_BASE, hub=None, revision=None)
        pinned = revision if isinstance(revision, str) else None
        return self._locate_model(connection, trained_on or name, pinned, follow=False)

    def _fetch_rows(self, statement: Executable) -> Sequence[Any]:
        with self._context.engine.connect() as connection:
            return connection.execute(statement).all()


def _resolve_model_source(locate: Callable[[], resolver.ModelLocation]) -> ModelSource:
    try:
        return ModelSource.model_validate(locate())
    except resolver.BaseModelError as error:
        code = "config_error" if error.code == "model_not_allowed" else "model_not_found"
        raise JobError(code, error.message) from error
