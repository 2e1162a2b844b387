"""Runs on a real Ray cluster of two nodes: trained, stopped, resumed and disturbed; only PostgreSQL says who trains."""

import time
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.ray_stack import LONG, STEPS, RayStack
from tests.ray_cluster import TOKEN, RayNode
from tests.stack import assert_attempts_never_overlap, is_alive, pids_of_trainers
from tests.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

FROZEN_SECONDS = 100


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayStack]:
    stack = RayStack(tmp_path_factory.mktemp("ray"))
    yield stack
    stack.close()


@pytest.fixture(scope="module")
def undisturbed(service: RayStack) -> str:
    run_id = service.train()
    service.completed(run_id)
    return run_id


@pytest.fixture
def stack(service: RayStack) -> Iterator[RayStack]:
    """With two nodes and nothing in training, also after a failure."""
    yield service
    service.settle()


def node_of(stack: RayStack, run_id: str) -> tuple[RayNode, int]:
    """The node that trains a run, and its trainer."""
    pid = pids_of_trainers(stack.journal(run_id))[-1]
    return next(node for node in stack.cluster.nodes if node.holds(pid)), pid


def assert_trained_once(stack: RayStack, run_id: str) -> None:
    assert_attempts_never_overlap(stack.journal(run_id))
    attempts = [event["attempt"] for event in stack.events(run_id) if event["type"] == "status"]
    assert attempts == sorted(attempts)


def test_a_run_trains_on_a_node_and_its_job_shows_no_secret(stack: RayStack, undisturbed: str) -> None:
    shown = stack.run(undisturbed)
    assert (shown["status"], shown["attempt"], shown["current_step"]) == ("completed", 1, STEPS)
    assert stack.reasons(undisturbed) == ["ray_placing"]
    job_id = f"anneal-{undisturbed}-0"
    job = eventually(lambda: (job := stack.cluster.jobs()[job_id])["status"] != "RUNNING" and job, what="the job ended")
    assert job["status"] == "SUCCEEDED", stack.logs(undisturbed)
    text = str(job) + stack.cluster.log_of(job_id)
    urls = (stack.settings.database_url, stack.settings.redis_url, TOKEN)
    assert not any(str(url) in text for url in urls)
    workers = [one for one in stack.client.get("/v1/workers").json()["data"] if one["backends"] == ["ray"]]
    assert workers and all("zone=a" in one["labels"] for one in workers)


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(stack: RayStack, undisturbed: str) -> None:
    run_id = stack.train()
    stack.until_step(run_id, 50, timeout=120)
    assert stack.stop(run_id).status_code == 202
    stack.until(run_id, "cancelled")
    answer = stack.client.post(f"/v1/runs/{run_id}/resume", json={})
    assert answer.status_code == 202, answer.text
    child = answer.json()["id"]
    stack.completed(child)
    assert {**stack.steps(run_id), **stack.steps(child)} == stack.steps(undisturbed)


def test_a_run_waits_until_ray_has_room_and_a_stop_withdraws_its_job(stack: RayStack) -> None:
    first = [stack.train(**LONG) for _ in range(2)]
    for run_id in first:
        stack.until_step(run_id, 1, timeout=180)
    waiting, stopped = stack.train(max_steps=3), stack.train(max_steps=3)
    jobs = stack.cluster.jobs
    for run_id in (waiting, stopped):
        eventually(lambda run_id=run_id: jobs().get(f"anneal-{run_id}-0", {}).get("status") == "RUNNING", timeout=60)
        assert stack.run(run_id)["pending_reason"]["code"] == "ray_placing"
    assert stack.stop(stopped).status_code == 202
    eventually(lambda: jobs()[f"anneal-{stopped}-0"]["status"] == "STOPPED", timeout=30, what="its job is stopped")
    assert stack.stop(first[0]).status_code == 202
    stack.completed(waiting)


def test_a_node_that_dies_loses_its_run_to_another(stack: RayStack, undisturbed: str) -> None:
    run_id = stack.train()
    stack.until_step(run_id, 45, timeout=120)
    node, pid = node_of(stack, run_id)
    node.raylet.kill()
    eventually(lambda: not is_alive(pid), timeout=30, what="the trainer of the dead node is gone")
    shown = stack.completed(run_id)
    assert shown["attempt"] == 2 and stack.steps(run_id) == stack.steps(undisturbed)
    assert_trained_once(stack, run_id)
    stack.replace(node)


def test_a_frozen_node_keeps_its_run_as_long_as_the_lease_is_renewed(stack: RayStack) -> None:
    """Ray declares it dead after a minute, and its processes go on: nothing else trains the run meanwhile."""
    run_id = stack.train(**LONG, time_limit_seconds=FROZEN_SECONDS + 50)
    stack.until_step(run_id, 20, timeout=120)
    node, pid = node_of(stack, run_id)
    raylet: psutil.Process = node.raylet
    began = time.monotonic()
    raylet.suspend()
    job = f"anneal-{run_id}-0"
    eventually(lambda: stack.cluster.jobs()[job]["status"] == "FAILED", timeout=95, what="Ray gives up the node")
    given_up = time.monotonic() - began
    step = stack.run(run_id)["current_step"]
    eventually(lambda: time.monotonic() - began > FROZEN_SECONDS, timeout=FROZEN_SECONDS, what="frozen long enough")
    shown = stack.run(run_id)
    assert is_alive(pid) and (shown["status"], shown["attempt"]) == ("running", 1), given_up
    assert shown["current_step"] > step and pids_of_trainers(stack.journal(run_id)) == [pid]
    raylet.resume()  # it learns that it is dead, and ends its workers
    stack.until_step(run_id, shown["current_step"] + 1)
    eventually(lambda: stack.run(run_id)["attempt"] == 2, timeout=120, what="another node trains the run")
    eventually(lambda: len(pids_of_trainers(stack.journal(run_id))) == 2, timeout=60)
    assert not is_alive(pid)
    assert stack.completed(run_id, timeout=240)["attempt"] == 2
    assert_trained_once(stack, run_id)
    stack.replace(node)


def test_a_job_that_is_stopped_in_ray_saves_and_the_run_continues(stack: RayStack, undisturbed: str) -> None:
    run_id = stack.train()
    stack.until_step(run_id, 45, timeout=120)
    answer = stack.cluster.client.post(f"/api/jobs/anneal-{run_id}-0/stop")
    assert answer.status_code == 200, answer.text
    shown = stack.completed(run_id)
    assert shown["attempt"] == 2 and stack.steps(run_id) == stack.steps(undisturbed)
    moves = [event["to"] for event in stack.events(run_id) if event["type"] == "status"]
    assert moves.count("pending") == 2, "created, and released"
    steps = [line["step"] for line in stack.journal(run_id) if line["event"] == "step"]
    assert steps == list(range(1, STEPS + 1)), "it has saved: nothing is trained again"
    assert_trained_once(stack, run_id)


def test_a_drained_node_saves_its_run_and_gets_no_other(stack: RayStack) -> None:
    """By the two commands of `docs/operations/ray.md`."""
    run_id = stack.train(**LONG)
    stack.until_step(run_id, 1, timeout=180)
    node, pid = node_of(stack, run_id)
    stack.cluster.drain(node)
    assert not is_alive(pid)
    eventually(lambda: len(pids_of_trainers(stack.journal(run_id))) == 2, timeout=120, what="it trains again")
    assert node_of(stack, run_id)[0] is not node
    seen = max(line["step"] for line in stack.journal(run_id) if line["event"] == "step")
    stack.until_step(run_id, seen + 1, timeout=60)
    steps = [line["step"] for line in stack.journal(run_id) if line["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1)), "it has saved: nothing is trained again"
    assert stack.run(run_id)["attempt"] == 2
    assert stack.stop(run_id, save_checkpoint=False).status_code == 202
    stack.until(run_id, "cancelled")
    assert_trained_once(stack, run_id)
    stack.replace(node)


def test_a_driver_that_is_killed_costs_a_loss(stack: RayStack, undisturbed: str) -> None:
    run_id = stack.train()
    stack.until_step(run_id, 45, timeout=120)
    (driver,) = [
        one for one in stack.cluster.head.processes()
        if "worker.ray_node" in (line := _cmdline(one)) and run_id in line and "sh" not in line[:1]
    ]  # fmt: skip
    driver.kill()
    assert stack.completed(run_id)["attempt"] == 2
    assert stack.steps(run_id) == stack.steps(undisturbed)
    assert_trained_once(stack, run_id)


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
