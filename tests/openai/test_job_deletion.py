"""A fine-tuning job is deleted with all its runs or not at all: it has the state of its newest run."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from sqlalchemy import Engine, select, update

from anneal.client.client import Anneal
from app.openai.ids import to_openai_id
from app.tables.runs import Run
from tests.app.uploads import lines
from tests.factories import make_experiment, mark_run
from tests.openai.test_files import CHAT, upload
from tests.openai.test_jobs import Jobs, runs_of
from tests.rows import add_run, waiting_for_locks
from tests.server import ApiServer
from tests.waiting import eventually


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


@pytest.fixture
def jobs(client: openai.OpenAI) -> Jobs:
    return Jobs(client, upload(client, lines(CHAT)).id)


@pytest.fixture
def job_id(client: openai.OpenAI, jobs: Jobs) -> str:
    """A paused job of three runs."""
    id: str = jobs.create().id
    for _ in range(2):
        client.fine_tuning.jobs.pause(id)
        client.fine_tuning.jobs.resume(id)
    client.fine_tuning.jobs.pause(id)
    return id


def delete(api: ApiServer, ids: list[str]) -> dict[str, tuple[str, str | None]]:
    answer = api.client.post("/v1/runs/delete", json={"ids": ids})
    assert answer.status_code == 200, answer.text
    return {run["id"]: (run["outcome"], run["code"]) for run in answer.json()["runs"]}


def test_run_of_a_job_is_not_deleted_without_the_others(
    api: ApiServer, client: openai.OpenAI, engine: Engine, job_id: str
) -> None:
    ids = runs_of(engine, job_id)
    for run_id in ids:
        refused = api.client.delete(f"/v1/runs/{run_id}")
        assert (refused.status_code, refused.json()["code"]) == (409, "run_is_of_job")
        assert f"anneal runs delete {' '.join(ids)}" in refused.json()["detail"]
    for some in (ids[:2], ids[1:], [ids[0], ids[2]]):
        assert delete(api, some) == dict.fromkeys(some, ("refused", "run_is_of_job"))
    assert runs_of(engine, job_id) == ids
    assert client.fine_tuning.jobs.retrieve(job_id).status == "paused"


def test_runs_of_a_job_are_deleted_by_a_request_that_names_all(
    api: ApiServer, client: openai.OpenAI, jobs: Jobs, engine: Engine, job_id: str
) -> None:
    ids, (ended,), (waiting,) = (runs_of(engine, it) for it in (job_id, jobs.create().id, jobs.create().id))
    client.fine_tuning.jobs.cancel(to_openai_id(ended))
    assert delete(api, [ended, *ids[::-1], waiting]) == {
        ended: ("changed", None), **dict.fromkeys(ids, ("changed", None)), waiting: ("refused", "run_is_live"),
    }  # fmt: skip
    with pytest.raises(openai.NotFoundError):
        client.fine_tuning.jobs.retrieve(job_id)
    assert [job.id for job in client.fine_tuning.jobs.list()] == [to_openai_id(waiting)]
    audited = {entry["resource"] for entry in api.client.get("/v1/audit").json()["data"]}
    assert {ended, *ids} <= audited


def test_job_is_kept_while_one_of_its_runs_is_live_pinned_or_needed(
    api: ApiServer, client: openai.OpenAI, engine: Engine, job_id: str
) -> None:
    newest, middle, first = ids = runs_of(engine, job_id)
    mark_run(engine, first, pinned=True)
    assert delete(api, ids) == dict.fromkeys(ids, ("refused", "run_is_pinned"))
    mark_run(engine, first, pinned=False)
    user = add_run(engine, base_run_id=middle).id
    assert delete(api, ids) == dict.fromkeys(ids, ("refused", "run_is_needed"))
    assert api.client.post(f"/v1/runs/{user}/stop").status_code == 202
    assert delete(api, [user]) == {user: ("changed", None)}
    client.fine_tuning.jobs.resume(job_id)
    ids = runs_of(engine, job_id)
    assert delete(api, ids) == dict.fromkeys(ids, ("refused", "run_is_live"))
    assert ids[1:] == [newest, middle, first] and runs_of(engine, job_id) == ids


def test_job_that_is_resumed_during_its_deletion_stays(api: ApiServer, engine: Engine, job_id: str) -> None:
    ids, child = runs_of(engine, job_id), add_run(engine).id
    with ThreadPoolExecutor(1) as pool, engine.connect() as resuming:
        resuming.execute(select(Run.id).where(Run.id == ids[0]).with_for_update(read=True, key_share=True))
        deleted = pool.submit(delete, api, ids)
        eventually(lambda: waiting_for_locks(engine) == 1, what="the deletion waits")
        resuming.execute(update(Run).where(Run.id == child).values(parent_run_id=ids[0], job_run_id=ids[-1]))
        resuming.commit()
        assert deleted.result() == dict.fromkeys(ids, ("refused", "run_is_of_job"))
    assert runs_of(engine, job_id) == [child, *ids]


def test_job_is_deleted_with_its_experiment(api: ApiServer, client: openai.OpenAI, jobs: Jobs, engine: Engine) -> None:
    experiment = make_experiment(engine)
    id = jobs.create(native={"experiment_id": experiment}).id
    client.fine_tuning.jobs.pause(id)
    client.fine_tuning.jobs.resume(id)
    path = f"/v1/experiments/{experiment}?cascade=true"
    assert api.client.delete(path).json()["code"] == "experiment_is_live"
    client.fine_tuning.jobs.cancel(id)
    assert len(runs_of(engine, id)) == 2
    assert api.client.delete(path).status_code == 204
    assert runs_of(engine, id) == []


def test_client_deletes_a_job_whose_runs_were_in_several_requests(
    api: ApiServer, client: openai.OpenAI, jobs: Jobs, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anneal.client.runs.MOST_RUNS", 2)
    id = jobs.create().id
    client.fine_tuning.jobs.pause(id)
    client.fine_tuning.jobs.resume(id)
    later = jobs.create().id
    for job_id in (id, later):
        client.fine_tuning.jobs.cancel(job_id)
    ids = [*runs_of(engine, id), *runs_of(engine, later)]
    with Anneal(api.url, api.key) as native:
        changes = native.runs.delete_many(ids)
    assert [(change.id, change.outcome) for change in changes.runs] == [(run_id, "changed") for run_id in ids]
    assert runs_of(engine, id) == runs_of(engine, later) == []
