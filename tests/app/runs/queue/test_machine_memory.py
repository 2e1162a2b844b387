"""The memory of a machine is claimed once, although each of its workers offers all of it."""

from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import Engine

from app.runs.state import machine
from tests.rows import add_run, add_worker, claim

HALF, MOST = {"estimated_mb": {"cpu": 500}}, {"memory_mb": 900}


def two_workers(engine: Engine, kind: str = "cpu") -> tuple[str, str]:
    """Two workers of one machine of 1000 MiB, one of them in a container."""
    first, second = (
        add_worker(engine, kind=kind, boot_id=f"boot/pid:[{number}]", host=f"host-{number}") for number in (1, 2)
    )
    return first, second


class TestAMachine:
    def test_takes_runs_of_two_workers_while_both_fit(self, engine: Engine) -> None:
        first, second = two_workers(engine)
        runs = [add_run(engine, requirements=HALF).id for _ in range(2)]
        assert [claim(engine, first).id, claim(engine, second).id] == runs

    def test_is_full_for_the_second_worker_until_the_run_of_the_first_has_ended(self, engine: Engine) -> None:
        first, second = two_workers(engine)
        large, small, unknown = (add_run(engine, requirements=needs).id for needs in (MOST, HALF, {}))
        assert claim(engine, first).id == large
        assert claim(engine, second).id == unknown, "nothing is known of its need"
        with engine.begin() as connection:
            connection.execute(machine.complete(unknown, 1, None, "done")).one()
        assert claim(engine, second) is None
        with engine.begin() as connection:
            connection.execute(machine.complete(large, 1, None, "done")).one()
        assert claim(engine, second).id == small

    def test_is_not_claimed_twice_by_claims_at_the_same_time(self, engine: Engine) -> None:
        workers = two_workers(engine)
        for _ in range(10):
            runs = [add_run(engine, requirements=MOST).id for _ in range(2)]
            with ThreadPoolExecutor(2) as threads:
                claimed = [row.id for row in threads.map(lambda worker: claim(engine, worker), workers) if row]
            assert len(claimed) == 1
            with engine.begin() as connection:
                connection.execute(machine.complete(claimed[0], 1, None, "done")).one()
                for run_id in {*runs} - {*claimed}:
                    connection.execute(machine.request_stop(run_id, "discard")).one()

    def test_that_is_another_one_has_its_own_memory(self, engine: Engine) -> None:
        runs = [add_run(engine, requirements=MOST).id for _ in range(2)]
        assert [claim(engine, add_worker(engine)).id for _ in runs] == runs

    def test_does_not_share_the_memory_of_gpus(self, engine: Engine) -> None:
        runs = [add_run(engine, requirements=MOST).id for _ in range(2)]
        assert [claim(engine, worker).id for worker in two_workers(engine, "cuda")] == runs
