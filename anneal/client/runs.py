"""Methods of `client.runs`."""

import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

from anneal.client.api_resource import ApiResource, request_body, without_none
from anneal.client.download import download_file, download_files
from anneal.client.event_stream import Follower
from anneal.client.notebook.curve_plot import CurvePlot
from anneal.client.notebook.metrics_frame import metrics_frame
from anneal.client.sync_async import M, call, stream
from anneal.contracts.events import AnyEvent, EvalEvent, MetricEvent, StatusEvent
from anneal.contracts.field_types import GgufType
from anneal.contracts.run_status import RunSort
from anneal.contracts.schemas.artifacts import Artifact, Artifacts
from anneal.contracts.schemas.checkpoints import CheckpointRead
from anneal.contracts.schemas.estimates import Estimated
from anneal.contracts.schemas.postmortem import PostMortem
from anneal.contracts.schemas.runs.bulk import MOST_RUNS, RunChange, RunChanges
from anneal.contracts.schemas.runs.comparison import RunComparison
from anneal.contracts.schemas.runs.curves import RunMetrics
from anneal.contracts.schemas.runs.reads import RunFull, RunRead, RunStopped, RunSummary
from anneal.contracts.schemas.runs.requests import EvaluationCreate, PredictionCreate, RunCheck, RunCreate
from anneal.contracts.stop import StopMode

log = logging.getLogger(__name__)

STREAM_PATIENCE = 600.0
"""Default number of seconds during which a stream tries to reconnect."""
_LARGEST_ID = 2**62
_MOST_PLOTTED = 4000
_SECONDS_BETWEEN_READS = 5.0
"""Time between two drawings of several runs."""


class Runs(ApiResource[M]):
    """Training runs."""

    @call
    async def create(self, run: RunCreate | Mapping[str, Any], *, idempotency_key: str | None = None) -> RunRead:
        """Create a run; retried if the response was lost, without creating a second one.

        `run` is the body of `POST /v1/runs`: `dataset_id`, `config` and optional fields.
        """
        return await self._session.post(RunRead, "/runs", request_body(run), key=idempotency_key or str(uuid.uuid4()))

    @call
    async def evaluate(
        self, evaluation: EvaluationCreate | Mapping[str, Any], *, wait: bool = True, idempotency_key: str | None = None
    ) -> RunRead:
        """Evaluate a base model, the output of a run or a checkpoint on a dataset, without training.

        `evaluation` is the body of `POST /v1/runs/evaluate`: `model`, `dataset_id` and optional fields. The call
        returns the run when it has ended, with the metrics in `evaluation`; with `wait=False` it returns at once.
        """
        key = idempotency_key or str(uuid.uuid4())
        run = await self._session.post(RunRead, "/runs/evaluate", request_body(evaluation), key=key)
        return await self._wait_for_end(run.id) if wait else run

    @call
    async def predict(
        self, prediction: PredictionCreate | Mapping[str, Any], *, wait: bool = True, idempotency_key: str | None = None
    ) -> RunRead:
        """Answer the rows of a dataset with a base model, the output of a run or a checkpoint.

        `prediction` is the body of `POST /v1/runs/predict`: `model`, `dataset_id` and optional fields. The call returns
        the run when it has ended, with the scores in `evaluation`; with `wait=False` it returns at once. `download`
        gets the answers.
        """
        key = idempotency_key or str(uuid.uuid4())
        run = await self._session.post(RunRead, "/runs/predict", request_body(prediction), key=key)
        return await self._wait_for_end(run.id) if wait else run

    @call
    async def wait(self, run_id: str) -> RunRead:
        """Wait until a run has ended, across lost connections, and return it; `status` says how it ended."""
        return await self._wait_for_end(run_id)

    async def _wait_for_end(self, run_id: str) -> RunRead:
        path = f"/runs/{run_id}"
        follower = Follower(self._session, f"{path}/events", {"types": "end"}, after=None, whole=False)
        async with aclosing(follower.follow_events(STREAM_PATIENCE)) as events:
            async for _ in events:
                pass
        return await self._session.get(RunRead, path)

    @call
    async def validate(self, run: RunCreate | Mapping[str, Any]) -> RunCheck:
        """Validate a run without creating it; return the errors and the resolved configuration."""
        return await self._session.post(RunCheck, "/runs/validate", request_body(run), repeatable=True)

    @call
    async def estimate(
        self, run: RunCreate | Mapping[str, Any], *, probe: bool = False, wait: bool = True
    ) -> Estimated:
        """Estimate memory, steps, tokens, time and cost of a run, and where it fits, without creating it.

        With `probe`, a worker also measures it with two steps on its longest rows. The call then returns when the
        probe has ended, with `measured` and `probe` in addition to the estimate; with `wait=False` it returns at once,
        with `probe_run_id`.
        """
        if not probe:
            return await self._session.post(Estimated, "/runs/estimate", request_body(run), repeatable=True)
        key, body = str(uuid.uuid4()), {**request_body(run), "probe": True}
        estimated = await self._session.post(Estimated, "/runs/estimate", body, key=key)
        if not wait:
            return estimated
        ended = await self._wait_for_end(estimated.probe_run_id or "")
        return estimated.model_copy(update={"measured": ended.measured, "probe": ended.probe})

    @stream
    async def list(
        self,
        *,
        experiment_id: str | None = None,
        status: str | Sequence[str] | None = None,
        tag: str | None = None,
        parent_run_id: str | None = None,
        base_model: str | None = None,
        method: str | None = None,
        task: str | None = None,
        dataset_id: str | None = None,
        find: str | None = None,
        search: str | None = None,
        sort: RunSort | None = None,
        order: Literal["asc", "desc"] | None = None,
        full: bool = False,
        limit: int | None = None,
        after: str | None = None,
    ) -> AsyncGenerator[RunSummary]:
        """Iterate over runs, newest first unless `sort` is given; pages are fetched on demand.

        `sort`: `live` has running runs first, `best` the best of each method; others are values, in the direction of
        `order`.

        `find` selects runs whose id starts with this text, or whose name is it; `search` also those whose name or a tag
        of which contains it. With `full`, each run is a `RunFull`, which also has the configuration.
        """
        filters = {
            "experiment_id": experiment_id, "status": status, "tag": tag, "parent_run_id": parent_run_id,
            "base_model": base_model, "method": method, "task": task, "dataset_id": dataset_id,
            "find": find, "search": search,
            "sort": sort, "order": order, "view": "full" if full else None,
        }  # fmt: skip
        model = RunFull if full else RunSummary
        async with aclosing(self._iterate_items("/runs", model, filters, limit, after)) as items:
            async for item in items:
                yield item

    @call
    async def get(self, run_id: str) -> RunRead:
        """Return a run with its latest metrics."""
        return await self._session.get(RunRead, f"/runs/{run_id}")

    @call
    async def postmortem(self, run_id: str) -> PostMortem:
        """Return the post-mortem of a run or of its last failed attempt: the cause and what to change."""
        return await self._session.get(PostMortem, f"/runs/{run_id}/postmortem")

    @call
    async def compare(self, run_ids: Sequence[str]) -> RunComparison:
        """Compare the configurations and the metrics of 2 to 20 runs."""
        return await self._session.get(RunComparison, "/runs/compare", ids=",".join(run_ids))

    @call
    async def update(
        self,
        run_id: str,
        *,
        name: str | None = None,
        tags: Sequence[str] | None = None,
        pinned: bool | None = None,
        priority: int | None = None,
    ) -> RunRead:
        """Change the name, tags or priority of a run, or pin it so that it is not deleted."""
        body = without_none(name=name, tags=tags, pinned=pinned, priority=priority)
        return await self._send_patch(RunRead, f"/runs/{run_id}", body)

    @call
    async def delete(self, run_id: str) -> None:
        """Delete an ended run with its events, checkpoints and output.

        A run of a fine-tuning job of several runs is refused: `delete_many` deletes them together.
        """
        await self._session.request("DELETE", f"/runs/{run_id}")

    @call
    async def stop(
        self,
        run_id: str,
        *,
        mode: StopMode | None = None,
        save_checkpoint: bool | None = None,
        deadline_seconds: float | None = None,
    ) -> RunStopped:
        """Request a run to stop; the run has stopped when its event stream ends.

        `stop` in the response says what to expect. Modes: `checkpoint` (save and end), `epoch_end` (train to the end
        of the epoch first), `best` (end at once, to resume from the best checkpoint) and `discard` (save nothing).
        `save_checkpoint=False` is the same as `discard`. After `deadline_seconds` the trainer is killed; the default is
        the grace period of the service.
        """
        body = without_none(mode=mode, save_checkpoint=save_checkpoint, deadline_seconds=deadline_seconds)
        return await self._session.post(RunStopped, f"/runs/{run_id}/stop", body, repeatable=True)

    @call
    async def stop_many(
        self, run_ids: Sequence[str], *, mode: StopMode | None = None, deadline_seconds: float | None = None
    ) -> RunChanges:
        """Request several runs to stop; the outcome of one that has ended meanwhile is `unchanged`.

        Mode and deadline are those of `stop`.
        """
        return await self._change_runs("stop", run_ids, without_none(mode=mode, deadline_seconds=deadline_seconds))

    @call
    async def delete_many(self, run_ids: Sequence[str]) -> RunChanges:
        """Delete several ended runs; one that is live, pinned or needed by another run is `refused`.

        So are the runs of a fine-tuning job of which one is not named: they are deleted together.
        """
        changes = await self._change_runs("delete", run_ids, {})
        # Runs of a job may have been in different requests.
        separated = [change.id for change in changes.runs if change.code == "run_is_of_job"]
        if not separated or len(set(run_ids)) <= MOST_RUNS:
            return changes
        again = {change.id: change for change in (await self._change_runs("delete", separated, {})).runs}
        return RunChanges(runs=[again.get(change.id, change) for change in changes.runs])

    @call
    async def tag_many(
        self, run_ids: Sequence[str], *, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> RunChanges:
        """Add tags to several runs, or remove some."""
        return await self._change_runs("tag", run_ids, {"add": [*add], "remove": [*remove]})

    async def _change_runs(self, verb: str, run_ids: Sequence[str], body: Mapping[str, Any]) -> RunChanges:
        """Change runs, as many with a request as the service allows; newest first, as the service changes them."""
        ids = sorted(set(run_ids), reverse=True)
        changes: dict[str, RunChange] = {}
        for first in range(0, len(ids), MOST_RUNS):
            part = {"ids": ids[first : first + MOST_RUNS], **body}
            changed = await self._session.post(RunChanges, f"/runs/{verb}", part, repeatable=True)
            changes |= {change.id: change for change in changed.runs}
        return RunChanges(runs=[changes[run_id] for run_id in dict.fromkeys(run_ids)])

    @call
    async def resume(
        self,
        run_id: str,
        *,
        checkpoint_id: str | None = None,
        checkpoint_path: str | None = None,
        from_start: bool = False,
        config: Mapping[str, Any] | None = None,
        stop_after_steps: int | None = None,
        resources: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> RunRead:
        """Create a run that resumes from a checkpoint of this one (default: the newest), with changes from `config`.

        The checkpoint is named by its id, or by its folder, which is `checkpoint_path` of a run.

        With `stop_after_steps` it ends after so many further steps. `resources` change those that this run asked for.
        """
        body = without_none(
            checkpoint_id=checkpoint_id,
            checkpoint_path=checkpoint_path,
            config=config,
            stop_after_steps=stop_after_steps,
            resources=resources,
        )
        body |= {"from": "start"} if from_start else {}
        key = idempotency_key or str(uuid.uuid4())
        return await self._session.post(RunRead, f"/runs/{run_id}/resume", body, key=key)

    @stream
    async def events(
        self,
        run_id: str,
        *,
        after: int = 0,
        types: str | Sequence[str] | None = None,
        follow: bool = True,
        patience: float = STREAM_PATIENCE,
    ) -> AsyncGenerator[AnyEvent]:
        """Iterate over the events of a run after `after` until it ends: each once and in order, across reconnects.

        After a lost connection, the stream continues after the last event; it fails after `patience` seconds without
        data. `types` selects event types; `end` is always included. With `follow=False`, yield the stored events only.
        """
        types_text = types if types is None or isinstance(types, str) else ",".join(types)
        params = without_none(after=after or None, types=types_text) | ({} if follow else {"follow": "false"})
        until = None if follow else (await self._session.get(RunRead, f"/runs/{run_id}")).last_seq
        follower = Follower(self._session, f"/runs/{run_id}/events", params, after=after, whole=types_text is None)
        async with aclosing(follower.follow_events(patience, until)) as events:
            async for event in events:
                yield event

    @stream
    async def all_events(
        self,
        *,
        after: int | None = None,
        types: str | Sequence[str] | None = None,
        follow: bool = True,
        patience: float = STREAM_PATIENCE,
    ) -> AsyncGenerator[AnyEvent]:
        """Iterate over the `status`, `progress` and `end` events of all runs, each once and in one order; never ends.

        Starts now, or after the `cursor` of an earlier event (0: with the oldest one). After a lost connection, the
        stream continues after the last event; it fails after `patience` seconds without data. `types` selects event
        types. With `follow=False`, yield the stored events after `after` only.
        """
        types_text = types if types is None or isinstance(types, str) else ",".join(types)
        params = without_none(after=after, types=types_text) | ({} if follow else {"follow": "false"})
        follower = Follower(self._session, "/events", params, after=after, ends=False)
        async with aclosing(follower.follow_events(patience, None if follow else _LARGEST_ID)) as events:
            async for event in events:
                yield event

    @stream
    async def complete_log(
        self, run_id: str, *, attempt: int | None = None, grep: str | None = None
    ) -> AsyncGenerator[str]:
        """Iterate over every line that the training processes printed so far, those too that the stream left out.

        Each line is its time, stream, level and text. `attempt` selects one of the attempts, which otherwise follow
        each other. `grep` selects lines that contain this text.
        """
        params = without_none(attempt=attempt, grep=grep)
        request = self._session.transport.build_request("GET", f"/runs/{run_id}/logs/complete", params=params)
        response = await self._session.send_repeatedly(request, repeatable=True)
        try:
            rest = b""
            async with aclosing(self._session.transport.iterate_chunks(response)) as chunks:
                async for chunk in chunks:
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield line.decode(errors="replace")
            if rest:
                yield rest.decode(errors="replace")
        finally:
            await self._session.transport.close_response(response)

    @stream
    async def logs(
        self,
        run_id: str,
        *,
        tail: int | None = None,
        grep: str | None = None,
        follow: bool = True,
        patience: float = STREAM_PATIENCE,
    ) -> AsyncGenerator[AnyEvent]:
        """Iterate over the log of a run: `LogEvent`s and a final `EndEvent`.

        `tail` starts with the last lines. `grep` selects lines that contain this text. With `follow=False`, yield the
        stored lines only.
        """
        params = without_none(tail=tail, grep=grep, follow="true" if follow else None)
        until = None if follow else (await self._session.get(RunRead, f"/runs/{run_id}")).last_seq
        follower = Follower(self._session, f"/runs/{run_id}/logs", params, after=None)
        async with aclosing(follower.follow_events(patience, until)) as events:
            async for event in events:
                yield event

    @call
    async def metrics(
        self,
        run_id: str,
        *,
        names: Sequence[str] | None = None,
        max_points: int | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
    ) -> RunMetrics:
        """Return metric series of a run (`loss`, `extra.<name>`, `eval.eval_loss`, …); downsampling keeps extremes."""
        names_text = None if names is None else ",".join(names)
        return await self._session.get(
            RunMetrics, f"/runs/{run_id}/metrics", names=names_text, max_points=max_points, from_step=from_step,
            to_step=to_step,
        )  # fmt: skip

    @call
    async def data_frame(self, run_id: str | Sequence[str], *, names: Sequence[str] | None = None) -> Any:
        """Return metric series as a pandas data frame: a row for each step, a column for each series.

        `names` are those of `metrics`; by default all. Of several runs, the index has the run's id and the step. Values
        that were not finite, and those of steps without the metric, are NaN. Needs pandas.
        """
        series = None if names is None else ",".join(names)
        ids = [run_id] if isinstance(run_id, str) else list(run_id)
        metrics = {id: await self._session.get(RunMetrics, f"/runs/{id}/metrics", names=series) for id in ids}
        return metrics_frame(metrics[run_id] if isinstance(run_id, str) else metrics)

    @call
    async def plot(
        self,
        run_id: str | Sequence[str],
        *,
        names: Sequence[str] = ("loss", "eval_loss"),
        follow: bool = True,
        patience: float = STREAM_PATIENCE,
    ) -> None:
        """Draw curves of a run, or of several, below the cell of a notebook, and again while they train.

        `names` are those of `metrics`; losses share their axes. With `follow=False`, draw once. Needs matplotlib and
        IPython. To stop watching, interrupt the cell; the runs go on.
        """
        if not isinstance(run_id, str):
            return await self._plot_several(run_id, names, follow)
        run = await self._session.get(RunRead, f"/runs/{run_id}")
        plot = CurvePlot(run.name, names)
        path, names_text = f"/runs/{run.id}/metrics", ",".join(names)
        metrics = await self._session.get(RunMetrics, path, names=names_text, max_points=_MOST_PLOTTED)
        plot.load_metrics(metrics)
        plot.draw_output(run.status.value, now=True)
        if not follow or run.finished_at is not None:
            return None
        params = {"types": "metric,eval,status", "after": metrics.last_seq}
        follower = Follower(self._session, f"/runs/{run.id}/events", params, after=metrics.last_seq)
        status = run.status.value
        async with aclosing(follower.follow_events(patience)) as events:
            async for event in events:
                if isinstance(event, MetricEvent | EvalEvent):
                    plot.add_event(event)
                elif isinstance(event, StatusEvent):
                    status = event.to
                plot.draw_output(status)
        plot.load_metrics(await self._session.get(RunMetrics, path, names=names_text, max_points=_MOST_PLOTTED))
        plot.draw_output((await self._session.get(RunRead, f"/runs/{run.id}")).status.value, now=True)
        return None

    async def _plot_several(self, run_ids: Sequence[str], names: Sequence[str], follow: bool) -> None:
        """Draw the curves of several runs; those that have not ended are read again every few seconds."""
        runs = {id: await self._session.get(RunRead, f"/runs/{id}") for id in dict.fromkeys(run_ids)}
        labels = {id: f"{run.name} ({id[-6:]})" for id, run in runs.items()}
        plot = CurvePlot(f"{len(runs)} runs", names, tuple(labels.values()))
        unread = list(runs)
        while True:
            for id in unread:
                path = f"/runs/{id}/metrics"
                metrics = await self._session.get(
                    RunMetrics, path, names=",".join(names), max_points=_MOST_PLOTTED // len(runs)
                )
                plot.load_metrics(metrics, labels[id])
            live = [id for id, run in runs.items() if run.finished_at is None]
            plot.draw_output(f"{len(live)} running or waiting" if live else "ended", now=True)
            if not follow or not live:
                return
            await self._session.transport.pause(_SECONDS_BETWEEN_READS)
            unread = live
            runs |= {id: await self._session.get(RunRead, f"/runs/{id}") for id in live}

    @stream
    async def checkpoints(
        self, run_id: str, *, limit: int | None = None, after: str | None = None
    ) -> AsyncGenerator[CheckpointRead]:
        """Iterate over the checkpoints of a run, newest first."""
        path = f"/runs/{run_id}/checkpoints"
        async with aclosing(self._iterate_items(path, CheckpointRead, {}, limit, after)) as items:
            async for item in items:
                yield item

    @call
    async def update_checkpoint(self, run_id: str, checkpoint_id: str, *, pinned: bool) -> CheckpointRead:
        """Pin a checkpoint, so that it is not deleted when newer ones are saved, or unpin it."""
        return await self._send_patch(CheckpointRead, f"/runs/{run_id}/checkpoints/{checkpoint_id}", {"pinned": pinned})

    @call
    async def export_checkpoint(
        self,
        run_id: str,
        checkpoint_id: str,
        *,
        output: Literal["adapter", "merged"] | None = None,
        gguf: GgufType | None = None,
        name: str | None = None,
        idempotency_key: str | None = None,
    ) -> RunRead:
        """Create a run whose output is the model of a checkpoint: the adapter, or `merged` into its base model.

        With `gguf`, such as `Q4_K_M`, the output also has `model.gguf` with weights of this type, and an adapter is
        merged unless `output` is `adapter`.
        """
        path = f"/runs/{run_id}/checkpoints/{checkpoint_id}/export"
        key = idempotency_key or str(uuid.uuid4())
        return await self._session.post(RunRead, path, without_none(output=output, gguf=gguf, name=name), key=key)

    @call
    async def download_checkpoint(self, run_id: str, checkpoint_id: str, file: str | Path | None = None) -> Path:
        """Download a checkpoint as a tar archive (default: `<checkpoint id>.tar`) and return its path."""
        path = f"/runs/{run_id}/checkpoints/{checkpoint_id}/download"
        return await download_file(self._session, path, Path(file or f"{checkpoint_id}.tar"))

    @call
    async def artifacts(self, run_id: str, *, attempt: int | None = None) -> Sequence[Artifact]:
        """Return the files of the run's output, or the records of one attempt."""
        return (await self._session.get(Artifacts, _artifacts_path(run_id, attempt))).data

    @call
    async def download(
        self,
        run_id: str,
        folder: str | Path | None = None,
        *,
        paths: Sequence[str] = (),
        attempt: int | None = None,
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> Path:
        """Download the run's output into `folder` and return that; default: a new folder named after the run.

        Downloads all files, or those that match `paths` (`*.json`). Files appear when all are complete; an interrupted
        download is resumed. `attempt` selects the records of one attempt instead of the output, by default into the
        folder `<run>-attempt-<number>`. `on_progress` is called with the path, the bytes received and the size of the
        file.
        """
        place = _artifacts_path(run_id, attempt)
        listing = await self._session.get(Artifacts, place)
        if listing.left_out:
            # Without a logging configuration, Python prints warnings on standard error.
            log.warning(
                "%d file(s) of run %s are not downloaded, because their names have control characters, backslashes or "
                "bytes that are not UTF-8: copy them from the storage of the service.", listing.left_out, run_id,
            )  # fmt: skip
        target = Path(folder or (run_id if attempt is None else f"{run_id}-attempt-{attempt}"))
        return await download_files(self._session, place, run_id, listing.data, target, paths, on_progress)


def _artifacts_path(run_id: str, attempt: int | None) -> str:
    return f"/runs/{run_id}/artifacts" if attempt is None else f"/runs/{run_id}/attempts/{attempt}/artifacts"
