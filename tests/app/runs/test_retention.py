"""Retention: what is old goes, and never what somebody needs."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, func, insert, select, text, update
from typer.testing import CliRunner

from anneal.client.client import Anneal
from anneal.contracts.events import EndEvent, TruncatedEvent
from app.cli.main import cli
from app.config import Settings
from app.infra.broker import Broker
from app.infra.clock import ClockWatch
from app.infra.db import async_engine, sync_engine
from app.infra.ids import id_at, new_id
from app.infra.storage import Storage
from app.runs import retention
from app.runs.events import feed, stream
from app.runs.events.feed import TRUNCATED
from app.runs.events.frames import Frame
from app.runs.events.sources import RunSource
from app.runs.events.stream import Streams
from app.runs.retention import Policy, PruneResult, run_prune
from app.tables.checkpoints import Checkpoint
from app.tables.events import RunEvent, ensure_partitions
from app.tables.runs import Run
from tests.factories import Trainer, mark_checkpoint, mark_run
from tests.rows import add_run, learn_from, run_row, waiting_for_locks
from tests.server import ThreadServer
from tests.waiting import eventually

JANUARY = datetime(2025, 1, 10, tzinfo=UTC)
FEBRUARY = datetime(2025, 2, 10, tzinfo=UTC)


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    engine = sync_engine(settings.database_url or "")
    with engine.begin() as connection:
        ensure_partitions(connection, JANUARY)
    yield engine
    engine.dispose()


class OldRuns:
    """Makes runs of some months ago."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.storage = Storage(settings)
        self._count = 0

    def run(self, at: datetime, ended: bool = True, points: int = 50, **values: Any) -> Trainer:
        self._count += 1
        trainer = Trainer(self.engine, add_run(self.engine, id=id_at("run", at + timedelta(seconds=self._count))).id)
        trainer.begin()
        trainer.events("metric", *({"step": step, "loss": float(step % 7)} for step in range(points)))
        if ended:
            trainer.complete()
            values |= {"finished_at": at}
        if values:
            mark_run(self.engine, trainer.run_id, **values)
        return trainer

    def checkpoint(self, trainer: Trainer, step: int, **values: Any) -> Path:
        trainer.checkpoint(step, **values)
        folder = self.storage.checkpoint_dir(trainer.run_id, trainer.attempt, step)
        folder.mkdir(parents=True)
        return folder


@pytest.fixture
def old_runs(engine: Engine, settings: Settings) -> OldRuns:
    return OldRuns(engine, settings)


def events(engine: Engine, run_id: str) -> int:
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).where(RunEvent.run_id == run_id)) or 0


def queued(engine: Engine) -> set[str]:
    """Runs of which the feed of all runs has events."""
    with engine.connect() as connection:
        return set(connection.scalars(text("SELECT run_id FROM event_feed UNION SELECT run_id FROM event_feed_queue")))


def number_events(settings: Settings) -> None:
    """Number the events of the feed of all runs, as the dispatcher does."""

    async def number() -> None:
        engine = async_engine(settings.database_url or "")
        async with engine.begin() as connection:
            await feed.number_events(connection)
        await engine.dispose()

    asyncio.run(number())


def partitions(engine: Engine) -> set[str]:
    query = text("SELECT relname FROM pg_class WHERE relname LIKE 'run_events_2025%' AND relkind = 'r'")
    with engine.connect() as connection:
        return set(connection.scalars(query))


def runs(engine: Engine) -> set[str]:
    with engine.connect() as connection:
        return set(connection.scalars(select(Run.id)))


class TestEvents:
    def test_a_month_goes_once_all_its_runs_are_old_and_curves_stay(
        self, engine: Engine, old_runs: OldRuns, settings: Settings
    ) -> None:
        old, older = old_runs.run(FEBRUARY), old_runs.run(JANUARY)
        result = run_prune(settings, Policy(events_days=30), dry_run=False)
        assert result == PruneResult(months=["2025-01", "2025-02"])
        assert partitions(engine) == {"run_events_2025_03"}
        with ThreadServer(settings) as api:
            for trainer in (old, older):
                assert events(engine, trainer.run_id) == 0
                row = run_row(engine, trainer.run_id)
                assert row.first_seq == row.event_seq + 1
                loss = api.client.get(f"/v1/runs/{trainer.run_id}/metrics").json()["series"]["loss"]
                assert (loss["min"], loss["max"], loss["steps"][0], loss["steps"][-1]) == (0.0, 6.0, 0, 49)
        assert run_prune(settings, Policy(events_days=30), dry_run=False) == PruneResult()

    def test_events_of_other_runs_are_stored_while_a_month_is_pruned(
        self, engine: Engine, old_runs: OldRuns, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retention, "_LOCK_TIMEOUT", "30s")
        old, live = old_runs.run(JANUARY), old_runs.run(FEBRUARY, ended=False)
        with ThreadPoolExecutor(1) as thread:
            with engine.begin() as reader:
                reader.execute(select(Run.id).where(Run.id == old.run_id).with_for_update(read=True))
                pruning = thread.submit(run_prune, settings, Policy(events_days=30), dry_run=False)
                eventually(lambda: waiting_for_locks(engine) == 1, what="the update of the runs waits")
                live.events("metric", {"step": 50, "loss": 1.0})
                assert waiting_for_locks(engine) == 1 and not pruning.done()
            assert pruning.result().months == ["2025-01"]

    def test_not_while_a_run_of_the_month_goes_on(self, engine: Engine, old_runs: OldRuns, settings: Settings) -> None:
        live, ended = old_runs.run(JANUARY, ended=False), old_runs.run(JANUARY)
        young = old_runs.run(FEBRUARY)
        mark_run(engine, young.run_id, finished_at=datetime.now(UTC))
        assert run_prune(settings, Policy(events_days=30), dry_run=False) == PruneResult()
        assert all(events(engine, trainer.run_id) > 50 for trainer in (live, ended, young))

    def test_events_of_pinned_runs_stay_when_their_month_goes(
        self, engine: Engine, old_runs: OldRuns, settings: Settings
    ) -> None:
        pinned, other = old_runs.run(JANUARY, pinned=True), old_runs.run(JANUARY)
        before = events(engine, pinned.run_id)
        number_events(settings)
        assert run_prune(settings, Policy(events_days=30), dry_run=False).months == ["2025-01"]
        assert (events(engine, pinned.run_id), events(engine, other.run_id)) == (before, 0)
        assert queued(engine) == {pinned.run_id, TRUNCATED}
        assert run_row(engine, pinned.run_id).first_seq == 1
        assert "run_events_2025_01" in partitions(engine)
        assert run_prune(settings, Policy(events_days=30), dry_run=False) == PruneResult()

    def test_a_stream_says_what_is_gone_and_how_the_run_has_ended(self, old_runs: OldRuns, settings: Settings) -> None:
        trainer, later = old_runs.run(JANUARY), old_runs.run(datetime.now(UTC))
        number_events(settings)
        run_prune(settings, Policy(events_days=30), dry_run=False)
        with ThreadServer(settings) as api:
            with Anneal(api.url, api.key) as client:
                gone, *rest = client.runs.all_events(after=0, types="end", follow=False)
                assert isinstance(gone, TruncatedEvent) and gone.first_seq is None
                assert [(event.run_id, event.cursor) for event in rest] == [(later.run_id, gone.cursor + 5)]
                assert list(client.runs.all_events(after=gone.cursor, types="end", follow=False)) == rest
            path = f"/v1/runs/{trainer.run_id}"
            answer = api.client.get(f"{path}/events")
            assert "event: truncated" in answer.text and "event: end" in answer.text
            lines = [json.loads(line) for line in api.client.get(f"{path}/events?format=ndjson").text.splitlines()]
            assert [line.get("status") for line in lines] == [None, "completed"]
            assert api.client.get(f"{path}/events", params={"after": lines[-1]["seq"]}).status_code == 204
            assert api.client.get(f"{path}/logs?follow=true").text == ""

    def test_a_follower_of_a_run_whose_events_are_gone_learns_how_it_has_ended(
        self, old_runs: OldRuns, settings: Settings
    ) -> None:
        ends = [
            ("completed", 0, Trainer.complete),
            ("failed", 3, Trainer.fail),
            ("cancelled", 4, Trainer.cancel_on_request),
        ]
        trainers = [end(old_runs.run(JANUARY, ended=False)) for _, _, end in ends]
        for trainer in trainers:
            mark_run(old_runs.engine, trainer.run_id, finished_at=JANUARY)
        run_prune(settings, Policy(events_days=30), dry_run=False)
        with ThreadServer(settings) as api, Anneal(api.url, api.key) as client:
            there = {"ANNEAL_URL": api.url, "ANNEAL_API_KEY": api.key, "ANNEAL_HOME": str(settings.home)}
            for trainer, (how, code, _) in zip(trainers, ends, strict=True):
                last = run_row(old_runs.engine, trainer.run_id).event_seq
                for follow in (True, False):
                    gone, end = client.runs.events(trainer.run_id, follow=follow)
                    assert isinstance(gone, TruncatedEvent) and (gone.seq, gone.first_seq) == (last - 1, last + 1)
                    assert isinstance(end, EndEvent) and (end.seq, end.status) == (last, how)
                assert list(client.runs.events(trainer.run_id, after=last - 1)) == [end]
                watched = CliRunner().invoke(cli, ["runs", "watch", trainer.run_id, "--json"], env=there)
                assert watched.exit_code == code, watched.output
                assert [json.loads(line)["type"] for line in watched.stdout.splitlines()] == ["truncated", "end"]


class TestReaders:
    """Somebody in the middle of the events of a run, which go at that moment."""

    @pytest.fixture
    async def streams(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Streams]:
        monkeypatch.setattr(stream, "_BATCH", 20)
        engine, queue = async_engine(settings.database_url or ""), Broker(settings)
        await queue.start()
        streams = Streams(engine, queue)
        yield streams
        await streams.close()
        await queue.close()
        await engine.dispose()

    @pytest.mark.parametrize("had_ended", [True, False])
    async def test_reader_is_told_of_pruned_events_and_the_end(
        self, old_runs: OldRuns, settings: Settings, streams: Streams, had_ended: bool
    ) -> None:
        rest, last = await self.rest(old_runs, settings, streams, had_ended, Policy(events_days=30))
        assert [(frame.seq, frame.type) for frame in rest] == [(last - 1, "truncated"), (last, "end")]

    @pytest.mark.parametrize("had_ended", [True, False])
    async def test_reader_ends_when_its_run_is_deleted(
        self, old_runs: OldRuns, settings: Settings, streams: Streams, had_ended: bool
    ) -> None:
        rest, _ = await self.rest(old_runs, settings, streams, had_ended, Policy(runs_days=30))
        assert rest == []

    async def rest(
        self, old_runs: OldRuns, settings: Settings, streams: Streams, had_ended: bool, policy: Policy
    ) -> tuple[list[Frame], int]:
        """What comes behind the first of several batches, and the `seq` of the end."""
        trainer = old_runs.run(JANUARY)
        last = run_row(old_runs.engine, trainer.run_id).event_seq
        batches = streams.stream_batches(RunSource(trainer.run_id), 0, until=last if had_ended else None)
        _, first = await anext(batches)
        assert len(first) == 20
        await asyncio.to_thread(run_prune, settings, policy, False)
        async with asyncio.timeout(10):
            return [frame async for _, frames in batches for frame in frames], last


class TestCheckpoints:
    def test_the_furthest_the_best_the_pinned_and_those_resumed_from_stay(
        self, engine: Engine, old_runs: OldRuns, settings: Settings
    ) -> None:
        trainer = old_runs.run(JANUARY)
        folders = [old_runs.checkpoint(trainer, step, metrics={"eval_loss": abs(step - 2)}) for step in range(1, 7)]
        with engine.connect() as connection:
            ids = list(connection.scalars(select(Checkpoint.id).order_by(Checkpoint.step)))
        mark_checkpoint(engine, ids[2], pinned=True)
        child = old_runs.run(FEBRUARY, resume_checkpoint_id=ids[3])
        would = run_prune(settings, Policy(checkpoints_days=30), dry_run=True)
        assert (would.checkpoints, would.checkpoint_bytes) == (2, 20) and all(folder.is_dir() for folder in folders)
        assert run_prune(settings, Policy(checkpoints_days=30), dry_run=False) == would
        assert [folder.is_dir() for folder in folders] == [False, True, True, True, False, True]
        assert run_prune(settings, Policy(checkpoints_days=30), dry_run=False) == PruneResult()
        assert child.run_id in runs(engine)

    def test_runs_that_are_live_young_or_pinned_keep_all(self, old_runs: OldRuns, settings: Settings) -> None:
        live = old_runs.run(JANUARY, ended=False)
        young, pinned = old_runs.run(JANUARY), old_runs.run(JANUARY, pinned=True)
        mark_run(old_runs.engine, young.run_id, finished_at=datetime.now(UTC))
        folders = [old_runs.checkpoint(trainer, step) for trainer in (live, young, pinned) for step in (1, 2, 3)]
        assert run_prune(settings, Policy(checkpoints_days=30), dry_run=False) == PruneResult()
        assert all(folder.is_dir() for folder in folders)

    def test_a_run_whose_checkpoints_cannot_be_judged_keeps_no_others(
        self, engine: Engine, old_runs: OldRuns, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reported: list[str] = []
        # Not by way of the logging of the process, which other tests set up in their own ways.
        monkeypatch.setattr(retention.log, "warning", lambda text, *values: reported.append(text % values))
        odd, usual = old_runs.run(JANUARY), old_runs.run(FEBRUARY)
        folders = [old_runs.checkpoint(trainer, step) for trainer in (odd, usual) for step in (1, 2)]
        with engine.begin() as connection:
            values = {"metrics": {"eval_loss": "x"}}
            connection.execute(update(Checkpoint).where(Checkpoint.run_id == odd.run_id).values(values))
        assert run_prune(settings, Policy(checkpoints_days=30), dry_run=False).checkpoints == 1
        assert [folder.is_dir() for folder in folders] == [True, True, False, True]
        assert len(reported) == 1 and odd.run_id in reported[0]

    @pytest.mark.parametrize("error", [OSError("not ours"), RecursionError("a bug of ours")])
    def test_undeletable_checkpoint_files_block_no_other_deletion(
        self, old_runs: OldRuns, settings: Settings, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        odd, usual = old_runs.run(JANUARY), old_runs.run(FEBRUARY)
        folders = [old_runs.checkpoint(trainer, step) for trainer in (odd, usual) for step in (1, 2)]
        remove_checkpoint = Storage.remove_checkpoint

        def refuse(storage: Storage, run_id: str, attempt: int, name: str) -> None:
            if run_id == odd.run_id:
                raise error
            remove_checkpoint(storage, run_id, attempt, name)

        monkeypatch.setattr(Storage, "remove_checkpoint", refuse)
        done = run_prune(settings, Policy(checkpoints_days=30, events_days=30), dry_run=False)
        assert [folder.is_dir() for folder in folders] == [True, True, False, True]
        assert done.months == ["2025-01", "2025-02"]


class TestRuns:
    def test_many_go_in_several_transactions_and_a_dry_run_counts_the_same(
        self, engine: Engine, old_runs: OldRuns, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retention, "_RUNS_AT_ONCE", 2)
        first = old_runs.run(JANUARY, points=1)
        second = old_runs.run(JANUARY, points=1, parent_run_id=first.run_id)
        old_runs.run(JANUARY, points=1, parent_run_id=second.run_id)
        for _ in range(4):
            old_runs.run(JANUARY, points=1)
        assert run_prune(settings, Policy(runs_days=30), dry_run=True) == PruneResult(runs=7)
        assert run_prune(settings, Policy(runs_days=30), dry_run=False) == PruneResult(runs=7)
        assert runs(engine) == set()

    def test_old_runs_go_with_those_that_only_they_needed(
        self, engine: Engine, old_runs: OldRuns, settings: Settings
    ) -> None:
        base = old_runs.run(JANUARY)
        child = old_runs.run(JANUARY, parent_run_id=base.run_id)
        needed = old_runs.run(JANUARY)
        waiting = add_run(engine, base_run_id=needed.run_id).id
        judge = old_runs.run(JANUARY)
        learn_from(engine, waiting, judge.run_id)
        old_judge = old_runs.run(JANUARY)
        learn_from(engine, child.run_id, old_judge.run_id)
        pinned = old_runs.run(JANUARY, pinned=True)
        holder = old_runs.run(JANUARY)
        holder.checkpoint(1, pinned=True)
        young = old_runs.run(datetime.now(UTC) - timedelta(days=1))
        would = run_prune(settings, Policy(runs_days=30), dry_run=True)
        assert would == PruneResult(runs=3) and base.run_id in runs(engine)
        assert run_prune(settings, Policy(runs_days=30), dry_run=False) == PruneResult(runs=3)
        assert runs(engine) == {needed.run_id, judge.run_id, waiting, pinned.run_id, holder.run_id, young.run_id}
        assert events(engine, child.run_id) == 0

    def test_runs_of_a_job_go_together_or_stay(
        self, engine: Engine, old_runs: OldRuns, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def make_job(**newest: Any) -> list[str]:
            """Ids of a job of three runs, oldest first, with these values of the newest one."""
            ids = [old_runs.run(JANUARY, points=1).run_id for _ in range(3)]
            for parent, run_id in itertools.pairwise(ids):
                mark_run(engine, run_id, parent_run_id=parent, job_run_id=ids[0])
            mark_run(engine, ids[-1], **{"finished_at": JANUARY, **newest})
            return ids

        jobs = [make_job() for _ in range(7)] + [make_job(finished_at=datetime.now(UTC))]
        pinned, holder, needed, continued, free, built_on, locked, young = jobs
        mark_run(engine, pinned[1], pinned=True)
        saved = {"name": "checkpoint-1", "step": 1, "epoch": 0.1, "kind": "best", "bytes": 1, "pinned": True}
        with engine.begin() as connection:
            values = {"id": new_id("ckpt"), "run_id": holder[0], "attempt": 1, "manifest_sha256": "a" * 64, **saved}
            connection.execute(insert(Checkpoint).values(values))
        others = {add_run(engine, base_run_id=needed[1]).id, add_run(engine, parent_run_id=continued[2]).id}
        mark_run(engine, free[0], base_run_id=built_on[1])
        remaining = others.union(pinned, holder, needed, continued, young)

        with engine.connect() as resuming:
            resuming.execute(select(Run.id).where(Run.id == locked[1]).with_for_update(read=True, key_share=True))
            for dry_run in (True, False):
                assert run_prune(settings, Policy(runs_days=30), dry_run=dry_run) == PruneResult(runs=6)
        assert runs(engine) == remaining.union(locked)
        monkeypatch.setattr(retention, "_RUNS_AT_ONCE", 1)
        assert run_prune(settings, Policy(runs_days=30), dry_run=False) == PruneResult(runs=3)
        assert runs(engine) == remaining

    def test_the_settings_are_the_policy_of_a_running_service(
        self, old_runs: OldRuns, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = old_runs.run(JANUARY)
        monkeypatch.setattr(retention, "_WATCH_SECONDS", 0.1)
        with ThreadServer(settings.model_copy(update={"keep_runs_days": 30})) as api:
            eventually(lambda: api.client.get(f"/v1/runs/{trainer.run_id}").status_code == 404)

    async def test_nothing_is_old_by_a_clock_that_was_just_set_ahead(
        self, old_runs: OldRuns, engine: Engine, settings: Settings
    ) -> None:
        trainer = old_runs.run(JANUARY)
        watch, now = ClockWatch(tolerance_seconds=60), time.monotonic()
        watch.observe(datetime.now(UTC) - timedelta(days=200), now, now)
        own = async_engine(settings.database_url or "", pool_size=2)
        policy = Policy(runs_days=30, events_days=30, checkpoints_days=30)
        try:
            for deleted in (0, 1):
                result = await retention.Pruning(own, Storage(settings), policy, clock_watch=watch).apply_policy()
                assert result.runs == deleted
        finally:
            await own.dispose()
        assert trainer.run_id not in runs(engine)


class TestCommand:
    def test_prune_command_prints_what_it_would_delete_and_deleted(
        self, old_runs: OldRuns, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old_runs.run(JANUARY)
        for name, value in settings.model_dump().items():
            if value is not None:
                monkeypatch.setenv(f"ANNEAL_{name.upper()}", str(value))
        command = CliRunner()
        nothing = command.invoke(cli, ["prune"])
        assert nothing.exit_code == 1 and "ANNEAL_KEEP_" in nothing.output
        reported = command.invoke(cli, ["prune", "--runs-days", "30", "--dry-run"])
        assert reported.output == "Would delete 1 runs, 0 checkpoints (0 MiB) and no events.\n"
        shown = json.loads(command.invoke(cli, ["prune", "--runs-days", "30", "--dry-run", "--json"]).output)
        assert shown == {"dry_run": True, "runs": 1, "checkpoints": 0, "checkpoint_bytes": 0, "months": []}
        assert command.invoke(cli, ["prune", "--runs-days", "30"]).output.startswith("Deleted 1 runs")
