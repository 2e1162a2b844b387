"""Resuming: a new run that goes on where the old one, or those before it, has a good checkpoint."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, func, text, update

from anneal.contracts.schemas.runs.placement import Resources
from app.config import Settings
from app.infra.ids import new_id
from app.runs.creating import resume as resuming_runs
from app.tables.runs import Run
from tests.factories import Trainer, count_runs, make_dataset, make_model, make_run, mark_checkpoint
from tests.rows import add_worker, events_of, run_row
from tests.server import ApiServer
from tests.waiting import HeldCalls


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


def resume(api: ApiServer, run_id: str, **body: Any) -> httpx.Response:
    return api.client.post(f"/v1/runs/{run_id}/resume", json=body)


def child_of(api: ApiServer, run_id: str, **body: Any) -> dict[str, Any]:
    answer = resume(api, run_id, **body)
    assert answer.status_code == 202, answer.text
    child: dict[str, Any] = answer.json()
    return child


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def stopped(api: ApiServer, engine: Engine, dataset: str, *steps: int, **body: Any) -> tuple[str, list[str]]:
    """A run that was stopped after checkpoints at these steps of 100; answers its id and theirs."""
    run_id = make_run(api.client, dataset, **body)["id"]
    trainer = Trainer(engine, run_id, devices=body.get("resources", {}).get("devices", 1)).begin(total=100)
    saved = [trainer.checkpoint(step) for step in steps]
    api.client.post(f"/v1/runs/{run_id}/stop")
    trainer.cancel()
    return run_id, saved


class TestDeletionMeanwhile:
    """A resume computes without a lock on the run, which it takes again before it creates the child."""

    def test_resume_of_a_run_deleted_meanwhile_is_refused_with_the_reason(
        self, api: ApiServer, engine: Engine, dataset: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parent, _ = stopped(api, engine, dataset, 20)
        held = HeldCalls(monkeypatch, resuming_runs, "_merge_configuration")
        with ThreadPoolExecutor(1) as clients:
            resuming = clients.submit(resume, api, parent)
            assert held.started.wait(30)
            assert api.client.delete(f"/v1/runs/{parent}").status_code == 204
            held.go_on.set()
            assert refused(resuming.result()) in [(404, "run_not_found"), (409, "no_checkpoint")]
        assert count_runs(engine) == 0


class TestChild:
    def test_resumed_run_is_a_new_run_with_parent_and_checkpoint(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        parent, (_, newest) = stopped(api, engine, dataset, 20, 40, name="mine", tags=["t"], priority=3)
        answer = resume(api, parent)
        child = answer.json()
        assert answer.status_code == 202 and answer.headers["location"] == f"/v1/runs/{child['id']}"
        assert child["id"] != parent and child["status"] == "pending"
        assert (child["parent_run_id"], child["resume_checkpoint_id"], child["current_step"]) == (parent, newest, 40)
        assert (child["name"], child["tags"], child["priority"], child["dataset_id"]) == ("mine", ["t"], 3, dataset)
        assert child["config"] == api.client.get(f"/v1/runs/{parent}").json()["config"]
        (event,) = events_of(engine, child["id"])
        assert parent in event.data["reason"] and "step 40" in event.data["reason"]
        assert [run["id"] for run in api.client.get("/v1/runs", params={"parent_run_id": parent}).json()["data"]] == [
            child["id"]
        ]

    def test_resumed_run_keeps_the_loss_of_an_older_version(self, api: ApiServer, engine: Engine) -> None:
        parent, _ = stopped(api, engine, make_dataset(engine, "prompt_completion"), 20)
        stored = {**run_row(engine, parent).config, "loss_on": "all"}  # the default of that version
        with engine.begin() as connection:
            connection.execute(update(Run).where(Run.id == parent).values(config=stored))
        child = child_of(api, parent)
        assert child["config"]["loss_on"] == "all"
        assert "loss_on" not in run_row(engine, child["id"]).user_set_fields

    def test_resume_needs_no_body(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        parent, _ = stopped(api, engine, dataset, 20)
        assert api.client.post(f"/v1/runs/{parent}/resume").status_code == 202

    def test_resume_uses_the_requested_checkpoint(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        parent, (first, _) = stopped(api, engine, dataset, 20, 40)
        child = child_of(api, parent, checkpoint_id=first)
        assert (child["resume_checkpoint_id"], child["current_step"]) == (first, 20)
        shown = api.client.get(f"/v1/runs/{parent}").json()["checkpoint_path"]
        newest = child_of(api, parent, checkpoint_path=shown)
        earlier = child_of(api, parent, checkpoint_path=shown.replace(f"-{newest['current_step']}", "-20"))
        assert newest["current_step"] > 20 and earlier["resume_checkpoint_id"] == first

    def test_passes_over_checkpoints_that_are_damaged_or_deleted(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        parent, (good, bad, gone) = stopped(api, engine, dataset, 20, 40, 60)
        mark_checkpoint(engine, bad, bad_reason="weights.safetensors has another hash")
        mark_checkpoint(engine, gone, deleted_at=func.now())
        assert child_of(api, parent)["resume_checkpoint_id"] == good
        for checkpoint, why in ((bad, "another hash"), (gone, "deleted")):
            answer = resume(api, parent, checkpoint_id=checkpoint)
            assert refused(answer) == (422, "checkpoint_unusable")
            assert why in answer.json()["errors"][0]["message"]

    def test_merges_changes_and_remembers_all_that_was_ever_given(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        config = {"base_model": "any", "lora_r": 8, "extra": {"steps": 50}}
        parent, _ = stopped(api, engine, dataset, 20, config=config)
        child = child_of(api, parent, config={"learning_rate": 0.001, "epochs": 9})
        assert (child["config"]["learning_rate"], child["config"]["epochs"], child["config"]["lora_r"]) == (0.001, 9, 8)
        assert run_row(engine, child["id"]).user_set_fields == [
            "base_model",
            "epochs",
            "extra.steps",
            "learning_rate",
            "lora_r",
        ]

    def test_epochs_replace_the_max_steps_of_the_parent(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        """Else the request would change nothing, since `max_steps` takes precedence."""
        config = {"base_model": "any", "max_steps": 90}
        parent, _ = stopped(api, engine, dataset, 50, config=config)  # the checkpoint is at epoch 0.5
        child = child_of(api, parent, config={"epochs": 0.6})
        assert (child["config"]["epochs"], child["config"]["max_steps"]) == (0.6, None)
        assert child_of(api, parent, config={"epochs": 2, "max_steps": 70})["config"]["max_steps"] == 70
        answer = resume(api, parent, config={"epochs": 0.4})
        assert refused(answer) == (422, "nothing_left_to_train")
        assert "at epoch 0.5 is at or after the last epoch, 0.4" in answer.json()["detail"]

    def test_resume_of_a_run_without_checkpoints_uses_its_starting_checkpoint(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        first, (old, start, newer) = stopped(api, engine, dataset, 20, 40, 60)
        second = child_of(api, first, checkpoint_id=start)["id"]
        Trainer(engine, second).begin(step=40).fail()
        third = child_of(api, second)
        assert (third["resume_checkpoint_id"], third["parent_run_id"]) == (start, second)
        mark_checkpoint(engine, start, bad_reason="torn")
        Trainer(engine, third["id"]).fail()
        fourth = child_of(api, third["id"])
        assert fourth["resume_checkpoint_id"] == old, f"not {newer}: it lies behind where the chain branched off"
        Trainer(engine, fourth["id"]).fail()
        assert child_of(api, fourth["id"], checkpoint_id=old)["current_step"] == 20

    def test_resume_from_start_uses_no_checkpoint(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        parent, _ = stopped(api, engine, dataset, 20)
        child = child_of(api, parent, **{"from": "start"})
        assert (child["resume_checkpoint_id"], child["current_step"], child["parent_run_id"]) == (None, 0, parent)


class TestRefusals:
    def test_a_run_that_has_not_ended_is_a_conflict_that_names_its_state(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id = make_run(api.client, dataset)["id"]
        assert refused(resume(api, run_id)) == (409, "run_is_live")
        assert "pending" in resume(api, run_id).json()["detail"]
        Trainer(engine, run_id).begin()
        assert "running" in resume(api, run_id).json()["detail"]

    def test_resume_without_a_checkpoint_says_how_to_start_over(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        parent, _ = stopped(api, engine, dataset)
        answer = resume(api, parent)
        assert refused(answer) == (409, "no_checkpoint")
        assert '{"from": "start"}' in answer.json()["detail"]
        assert child_of(api, parent, **{"from": "start"})["current_step"] == 0

    def test_resume_of_a_completed_run_needs_steps_left(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        run_id = make_run(api.client, dataset)["id"]
        trainer = Trainer(engine, run_id).begin(total=100)
        middle = trainer.checkpoint(50)
        trainer.checkpoint(100, kind="final")
        trainer.complete()
        answer = resume(api, run_id)
        assert refused(answer) == (422, "nothing_left_to_train")
        assert "step 100" in answer.json()["detail"]
        assert refused(resume(api, run_id, config={"learning_rate": 0.1})) == (422, "nothing_left_to_train")
        assert refused(resume(api, run_id, config={"max_steps": 100})) == (422, "nothing_left_to_train")
        assert child_of(api, run_id, config={"epochs": 6})["current_step"] == 100
        assert child_of(api, run_id, config={"max_steps": 101})["current_step"] == 100
        assert child_of(api, run_id, checkpoint_id=middle)["current_step"] == 50
        assert child_of(api, run_id, **{"from": "start"})["current_step"] == 0

    def test_a_run_that_completed_at_its_stop_at_step_goes_on_when_that_is_raised(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        run_id = make_run(api.client, dataset, config={"stop_at_step": 40})["id"]
        trainer = Trainer(engine, run_id).begin(total=100)
        trainer.checkpoint(40, kind="stop")
        trainer.complete()
        assert refused(resume(api, run_id)) == (422, "nothing_left_to_train")
        assert child_of(api, run_id, config={"stop_at_step": None})["current_step"] == 40
        assert child_of(api, run_id, config={"stop_at_step": 60})["current_step"] == 40
        assert child_of(api, run_id, stop_after_steps=5)["config"]["stop_at_step"] == 45
        assert child_of(api, run_id, stop_after_steps=5, **{"from": "start"})["config"]["stop_at_step"] == 5
        both = resume(api, run_id, stop_after_steps=5, config={"stop_at_step": 60})
        assert both.status_code == 422 and "leave one of them out" in both.json()["detail"]
        assert resume(api, run_id, stop_after_steps=0).status_code == 422

    def test_what_was_learned_so_far_depends_on_cannot_change(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        parent, _ = stopped(api, engine, dataset, 20)
        answer = resume(api, parent, config={"lora_r": 64, "seed": 1, "learning_rate": 0.1})
        assert refused(answer) == (422, "not_changeable_on_resume")
        assert {error["field"] for error in answer.json()["errors"]} == {"config.lora_r", "config.seed"}
        child_of(api, parent, config={"lora_r": 16, "seed": 42})

    def test_changes_on_resume_are_validated_like_any_configuration(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        parent, _ = stopped(api, engine, dataset, 20)
        answer = resume(api, parent, config={"epochs": -1, "learning_rte": 1, "eval_steps": 5})
        assert answer.status_code == 422
        assert {(it["field"], it["code"]) for it in answer.json()["errors"]} == {
            ("config.epochs", "out_of_range"),
            ("config.learning_rte", "unknown_field"),
            ("config.eval_steps", "needs_eval_data"),
        }

    def test_resume_on_other_devices_keeps_completions_and_whole_groups(
        self, api: ApiServer, engine: Engine, settings: Settings
    ) -> None:
        make_model(settings)
        rewards = [{"type": "length", "max": 8}]
        config = {
            "base_model": "tiny", "method": "rlhf", "batch_size": 4, "gradient_accumulation_steps": 4,
            "max_seq_length": 64, "rlhf": {"num_generations": 8, "max_completion_length": 8, "rewards": rewards},
        }  # fmt: skip
        prompts = make_dataset(engine, "prompt", ("prompt",))
        parent, _ = stopped(api, engine, prompts, 20, backend="celery", config=config)
        add_worker(engine, devices=4, backends=["celery"])
        child = child_of(api, parent, resources={"devices": 2})
        assert (child["config"]["gradient_accumulation_steps"], child["resources"]["devices"]) == (2, 2)
        (error,) = resume(api, parent, resources={"devices": "all"}).json()["errors"]
        assert error["field"] == "resources.devices"
        assert "16 completions in groups of 8" in error["message"] and error["message"].endswith("on 1, 2 devices")

    def test_a_checkpoint_of_another_run_is_refused(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        parent, _ = stopped(api, engine, dataset, 20)
        _, (foreign,) = stopped(api, engine, dataset, 20)
        for checkpoint in (foreign, new_id("ckpt"), "checkpoint-20"):
            assert refused(resume(api, parent, checkpoint_id=checkpoint)) == (422, "checkpoint_not_found")

    def test_a_checkpoint_and_a_start_from_nothing_exclude_each_other(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        parent, (saved,) = stopped(api, engine, dataset, 20)
        for named in ({"checkpoint_path": "/x", "from": "start"}, {"checkpoint_id": saved, "checkpoint_path": "/x"}):
            (error,) = resume(api, parent, **named).json()["errors"]
            assert error["code"] == "conflict" and error["field"] == next(iter(named))
        for path in ("/etc", "/", "", "runs/x/y", f"/a/{parent}/a1/checkpoint-20", "x" * 5000):
            assert refused(resume(api, parent, checkpoint_path=path))[0] == 422
        answer = resume(api, parent, checkpoint_id=saved, **{"from": "start"})
        assert answer.status_code == 422 and answer.json()["errors"][0]["code"] == "conflict"

    def test_bad_bodies_and_unknown_runs_make_nothing(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        parent, _ = stopped(api, engine, dataset, 20)
        for wrong in ({"from": "end"}, {"from_": "start"}, {"config": []}, {"step": 3}, {"checkpoint_id": 5}):
            assert resume(api, parent, **wrong).status_code == 422
        assert refused(resume(api, new_id("run"))) == (404, "run_not_found")
        assert count_runs(engine) == 1


class TestIdempotency:
    def test_the_same_key_answers_the_same_child(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        parent, _ = stopped(api, engine, dataset, 20)
        other, _ = stopped(api, engine, dataset, 20)
        headers = {"Idempotency-Key": "once"}
        path = f"/v1/runs/{parent}/resume"
        first, second = (api.client.post(path, headers=headers, json={}) for _ in range(2))
        assert first.json()["id"] == second.json()["id"]
        assert refused(api.client.post(f"/v1/runs/{other}/resume", headers=headers, json={})) == (
            422,
            "idempotency_key_reused",
        )
        assert count_runs(engine) == 3


def test_a_default_that_the_requested_cpu_replaces_conflicts_with_no_resume(
    api: ApiServer, engine: Engine, dataset: str
) -> None:
    config = {"base_model": "org/model", "method": "full"}
    parent, _ = stopped(api, engine, dataset, 20, backend="celery", config=config)
    assert run_row(engine, parent).config["optim"] == "paged_adamw_8bit"
    assert child_of(api, parent, resources={"kind": "cpu"})["resources"]["kind"] == "cpu"


def test_a_divided_model_keeps_its_optimizer_and_the_decision(api: ApiServer, engine: Engine, dataset: str) -> None:
    add_worker(engine, backends=["celery"], memory_mb=[80_000] * 2)
    request: dict[str, Any] = {"backend": "celery", "config": {"base_model": "org/model", "method": "full"}}
    divided = {"devices": 2, "sharding": "full"}
    parent, _ = stopped(api, engine, dataset, 20, **request, resources=divided)
    for resources, sharded in ((None, True), ({"devices": 1}, False), ({"devices": 2, "sharding": "none"}, False)):
        child = child_of(api, parent, resources=resources)
        assert (child["requirements"]["sharded"], child["config"]["optim"]) == (sharded, "adamw_torch_fused")
    replicas, _ = stopped(api, engine, dataset, 20, **request, resources={"devices": 2}, priority=1)
    (error,) = resume(api, replicas, resources=divided).json()["errors"]
    assert error["field"] == "resources.sharding" and "paged_adamw_8bit" in error["message"]
    assert not child_of(api, replicas)["requirements"]["sharded"]
    assert child_of(api, replicas, **{"from": "start"}, resources=divided)["requirements"]["sharded"]


def test_a_divided_run_of_which_nothing_more_is_known_stays_divided_on_other_devices(
    api: ApiServer, engine: Engine, dataset: str
) -> None:
    """The model is on the hub: a replica fitted no device when its configuration was fetched for the first run."""
    add_worker(engine, backends=["celery"], memory_mb=[80_000] * 4)
    config = {"base_model": "org/model", "method": "lora", "gradient_accumulation_steps": 4}
    parent, _ = stopped(api, engine, dataset, 20, backend="celery", config=config, resources={"devices": 4})
    with engine.begin() as connection:
        decided = text("UPDATE runs SET requirements = requirements || '{\"sharded\": true}' WHERE id = :id")
        connection.execute(decided, {"id": parent})
    for resources, sharded in (
        ({"devices": 2}, True),
        ({"devices": 2, "sharding": "none"}, False),
        ({"devices": 1}, False),
    ):
        assert child_of(api, parent, resources=resources)["requirements"]["sharded"] is sharded, resources


def test_a_step_of_devices_that_share_sequences_keeps_its_rows(api: ApiServer, engine: Engine, dataset: str) -> None:
    """Four devices in pairs have the rows of two, so the pairs may be parted only if a step still has as many rows."""
    add_worker(engine, backends=["celery"], memory_mb=[80_000] * 4)
    config = {"base_model": "org/model", "method": "lora", "batch_size": 2, "gradient_accumulation_steps": 3}
    pairs = {"devices": 4, "sequence_parallel": 2}
    parent, _ = stopped(api, engine, dataset, 20, backend="celery", config=config, resources=pairs)
    for resources, micro_batches in (
        ({}, 3), ({"devices": 2, "sequence_parallel": 1}, 3), ({"devices": 2}, 6),
        ({"devices": 1, "sequence_parallel": 1}, 6),
    ):  # fmt: skip
        child = child_of(api, parent, resources=resources)
        assert child["config"]["gradient_accumulation_steps"] == micro_batches, resources
        parts = child["resources"]["sequence_parallel"]
        assert child["requirements"]["sequence_parallel"] == parts == resources.get("sequence_parallel", 2)
    (error,) = resume(api, parent, resources={"sequence_parallel": 1}).json()["errors"]
    assert error["field"] == "resources.devices" and "on 1, 2, 3, 6 devices" in error["message"]
    (error,) = resume(api, parent, resources={"devices": 2, "sequence_parallel": 4}).json()["errors"]
    assert error["field"] == "resources.sequence_parallel" and "use one of 1, 2," in error["message"]


def test_devices_that_no_run_can_have_are_neither_named_nor_looked_at(
    api: ApiServer, engine: Engine, dataset: str
) -> None:
    """With the largest step there is, the search over its rows took minutes, in which the API answered nothing."""
    add_worker(engine, backends=["celery"], memory_mb=[80_000] * 4)
    config = {"base_model": "org/model", "method": "lora", "batch_size": 64, "gradient_accumulation_steps": 65_536}
    parent, _ = stopped(api, engine, dataset, 20, backend="celery", config=config)
    (error,) = resume(api, parent, resources={"devices": 3}).json()["errors"]
    assert error["message"].endswith("256, 512, 1024 devices")


def test_a_step_that_would_need_more_micro_batches_than_a_run_may_have_is_refused(
    api: ApiServer, engine: Engine, dataset: str
) -> None:
    add_worker(engine, backends=["celery"], memory_mb=[80_000] * 4)
    config = {"base_model": "org/model", "method": "lora", "batch_size": 1, "gradient_accumulation_steps": 40_000}
    parent, _ = stopped(api, engine, dataset, 20, backend="celery", config=config, resources={"devices": 4})
    (error,) = resume(api, parent, resources={"devices": 2}).json()["errors"]
    assert (error["field"], error["code"]) == ("resources.devices", "does_not_divide")
    assert "on 4, 5, 8, 10," in error["message"]


def test_a_resume_changes_the_resources_that_it_names_and_keeps_the_others(
    api: ApiServer, engine: Engine, dataset: str
) -> None:
    add_worker(engine, 2, backends=["celery"])
    resources = {"kind": "cuda", "memory_mb": 500, "sharding": "none", "devices": 2}
    config = {"base_model": "org/model", "method": "lora", "batch_size": 2, "gradient_accumulation_steps": 2}
    parent, _ = stopped(api, engine, dataset, 20, backend="celery", config=config, resources=resources)
    child = child_of(api, parent, resources={"devices": 1, "memory_mb": None})["resources"]
    assert child == {**run_row(engine, parent).resources, "devices": 1, "memory_mb": None}
    assert (child["kind"], child["sharding"]) == ("cuda", "none")
    (error,) = resume(api, parent, resources={"labels": ["site-b"]}).json()["errors"]
    assert error["code"] == "unknown_label"


def test_null_resets_any_resource_of_a_resumed_run(api: ApiServer, engine: Engine, dataset: str) -> None:
    add_worker(engine, 2, backends=["celery"])
    resources = Resources(
        kind="cuda", gpu="h100", memory_mb=500, hosts=2, devices=4, sharding="full", sequence_parallel=2,
        expert_parallel=2, labels=["site-b"],
    )  # fmt: skip
    config = {"base_model": "org/model", "method": "lora", "batch_size": 2, "gradient_accumulation_steps": 2}
    parent, _ = stopped(api, engine, dataset, 20, backend="celery", config=config)
    with engine.begin() as connection:
        connection.execute(update(Run).where(Run.id == parent).values(resources=resources.model_dump()))
    child = child_of(api, parent, resources=dict.fromkeys(Resources.model_fields))
    assert child["resources"] == Resources().model_dump()
    (error,) = resume(api, parent, resources={"device": None}).json()["errors"]
    assert (error["field"], error["code"]) == ("resources.device", "extra_forbidden")


def test_a_run_whose_devices_share_experts_keeps_that_or_is_divided_otherwise(
    api: ApiServer, engine: Engine, dataset: str
) -> None:
    add_worker(engine, backends=["celery"], memory_mb=[80_000] * 4)
    config = {"base_model": "org/model", "method": "full", "batch_size": 1, "gradient_accumulation_steps": 4}
    pairs = {"devices": 4, "expert_parallel": 2}
    parent, _ = stopped(api, engine, dataset, 20, backend="celery", config=config, resources=pairs)
    for resources, sharded, experts, micro_batches in (
        (None, True, 2, 4), ({"devices": 2}, True, 2, 8), ({"devices": 1, "expert_parallel": 1}, False, 1, 16),
        ({"expert_parallel": 1, "sharding": "full"}, True, 1, 4),
    ):  # fmt: skip
        child = child_of(api, parent, **({} if resources is None else {"resources": resources}))
        needs = child["requirements"]
        assert (needs["sharded"], needs["expert_parallel"]) == (sharded, experts), resources
        assert child["config"]["gradient_accumulation_steps"] == micro_batches
    (error,) = resume(api, parent, resources={"devices": 4, "expert_parallel": 3}).json()["errors"]
    assert (error["field"], error["code"]) == ("resources.expert_parallel", "does_not_divide")
