"""`client.runs`: everything that can be done with runs."""

import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

from app.artifacts.schemas import Artifact, Artifacts
from app.checkpoints.schemas import CheckpointRead
from app.client.download import download
from app.client.events import Event, Follower
from app.client.modes import M, call, stream
from app.client.resource import ApiResource, body_of, given
from app.estimates.schemas import Estimated
from app.postmortems.schemas import PostMortem
from app.runs.schemas import RunCheck, RunComparison, RunCreate, RunMetrics, RunRead, RunStopped, RunSummary, StopMode

STREAM_PATIENCE = 600.0
"""Seconds for which a stream tries to come back to a service that is away, unless told otherwise."""


class Runs(ApiResource[M]):
    """Runs: one training each."""

    @call
    async def create(self, run: RunCreate | Mapping[str, Any], *, idempotency_key: str | None = None) -> RunRead:
        """Ask for a run; repeated by itself where an answer got lost, without making a second one.

        `run` is what `POST /v1/runs` takes: `dataset_id`, `config`, and what else there is to say.
        """
        return await self._session.post(RunRead, "/runs", body_of(run), key=idempotency_key or str(uuid.uuid4()))

    @call
    async def validate(self, run: RunCreate | Mapping[str, Any]) -> RunCheck:
        """What `create` would say, and what would be trained; makes nothing."""
        return await self._session.post(RunCheck, "/runs/validate", body_of(run), repeatable=True)

    @call
    async def estimate(
        self, run: RunCreate | Mapping[str, Any], *, probe: bool = False, wait: bool = True
    ) -> Estimated:
        """What the run would take in memory, steps, tokens, time and money, and where it fits; makes nothing.

        With `probe` a worker measures it too, with two steps on its longest rows: answers once that is done, with
        `measured` and `probe` beside the estimate; without `wait` at once, with `probe_run_id` to look at later.
        """
        if not probe:
            return await self._session.post(Estimated, "/runs/estimate", body_of(run), repeatable=True)
        key, body = str(uuid.uuid4()), {**body_of(run), "probe": True}
        found = await self._session.post(Estimated, "/runs/estimate", body, key=key)
        if not wait:
            return found
        path = f"/runs/{found.probe_run_id}"
        follower = Follower(self._session, f"{path}/events", {"types": "end"}, after=None, whole=False)
        async with aclosing(follower.follow(STREAM_PATIENCE)) as events:
            async for _ in events:
                pass
        ended = await self._session.get(RunRead, path)
        return found.model_copy(update={"measured": ended.measured, "probe": ended.probe})

    @stream
    async def list(
        self,
        *,
        experiment_id: str | None = None,
        status: str | Sequence[str] | None = None,
        tag: str | None = None,
        parent_run_id: str | None = None,
        base_model: str | None = None,
        sort: Literal["created_at", "best_loss"] | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> AsyncGenerator[RunSummary]:
        """Runs, newest first; page after page is fetched as you go on."""
        filters = {
            "experiment_id": experiment_id, "status": status, "tag": tag, "parent_run_id": parent_run_id,
            "base_model": base_model, "sort": sort,
        }  # fmt: skip
        async with aclosing(self._items("/runs", RunSummary, filters, limit, after)) as items:
            async for item in items:
                yield item

    @call
    async def get(self, run_id: str) -> RunRead:
        """A run as it stands, with its newest metrics."""
        return await self._session.get(RunRead, f"/runs/{run_id}")

    @call
    async def postmortem(self, run_id: str) -> PostMortem:
        """Why a run failed, or its last attempt that went wrong, and what to change."""
        return await self._session.get(PostMortem, f"/runs/{run_id}/postmortem")

    @call
    async def compare(self, run_ids: Sequence[str]) -> RunComparison:
        """Where the configurations of 2 to 20 runs differ, and what each has reached."""
        return await self._session.get(RunComparison, "/runs/compare", ids=",".join(run_ids))

    @call
    async def update(
        self, run_id: str, *, name: str | None = None, tags: Sequence[str] | None = None, pinned: bool | None = None
    ) -> RunRead:
        """Give a run another name or other tags, or pin it, so that it is never deleted."""
        return await self._patch(RunRead, f"/runs/{run_id}", given(name=name, tags=tags, pinned=pinned))

    @call
    async def delete(self, run_id: str) -> None:
        """Delete a run that has ended, with its events, checkpoints and output."""
        await self._session.request("DELETE", f"/runs/{run_id}")

    @call
    async def stop(
        self, run_id: str, *, mode: StopMode | None = None, save_checkpoint: bool | None = None
    ) -> RunStopped:
        """Ask a run to stop; it has stopped once its events end. `stop` of the answer tells what to expect.

        Modes: `checkpoint` (save and end), `epoch_end` (train to the end of the epoch first), `best` (end at once, to
        resume from the best checkpoint) and `discard` (save nothing), which `save_checkpoint=False` means too.
        """
        body = given(mode=mode, save_checkpoint=save_checkpoint)
        return await self._session.post(RunStopped, f"/runs/{run_id}/stop", body, repeatable=True)

    @call
    async def resume(
        self,
        run_id: str,
        *,
        checkpoint_id: str | None = None,
        from_start: bool = False,
        config: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> RunRead:
        """A new run that goes on from a checkpoint of this one (the newest), with what `config` changes."""
        body = given(checkpoint_id=checkpoint_id, config=config) | ({"from": "start"} if from_start else {})
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
    ) -> AsyncGenerator[Event]:
        """The events of a run behind `after`: each once and in order, to its end, whatever happens on the way.

        A lost connection is taken up again behind the last event, for `patience` seconds of silence. `types` are the
        only ones wanted (`end` always comes). Without `follow`, those that are there, and no waiting.
        """
        wanted = types if types is None or isinstance(types, str) else ",".join(types)
        params = given(after=after or None, types=wanted) | ({} if follow else {"follow": "false"})
        until = None if follow else (await self._session.get(RunRead, f"/runs/{run_id}")).last_seq
        follower = Follower(self._session, f"/runs/{run_id}/events", params, after=after, whole=wanted is None)
        async with aclosing(follower.follow(patience, until)) as events:
            async for event in events:
                yield event

    @stream
    async def logs(
        self,
        run_id: str,
        *,
        tail: int | None = None,
        grep: str | None = None,
        follow: bool = True,
        patience: float = STREAM_PATIENCE,
    ) -> AsyncGenerator[Event]:
        """What a run prints, as `LogEvent`s and at last an `EndEvent`; `tail` begins with its last lines.

        `grep` wants only lines with this text. Without `follow`, the lines that are there, and no waiting.
        """
        params = given(tail=tail, grep=grep, follow="true" if follow else None)
        until = None if follow else (await self._session.get(RunRead, f"/runs/{run_id}")).last_seq
        follower = Follower(self._session, f"/runs/{run_id}/logs", params, after=None, whole=False)
        async with aclosing(follower.follow(patience, until)) as events:
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
        """The curves of a run (`loss`, `extra.<name>`, `eval.eval_loss`, …); thinned ones keep every extreme."""
        wanted = None if names is None else ",".join(names)
        return await self._session.get(
            RunMetrics, f"/runs/{run_id}/metrics", names=wanted, max_points=max_points, from_step=from_step,
            to_step=to_step,
        )  # fmt: skip

    @stream
    async def checkpoints(
        self, run_id: str, *, limit: int | None = None, after: str | None = None
    ) -> AsyncGenerator[CheckpointRead]:
        """What the run can be resumed from, newest first."""
        path = f"/runs/{run_id}/checkpoints"
        async with aclosing(self._items(path, CheckpointRead, {}, limit, after)) as items:
            async for item in items:
                yield item

    @call
    async def update_checkpoint(self, run_id: str, checkpoint_id: str, *, pinned: bool) -> CheckpointRead:
        """Pin a checkpoint, so that it is kept however many newer ones there are, or let it go again."""
        return await self._patch(CheckpointRead, f"/runs/{run_id}/checkpoints/{checkpoint_id}", {"pinned": pinned})

    @call
    async def artifacts(self, run_id: str) -> Sequence[Artifact]:
        """The files of the run's output."""
        return (await self._session.get(Artifacts, f"/runs/{run_id}/artifacts")).data

    @call
    async def download(
        self,
        run_id: str,
        folder: str | Path | None = None,
        *,
        paths: Sequence[str] = (),
        told: Callable[[str, int, int], None] | None = None,
    ) -> Path:
        """Fetch the run's output into `folder` (a new one named by the run); answers the folder.

        All files or those that match `paths` (`*.json`). Files appear once all are there; what was interrupted goes
        on where it was. `told` is called with path, bytes there, and all bytes of that file.
        """
        found = (await self._session.get(Artifacts, f"/runs/{run_id}/artifacts")).data
        return await download(self._session, run_id, found, Path(folder or run_id), paths, told)
