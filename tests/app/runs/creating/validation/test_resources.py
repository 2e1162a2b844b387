"""Resources of a request are checked against the workers that are online: errors, warnings, and what is replaced."""

from typing import Any

import pytest
from sqlalchemy import Engine, update

from app.config import Settings
from app.tables.workers import Worker
from tests.factories import make_dataset, make_model, make_run
from tests.rows import add_worker
from tests.server import ApiServer

_LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


@pytest.fixture
def dataset(engine: Engine, settings: Settings) -> str:
    make_model(settings, "org/model")  # a folder, so that no request asks the hub
    return make_dataset(engine)


class TestMachine:
    WANTS_GPU = {"base_model": "org/model", "optim": "paged_adamw_32bit"}

    def check(self, api: ApiServer, dataset: str, config: dict[str, Any]) -> dict[str, Any]:
        answer = api.client.post("/v1/runs/validate", json={"dataset_id": dataset, "config": config})
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def test_without_a_worker_machine_questions_wait_and_a_warning_says_so(self, api: ApiServer, dataset: str) -> None:
        check = self.check(api, dataset, self.WANTS_GPU)
        assert check["valid"] and check["errors"] == []
        assert [warning["code"] for warning in check["warnings"]] == ["no_worker_online"]
        assert check["effective_config"]["optim"] == "paged_adamw_32bit"

    def test_an_option_that_no_online_worker_can_honor_is_refused(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        add_worker(engine, backends=["celery"])
        check = self.check(api, dataset, self.WANTS_GPU)
        assert not check["valid"] and check["effective_config"] is None
        assert [(it["field"], it["code"]) for it in check["errors"]] == [("config.optim", "not_on_this_machine")]

    @pytest.mark.parametrize("resources", [{"kind": "cuda"}, {"gpu": "h100"}])
    def test_a_run_that_asks_for_a_gpu_is_checked_for_a_gpu_while_only_cpus_are_online(
        self, api: ApiServer, engine: Engine, dataset: str, resources: dict[str, Any]
    ) -> None:
        add_worker(engine, backends=["celery"])
        config = {"base_model": "org/model", "method": "full", "activation_offload": True}
        body = {"dataset_id": dataset, "config": config, "resources": resources}
        result = api.client.post("/v1/runs/validate", json=body).json()
        assert result["errors"] == []
        chosen = {name: result["effective_config"][name] for name in ("dtype", "optim", "gradient_checkpointing")}
        assert chosen == {"dtype": "bfloat16", "optim": "paged_adamw_8bit", "gradient_checkpointing": True}
        assert [warning["field"] for warning in result["warnings"]] == ["resources"]

    def test_a_default_that_the_worker_cannot_honor_is_replaced_and_reported(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        add_worker(engine, backends=["celery"])
        check = self.check(api, dataset, {"base_model": "org/model", "method": "full"})
        assert check["valid"]
        assert check["effective_config"]["optim"] == "adamw_8bit"
        assert check["effective_config"]["learning_rate"] == 2e-5, "that of the method"
        assert "replaced" not in [it["code"] for it in check["warnings"]], "the request does not name it"
        named = {"base_model": "org/model", "method": "full", "optim": "paged_adamw_8bit"}
        warnings = self.check(api, dataset, named)["warnings"]
        assert [it["field"] for it in warnings if it["code"] == "replaced"] == ["config.optim"]

    def test_run_is_valid_if_one_worker_fits(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        add_worker(engine, backends=["celery"])
        gpu = add_worker(engine, backends=["celery"])
        with engine.begin() as connection:
            connection.exec_driver_sql("UPDATE devices SET kind = 'cuda' WHERE worker_id = %s", (gpu,))
        check = self.check(api, dataset, self.WANTS_GPU)
        assert check["valid"] and check["warnings"] == []

    def test_a_run_that_no_device_fits_is_valid_with_a_warning_that_says_what_to_do(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        add_worker(engine, backends=["celery"], kind="cuda", memory_mb=[24_000], labels=["site-a"])
        add_worker(engine, backends=["celery"], kind="cuda", memory_mb=[24_000], labels=["site-b"])
        body: dict[str, Any] = {"dataset_id": dataset, "config": {"base_model": "org/model"}}
        for resources, code, says in (
            ({"memory_mb": 80_000}, "no_device_fits", "asks for 80,000 MiB"),
            ({"labels": ["site-a", "site-b"]}, "no_worker_with_labels", "`site-b`"),
            ({"kind": "cpu"}, "no_device_of_kind", "`cpu`"),
            ({"memory_mb": 20_000}, None, ""),
        ):
            check = api.client.post("/v1/runs/validate", json=body | {"resources": resources}).json()
            warnings = [it for it in check["warnings"] if it["field"] == "resources"]
            assert check["valid"] and [it["code"] for it in warnings] == ([code] if code else [])
            assert all(says in it["message"] for it in warnings)

    def test_a_quota_that_is_smaller_than_the_run_is_a_warning_that_says_what_to_do(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        add_worker(engine, 8, backends=["celery"])
        key = api.client.post("/v1/keys", json={"name": "laptop", "scopes": ["write"], "max_devices": 2}).json()["key"]
        experiment = api.client.post("/v1/experiments", json={"name": "sweep", "max_devices": 3}).json()["id"]
        default = make_run(api.client, dataset)["experiment_id"]
        api.client.patch(f"/v1/experiments/{default}", json={"max_devices": 0})

        def warnings(devices: int, experiment_id: str | None) -> list[tuple[str, str, str]]:
            body = {"dataset_id": dataset, "config": {"base_model": "org/model"}, "resources": {"devices": devices}}
            with api.client_with(key) as client:
                assert client.patch(f"/v1/experiments/{experiment}", json={"max_devices": 3}).status_code == 200
                check = client.post("/v1/runs/validate", json=body | {"experiment_id": experiment_id}).json()
            assert check["valid"]
            return [(it["field"], it["code"], it["message"]) for it in check["warnings"]]

        def warning(needs: str, whose: str, says: str) -> tuple[str, str, str]:
            message = f"The run needs {needs}. The quota of {whose} at a time, so it cannot start: {says}"
            return ("resources.devices", "quota", message)

        fewer, larger = "create it with fewer devices, or ", "raise it with `anneal experiments edit --max-devices`."
        of_key = f"{fewer}ask an admin for a larger quota."
        assert warnings(2, experiment) == []
        assert warnings(3, experiment) == [warning("3 devices", "its API key is 2 devices", of_key)]
        assert warnings(4, experiment) == [
            warning("4 devices", "its API key is 2 devices", of_key),
            warning("4 devices", "experiment sweep is 3 devices", fewer + larger),
        ]
        assert warnings(1, None) == [warning("1 device", "experiment default is 0 devices", larger)]

    def test_a_gpu_that_no_worker_has_is_refused_with_those_that_there_are(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        def errors(**resources: Any) -> list[tuple[str, str]]:
            body = {"dataset_id": dataset, "config": {"base_model": "org/model"}, "resources": resources}
            check = api.client.post("/v1/runs/validate", json=body).json()
            assert all("`NVIDIA H200`" in it["message"] for it in check["errors"] if it["code"] == "unknown_gpu")
            return [(it["field"], it["code"]) for it in check["errors"]]

        assert errors(gpu="h200") == [], "no worker with a GPU is online yet"
        add_worker(engine, backends=["celery"], kind="cuda", memory_mb=[141_000], names=["NVIDIA H200"])
        assert errors(gpu="H200") == [] == errors(gpu="nvidia h200")
        assert errors(gpu="h20") == [("resources.gpu", "unknown_gpu")]
        assert ("resources.gpu", "conflict") in errors(gpu="h200", kind="cpu")

    def test_what_no_worker_has_is_refused_together_with_a_wrong_configuration(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        add_worker(engine, 8, backends=["celery"])
        add_worker(engine, 2, kind="cuda", backends=["celery"])
        body = {
            "dataset_id": dataset,
            "config": {"base_model": "org/model", "learning_rate": -1},
            "resources": {"kind": "cuda", "devices": 6, "hosts": 2},
        }
        problems = api.client.post("/v1/runs", json=body).json()["errors"]
        assert {(it["field"], it["code"]) for it in problems} >= {("resources.devices", "too_many_devices")}
        assert "config.learning_rate" in {it["field"] for it in problems}
        (too_many_message,) = (it["message"] for it in problems if it["code"] == "too_many_devices")
        assert "3 on each host" in too_many_message and "no 2 online workers each have more than 2" in too_many_message

    def test_all_devices_of_several_hosts_are_those_that_each_of_them_has(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        def created_resources(**resources: Any) -> Any:
            body = {"dataset_id": dataset, "config": {"base_model": "org/model"}, "resources": resources}
            return api.client.post("/v1/runs", json=body).json()

        for devices, address in ((8, "10.0.0.1"), (6, None), (4, "10.0.0.2")):
            add_worker(engine, devices, backends=["celery"], group_address=address)
        assert created_resources(devices="all", hosts=2)["resources"]["devices"] == 8
        (error,) = created_resources(devices=14, hosts=2)["errors"]
        assert error["code"] == "too_many_devices" and "no 2 online workers each have more than 6" in error["message"]

    def test_all_devices_that_no_worker_has_are_refused_with_what_to_change(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        def validate_resources(**resources: Any) -> dict[str, str]:
            body = {"dataset_id": dataset, "config": {"base_model": "org/model"}, "resources": resources}
            answer = api.client.post("/v1/runs", json=body)
            return {} if answer.status_code == 202 else answer.json()["errors"][0]

        def error(**resources: Any) -> str:
            assert validate_resources(devices=resources.get("hosts", 1), **resources) == {}, "it would wait"
            check = validate_resources(devices="all", **resources)
            assert (check["field"], check["code"]) == ("resources.devices", "no_worker_online")
            assert check["message"].startswith("cannot be `all`, because their number is not known. ")
            return check["message"]

        assert "No worker of backend `celery` is online. Start one" in error()
        add_worker(engine, 2, backends=["celery"], labels=["site-a"], group_address="10.0.0.1")
        assert "needs a device of kind `cuda`" in error(kind="cuda")
        add_worker(engine, backends=["celery"], kind="cuda", memory_mb=[24_000], labels=["site-b"])
        assert "other `resources.labels`" in error(labels=["site-a", "site-b"])
        assert "other `resources.labels`" in error(labels=["site-a"], kind="cuda")
        assert "asks for 80,000 MiB" in (message := error(memory_mb=80_000)) and "has 24,000 MiB" in message
        assert validate_resources(devices="all", gpu="h200") == validate_resources(devices=1, gpu="h200") != {}
        assert "fewer `resources.hosts`" in error(hosts=2)

    def test_a_label_that_no_worker_has_had_is_refused_with_those_that_are_known(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        body = {"dataset_id": dataset, "config": {"base_model": "org/model"}, "resources": {"labels": ["site-c", "b"]}}
        assert api.client.post("/v1/runs/validate", json=body).json()["valid"], "no worker is known yet"
        gone = add_worker(engine, backends=["celery"], labels=["site-b", "b"])
        with engine.begin() as connection:
            connection.execute(update(Worker).where(Worker.id == gone).values(state="offline"))
        refused = api.client.post("/v1/runs", json=body)
        assert refused.status_code == 422
        (error,) = refused.json()["errors"]
        assert (error["field"], error["code"]) == ("resources.labels", "unknown_label")
        assert "`site-c`" in error["message"] and "`b`, `site-b`" in error["message"]
        body["resources"] = {"labels": ["site-b"]}
        assert api.client.post("/v1/runs", json=body).status_code == 202

    def test_malformed_labels_and_names_of_gpus_are_refused_in_words(self, api: ApiServer, dataset: str) -> None:
        resources = {"labels": ["site b"], "gpu": "h200!"}
        body = {"dataset_id": dataset, "config": {"base_model": "org/model"}, "resources": resources}
        errors = api.client.post("/v1/runs", json=body).json()["errors"]
        messages = {error["field"]: error["message"] for error in errors}
        assert set(messages) == {"resources.labels.0", "resources.gpu"}
        assert (
            "without spaces" in messages["resources.labels.0"] and "such as `site-b`" in messages["resources.labels.0"]
        )
        assert "such as `h200`" in messages["resources.gpu"]

    def test_plugins_and_other_options_train_on_several_devices(
        self, api: ApiServer, engine: Engine, dataset: str
    ) -> None:
        def errors(dataset: str, **config: Any) -> list[tuple[str, str]]:
            body = {"dataset_id": dataset, "config": {"base_model": "org/model", **config}, "resources": {"devices": 2}}
            check = api.client.post("/v1/runs/validate", json=body).json()
            return [(one["field"], one["code"]) for one in check["errors"]]

        own = {"type": "mine"}
        rewards = {"num_generations": 2, "rewards": [{"type": "length", "max": 8}]}
        assert errors(make_dataset(engine, "prompt", ("prompt",)), method="rlhf", rlhf=rewards) == []
        for extra in (
            {"data_source": own}, {"checkpoint_engine": own}, {"callbacks": [own]}, {"distributions_steps": 5},
            {"probe": True},
        ):  # fmt: skip
            assert errors(dataset, extra=extra) == [], extra
        assert errors(dataset, eval_split=0.1, eval_steps=10, extra={"metrics": ["mine"]}) == []

    def test_devices_are_divided_among_hosts(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        add_worker(engine, devices=2, backends=["celery"], group_address="10.0.0.1")

        def errors_of(hosts: int, devices: int) -> Any:
            resources = {"hosts": hosts, "devices": devices}
            body = {"dataset_id": dataset, "config": {"base_model": "org/model"}, "resources": resources}
            return api.client.post("/v1/runs/validate", json=body).json()

        for hosts, devices, field, says in (
            (4, 3, "resources.hosts", "is 4, and `devices`, the devices of all hosts together, is only 3"),
            (2, 3, "resources.devices", "set 2 or 4"),
            (
                2,
                6,
                "resources.devices",
                "is 6, 3 on each host, and no 2 online workers each have more than 2: ask for at most 4",
            ),
        ):
            (error,) = errors_of(hosts, devices)["errors"]
            assert error["field"] == field and says in error["message"], error
        valid = errors_of(2, 4)
        assert valid["errors"] == []
        (warning,) = (one for one in valid["warnings"] if one["field"] == "resources")
        assert warning["code"] == "too_few_hosts" and "ANNEAL_GROUP_INTERFACE" in warning["message"]
        add_worker(engine, devices=2, backends=["celery"], group_address="10.0.0.2")
        assert [one for one in errors_of(2, 4)["warnings"] if one["field"] == "resources"] == []

    def test_a_silent_worker_does_not_count(self, api: ApiServer, engine: Engine, dataset: str) -> None:
        add_worker(engine, backends=["celery"])
        with engine.begin() as connection:
            connection.exec_driver_sql("UPDATE workers SET heartbeat_at = now() - interval '1 hour'")
        assert self.check(api, dataset, self.WANTS_GPU)["valid"]
