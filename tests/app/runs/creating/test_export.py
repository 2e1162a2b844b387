"""Exports and downloads of checkpoints over the API; `tests/e2e/test_run.py` has one from the checkpoint to a model."""

import io
import tarfile
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from app.infra.ids import new_id
from app.infra.storage import Storage
from tests.factories import Trainer, make_dataset, make_run, mark_checkpoint, mark_run
from tests.rows import add_worker, run_row
from tests.server import ApiServer

CONFIG = {"base_model": "tiny", "method": "lora", "report_to": ["tensorboard"]}


def trained(api: ApiServer, engine: Engine, **config: Any) -> Trainer:
    body = {"backend": "celery", "config": {**CONFIG, **config}}
    return Trainer(engine, make_run(api.client, make_dataset(engine), **body)["id"]).begin()


def export(api: ApiServer, run_id: str, checkpoint_id: str, **body: Any) -> httpx.Response:
    return api.client.post(f"/v1/runs/{run_id}/checkpoints/{checkpoint_id}/export", json=body)


class TestExport:
    @pytest.mark.parametrize("end", ["complete", "fail", "cancel_on_request"])
    def test_export_is_a_new_run_however_the_source_ended(self, api: ApiServer, engine: Engine, end: str) -> None:
        trainer = trained(api, engine)
        saved = trainer.checkpoint(40)
        getattr(trainer, end)()
        answer = export(api, trainer.run_id, saved, output="merged", name="the best")
        assert answer.status_code == 202, answer.text
        run = answer.json()
        assert answer.headers["location"] == f"/v1/runs/{run['id']}"
        assert (run["status"], run["name"], run["parent_run_id"]) == ("pending", "the best", trainer.run_id)
        assert run["current_step"] == 40
        assert run["config"]["output"] == "merged" and run["task"] == "export"
        assert (run["config"]["report_to"], run["config"]["push_to_hub"]) == ([], None)
        assert run_row(engine, run["id"]).resume_checkpoint_id == saved
        # Its checkpoint and its source are kept for it.
        assert api.client.delete(f"/v1/runs/{trainer.run_id}").status_code == 409

    def test_the_same_idempotency_key_makes_one(self, api: ApiServer, engine: Engine) -> None:
        trainer = trained(api, engine)
        path = f"/v1/runs/{trainer.run_id}/checkpoints/{trainer.checkpoint(40)}/export"
        trainer.fail()
        run_ids = {api.client.post(path, headers={"Idempotency-Key": "one"}).json()["id"] for _ in range(2)}
        assert len(run_ids) == 1

    def test_export_is_refused_with_the_reason(self, api: ApiServer, engine: Engine) -> None:
        trainer = trained(api, engine)
        saved, bad = trainer.checkpoint(40), trainer.checkpoint(50)
        mark_checkpoint(engine, bad, bad_reason="weights have another hash")

        def refusal(answer: httpx.Response) -> tuple[int, str, str]:
            problem = answer.json()
            return answer.status_code, problem["code"], (problem.get("errors") or [{"field": ""}])[0]["field"]

        assert refusal(export(api, trainer.run_id, saved)) == (409, "run_is_live", "")
        trainer.fail()
        assert refusal(export(api, trainer.run_id, bad)) == (409, "checkpoint_unusable", "")
        assert refusal(export(api, trainer.run_id, new_id("ckpt"))) == (404, "checkpoint_not_found", "")
        assert export(api, trainer.run_id, saved, output="gguf").status_code == 422
        assert export(api, trainer.run_id, saved, name="").status_code == 422

        whole = trained(api, engine, method="full")
        saved = whole.checkpoint(40)
        whole.fail()
        assert refusal(export(api, whole.run_id, saved, output="merged"))[2] == "output"

        config = run_row(engine, whole.run_id).config
        outdated = config | {"extra": {"recipe": "distill"}}
        mark_run(engine, whole.run_id, config=outdated, user_set_fields=["extra.recipe"])
        assert refusal(export(api, whole.run_id, saved))[0::2] == (422, "extra.recipe")

        fake = Trainer(engine, make_run(api.client, make_dataset(engine))["id"]).begin()
        saved = fake.checkpoint(40)
        fake.fail()
        assert refusal(export(api, fake.run_id, saved))[2] == "checkpoint_id"

    def test_export_ignores_an_unknown_optimizer_of_another_version(self, api: ApiServer, engine: Engine) -> None:
        trainer = trained(api, engine, method="full")
        saved = trainer.checkpoint(40)
        trainer.fail()
        outdated = {"optim": "galore_adamw", "extra": {"optim_target_modules": ["q_proj"]}}
        config = run_row(engine, trainer.run_id).config | outdated
        mark_run(engine, trainer.run_id, config=config, user_set_fields=["optim", "extra.optim_target_modules"])
        assert export(api, trainer.run_id, saved).status_code == 202

    def test_a_gguf_file_needs_a_merged_model_and_a_worker_that_can_write_it(
        self, api: ApiServer, engine: Engine
    ) -> None:
        trainer = trained(api, engine)
        saved = trainer.checkpoint(40)
        trainer.fail()

        def refusal(**body: Any) -> tuple[str, str]:
            answer = export(api, trainer.run_id, saved, **body)
            (error,) = answer.json()["errors"]
            assert (answer.status_code, error["field"]) == (422, "gguf")
            return error["code"], error["message"]

        code, message = refusal(gguf="Q8_0", output="adapter")
        assert code == "conflict" and "set `output` to `merged`" in message
        add_worker(engine, backends=["celery"])
        code, message = refusal(gguf="Q8_0")
        assert code == "gguf_converter_missing"
        assert "git clone https://github.com/ggml-org/llama.cpp" in message and "ANNEAL_GGUF_CONVERTER" in message
        add_worker(engine, backends=["celery"], gguf=True)
        answer = export(api, trainer.run_id, saved, gguf="q8_0")
        assert answer.status_code == 202, answer.text
        config, needs = answer.json()["config"], answer.json()["requirements"]
        assert (config["gguf"], config["output"]) == ("Q8_0", "merged")
        assert (needs["gguf"], needs["gguf_quantizer"]) == (True, False)
        assert not run_row(engine, trainer.run_id).requirements.get("gguf")

        code, message = refusal(gguf="Q4_K_M")
        assert code == "gguf_quantizer_missing" and "ANNEAL_GGUF_QUANTIZER" in message and "`Q8_0`" in message
        code, message = refusal(gguf="IQ2_XS")
        assert code == "needs_importance_matrix" and "use `Q2_K`" in message
        assert refusal(gguf="Q4_K_L")[0] == "literal_error"
        add_worker(engine, backends=["celery"], gguf=True, gguf_quantizer=True)
        answer = export(api, trainer.run_id, saved, gguf="Q4_K_M")
        assert answer.status_code == 202 and answer.json()["requirements"]["gguf_quantizer"], answer.text
        workers = api.client.get("/v1/workers").json()["data"]
        assert {(one["gguf"], one["gguf_quantizer"]) for one in workers} >= {
            (False, False),
            (True, False),
            (True, True),
        }


class TestDownload:
    def test_checkpoint_download_is_an_archive_without_links(self, api: ApiServer, engine: Engine) -> None:
        trainer = trained(api, engine)
        saved, missing = trainer.checkpoint(40), trainer.checkpoint(50)
        folder = Storage(api.settings).named_checkpoint(trainer.run_id, 1, "checkpoint-40")
        folder.mkdir(parents=True)
        (folder / "weights.bin").write_bytes(bytes(1000))
        (folder / "link").symlink_to("/etc/passwd")
        path = f"/v1/runs/{trainer.run_id}/checkpoints"
        answer = api.client.get(f"{path}/{saved}/download")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-tar")
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
            assert {one.name: one.size for one in tar} == {f"{saved}/weights.bin": 1000}
        answer = api.client.get(f"{path}/{missing}/download")
        assert (answer.status_code, answer.json()["code"]) == (404, "artifacts_missing")
