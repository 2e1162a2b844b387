"""Runs on several hosts: the claim takes the devices of all workers or none, and each part has a lease of its own."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from app.infra.ids import new_id
from app.runs.events import log as event_log
from app.runs.events.log import LeaseFenced, NewEvent
from app.runs.state import machine, parts
from tests.rows import add_run, add_worker, claim, events_of, hold_workers, run_row

LEASE = 60.0
END = {"exit_code": 0}


def member(engine: Engine, devices: int = 1, **values: Any) -> str:
    """A worker that can train a part."""
    return add_worker(engine, devices=devices, group_address="10.0.0.1", **values)


def add_group_run(engine: Engine, hosts: int = 2, each: int = 1, **values: Any) -> str:
    run_id: str = add_run(engine, devices_needed=hosts * each, hosts_needed=hosts, **values).id
    return run_id


def holders(engine: Engine, run_id: str) -> dict[str, list[int]]:
    """Devices of a run by worker."""
    query = 'SELECT worker_id, array_agg("index" ORDER BY "index") FROM devices WHERE run_id = :run GROUP BY 1'
    with engine.connect() as connection:
        return dict(connection.execute(text(query), {"run": run_id}).tuples().all())


def parts_of(engine: Engine, run_id: str) -> list[Any]:
    query = "SELECT * FROM run_parts WHERE run_id = :run ORDER BY lease_epoch, part"
    with engine.connect() as connection:
        return list(connection.execute(text(query), {"run": run_id}).all())


def execute(engine: Engine, *statements: Any) -> list[Any]:
    """Execute statements in one transaction; return the rows of the last one."""
    with engine.begin() as connection:
        for statement in statements:
            result = connection.execute(statement)
        return list(result.all()) if result.returns_rows else []


def expire(engine: Engine, run_id: str) -> None:
    """Let the leases of the parts of a run expire."""
    past = "UPDATE run_parts SET lease_expires_at = now() - interval '1 s' WHERE run_id = :id"
    execute(engine, text(past).bindparams(id=run_id))


@pytest.fixture
def claimed(engine: Engine) -> Any:
    """The claim of a run on two hosts of two devices each."""
    run_id, lead, other = add_group_run(engine, each=2), member(engine, 2), member(engine, 3)
    hold_workers(engine, run_id, lead, other)
    return claim(engine, lead, LEASE)


class TestClaim:
    def test_it_takes_the_same_number_of_devices_of_each_worker(self, engine: Engine) -> None:
        run_id, lead = add_group_run(engine, hosts=3, each=2), member(engine, 2)
        others = sorted([member(engine, 3), member(engine, 2)])
        hold_workers(engine, run_id, lead, *others)
        row = claim(engine, lead, LEASE)
        assert (row.id, row.lease_owner, row.lease_epoch, row.attempt) == (run_id, lead, 1, 1)
        assert (sorted(row.device_indexes), sorted(row.members)) == ([0, 1], others)
        assert holders(engine, run_id) == {one: [0, 1] for one in (lead, *others)}
        stored_parts = [
            (one.part, one.worker_id, one.first_rank, one.device_indexes) for one in parts_of(engine, run_id)
        ]
        assert stored_parts == [(1, others[0], 2, [0, 1]), (2, others[1], 4, [0, 1])]
        assert claim(engine, lead, LEASE) is None

    def test_it_takes_none_if_one_worker_lacks_a_device(self, engine: Engine) -> None:
        lead, other = member(engine, 2), member(engine, 2)
        add_run(engine)
        assert claim(engine, other) is not None
        run_id = add_group_run(engine, each=2)
        hold_workers(engine, run_id, lead, other)
        assert claim(engine, lead, LEASE) is None
        assert (holders(engine, run_id), parts_of(engine, run_id)) == ({}, [])
        assert run_row(engine, run_id).status == "pending"

    @pytest.mark.parametrize(
        "change",
        [
            "UPDATE workers SET heartbeat_at = now() - interval '31 s'",
            "UPDATE workers SET state = 'draining'",
            "UPDATE workers SET group_address = NULL",
            "UPDATE workers SET version = '1'",
            "UPDATE devices SET paused_until = now() + interval '1 h'",
            "UPDATE devices SET memory_mb = 10",
        ],
    )
    def test_a_worker_that_cannot_take_its_part_keeps_the_run_waiting(self, engine: Engine, change: str) -> None:
        run_id, lead, other = add_group_run(engine, requirements={"memory_mb": 500}), member(engine), member(engine)
        hold_workers(engine, run_id, lead, other)
        column = "id" if "UPDATE workers" in change else "worker_id"
        execute(engine, text(f"{change} WHERE {column} = :id").bindparams(id=other))
        assert claim(engine, lead, LEASE) is None

    def test_on_workers_that_it_does_not_hold_or_not_any_more_it_does_not_start(self, engine: Engine) -> None:
        run_id, lead, other = add_group_run(engine), member(engine, 2), member(engine)
        assert claim(engine, lead, LEASE) is None
        hold_workers(engine, run_id, other)
        assert claim(engine, other, LEASE) is None, "one of two workers"
        hold_workers(engine, run_id, lead, other)
        execute(engine, text("UPDATE queue_plan SET made_at = now() - interval '31 s'"))
        assert claim(engine, lead, LEASE) is None

    def test_a_quota_counts_the_devices_of_all_hosts(self, engine: Engine) -> None:
        run_id, lead, other = add_group_run(engine, each=2), member(engine, 2), member(engine, 2)
        experiment = run_row(engine, run_id).experiment_id
        limit = text("UPDATE experiments SET max_devices = :most WHERE id = :id")
        execute(engine, limit.bindparams(most=3, id=experiment))
        hold_workers(engine, run_id, lead, other)
        assert claim(engine, lead, LEASE) is None
        execute(engine, limit.bindparams(most=4, id=experiment))
        assert claim(engine, lead, LEASE).id == run_id

    def test_many_at_once_place_none_by_half_and_no_device_twice(self, engine: Engine) -> None:
        workers = [member(engine, 2) for _ in range(4)]
        gangs = [add_group_run(engine, each=2) for _ in range(2)]
        small = [add_run(engine).id for _ in range(4)]
        for at in range(6):
            for gang, pair in zip(gangs, (workers[:2], workers[2:]), strict=True):
                hold_workers(engine, gang, *pair)
            with ThreadPoolExecutor(2 * len(workers)) as threads:
                claims = [threads.submit(claim, engine, worker, LEASE) for worker in workers for _ in range(2)]
            for one_claim in claims:
                one_claim.result()
            held = [holders(engine, run_id) for run_id in gangs]
            assert all(len(one) in (0, 2) and all(len(some) == 2 for some in one.values()) for one in held), held
            live = [run_id for run_id in (*gangs, *small) if run_row(engine, run_id).status == "initializing"]
            count = sum(len(one) for run_id in live for one in holders(engine, run_id).values())
            assert count == sum(run_row(engine, run_id).devices_needed for run_id in live), f"round {at}"
            for run_id in live:
                for part in parts_of(engine, run_id):
                    execute(engine, *parts.end(run_id, part.lease_epoch, part.part, part.worker_id, END))
                execute(engine, machine.complete(run_id, 1, None, "done"))
        assert all(run_row(engine, run_id).status == "completed" for run_id in (*gangs, *small))

    def test_the_devices_divide_by_the_hosts(self, engine: Engine) -> None:
        with pytest.raises(IntegrityError, match="hosts_divide_devices"):
            add_run(engine, devices_needed=3, hosts_needed=2)


class TestPart:
    def test_it_is_renewed_only_while_the_run_has_its_lease_epoch(self, engine: Engine, claimed: Any) -> None:
        renewal = parts.renew(claimed.id, claimed.lease_epoch, 1, LEASE)
        assert [row.meeting for row in execute(engine, renewal)] == [None]
        execute(engine, parts.announce(claimed.id, claimed.lease_epoch, "10.0.0.1:4000"))
        assert execute(engine, renewal)[0].meeting == "10.0.0.1:4000"
        execute(engine, machine.retry(claimed.id, claimed.lease_epoch, "lost", 0.0))
        assert execute(engine, renewal) == []

    def test_no_attempt_starts_while_the_lease_of_a_part_runs(self, engine: Engine, claimed: Any) -> None:
        lead, other = claimed.lease_owner, claimed.members[0]
        execute(engine, machine.retry(claimed.id, claimed.lease_epoch, "lost", 0.0))
        assert holders(engine, claimed.id) == {other: [0, 1]}, "the lead's are free, the other's not yet"
        third = member(engine, 2)
        hold_workers(engine, claimed.id, lead, third)
        assert claim(engine, lead, LEASE) is None
        expire(engine, claimed.id)
        execute(engine, parts.reap(0.0))
        assert claim(engine, lead, LEASE).attempt == 2

    def test_its_end_frees_its_devices_and_no_others(self, engine: Engine, claimed: Any) -> None:
        lead, other = claimed.lease_owner, claimed.members[0]
        execute(engine, *parts.end(claimed.id, claimed.lease_epoch, 1, other, {"exit_signal": 9}))
        assert holders(engine, claimed.id) == {lead: [0, 1]}
        (row,) = execute(engine, machine.renew(claimed.id, claimed.lease_epoch, LEASE))
        assert [(one["worker_id"], one["ended"], one["outcome"]) for one in row.parts] == [
            (other, True, {"exit_signal": 9})
        ]

    def test_the_lead_learns_of_an_expired_lease_and_of_a_worker_that_leaves(
        self, engine: Engine, claimed: Any
    ) -> None:
        renewal = machine.renew(claimed.id, claimed.lease_epoch, LEASE)
        assert execute(engine, renewal)[0].parts is None
        execute(engine, parts.leave(claimed.id, claimed.lease_epoch, 1))
        (part,) = execute(engine, renewal)[0].parts
        assert (part["is_leaving"], part["ended"]) == (True, False)
        expire(engine, claimed.id)
        execute(engine, parts.reap(0.0))
        (part,) = execute(engine, renewal)[0].parts
        assert (part["ended"], part["outcome"]) == (True, None)

    def test_the_lead_learns_what_the_processes_of_its_parts_do(self, engine: Engine, claimed: Any) -> None:
        renewal = machine.renew(claimed.id, claimed.lease_epoch, LEASE)
        assert execute(engine, renewal)[0].activities is None
        does = {"silent_seconds": 2.5, "waiting": [2], "suspended": []}
        execute(engine, parts.renew(claimed.id, claimed.lease_epoch, 1, LEASE, does))
        activity = {"worker_id": claimed.members[0], "first_rank": 2, "devices": 2, "activity": does}
        assert execute(engine, renewal)[0].activities == [activity]
        execute(engine, *parts.end(claimed.id, claimed.lease_epoch, 1, claimed.members[0], END))
        assert execute(engine, renewal)[0].activities is None

    def test_reaping_frees_the_devices_of_an_expired_part(self, engine: Engine, claimed: Any) -> None:
        other = claimed.members[0]
        execute(engine, machine.complete(claimed.id, claimed.lease_epoch, None, "done"))
        assert execute(engine, parts.reap(0.0)) == []
        assert holders(engine, claimed.id) == {other: [0, 1]}
        expire(engine, claimed.id)
        assert execute(engine, parts.reap(0.0)) == [(claimed.id, other)]
        assert holders(engine, claimed.id) == {}

    def test_reaping_does_not_wait_for_a_part_that_another_transaction_holds(
        self, engine: Engine, claimed: Any
    ) -> None:
        expire(engine, claimed.id)
        with engine.begin() as connection:
            connection.execute(text("SELECT 1 FROM run_parts FOR UPDATE"))
            assert execute(engine, text("SET LOCAL lock_timeout = '2s'"), parts.reap(0.0)) == []
        assert execute(engine, parts.reap(0.0)) == [(claimed.id, claimed.members[0])]

    def test_log_lines_of_a_part_keep_the_sequence_and_are_fenced(self, engine: Engine, claimed: Any) -> None:
        line = NewEvent.from_payload("log", 1.0, {"line": "[rank 2] loading", "stream": "stdout", "level": "info"})
        own = [
            NewEvent.from_payload("log", 1.0, {"line": text, "stream": "stdout", "level": "info"})
            for text in ("a", "b")
        ]
        with engine.begin() as connection:
            event_log.append_events(connection, claimed.id, claimed.lease_epoch, 1, own[:1])
            event_log.append_lines(connection, claimed.id, claimed.lease_epoch, [line, line])
            event_log.append_events(connection, claimed.id, claimed.lease_epoch, 1, own)
        lines = [(seq, data.get("line")) for seq, kind, _, data in events_of(engine, claimed.id) if kind == "log"]
        assert lines == [(3, "a"), (4, "[rank 2] loading"), (5, "[rank 2] loading"), (6, "b")]
        execute(engine, machine.retry(claimed.id, claimed.lease_epoch, "lost", 0.0))
        with engine.begin() as connection, pytest.raises(LeaseFenced):
            event_log.append_lines(connection, claimed.id, claimed.lease_epoch, [line])


def test_a_run_that_is_deleted_leaves_no_device_taken(engine: Engine, claimed: Any) -> None:
    other = claimed.members[0]
    execute(engine, machine.complete(claimed.id, claimed.lease_epoch, None, "done"))
    execute(engine, text("DELETE FROM run_attempts WHERE run_id = :id").bindparams(id=claimed.id))
    execute(engine, text("DELETE FROM runs WHERE id = :id").bindparams(id=claimed.id))
    assert execute(engine, parts.renew(claimed.id, claimed.lease_epoch, 1, LEASE)) == []
    execute(engine, *parts.end(claimed.id, claimed.lease_epoch, 1, other, END))
    assert holders(engine, claimed.id) == {}
    assert claim(engine, new_id("wrk")) is None
