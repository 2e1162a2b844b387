"""A run whose optimizer needs a package that the workers lack is refused before it waits for one of them."""

from typing import Any

import pytest
from sqlalchemy import Engine

from anneal.contracts.training_config.optimizers import OPTIMIZERS
from app.config import Settings
from app.estimator.activations import LIGER_PACKAGE
from tests.factories import make_dataset, make_model
from tests.rows import add_worker
from tests.server import ApiServer
from worker.presence import registration

TRAINED = {"base_model": "tiny", "method": "full", "max_steps": 1}


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def check(emptied_api: ApiServer, engine: Engine) -> Any:
    make_model(emptied_api.settings)
    dataset = make_dataset(engine)

    def validate(kind: str = "errors", **config: Any) -> list[tuple[str, str, str]]:
        body = {"dataset_id": dataset, "config": {**TRAINED, **config}}
        response = emptied_api.client.post("/v1/runs/validate", json=body)
        assert response.status_code == 200, response.text
        return [(problem["field"], problem["code"], problem["message"]) for problem in response.json()[kind]]

    return validate


@pytest.mark.parametrize(
    ("config", "field", "remedy"),
    [
        ({"optim": "adamw_torch_8bit"}, "config.optim", "use another optimizer"),
        ({"weights_dtype": "bfloat16"}, "config.weights_dtype", "leave `weights_dtype` out"),
        ({"weights_dtype": "bfloat16", "optim": "adamw_torch_4bit"}, "config.optim", "leave `weights_dtype` out"),
    ],
)
def test_an_optimizer_whose_package_no_worker_has_is_refused(
    check: Any, engine: Engine, config: dict[str, Any], field: str, remedy: str
) -> None:
    add_worker(engine, backends=["celery"], packages=["liger-kernel"])
    ((refused, code, message),) = check(**config)
    assert (refused, code) == (field, "package_not_installed")
    assert "`pip install torchao`" in message and message.endswith(f"or {remedy}.")
    assert check() == check(weights_dtype="float32") == check(optim="adamw_torch") == []


def test_an_optimizer_whose_package_only_some_workers_have_is_warned_of(check: Any, engine: Engine) -> None:
    add_worker(engine, backends=["celery"], packages=["torchao"])
    assert check(optim="adamw_torch_8bit") == []
    add_worker(engine, backends=["celery"], packages=[])
    assert check(optim="adamw_torch_8bit") == []
    warnings = check("warnings", optim="adamw_torch_8bit")
    (message,) = [message for _, code, message in warnings if code == "package_not_everywhere"]
    assert "only 1 of 2 workers" in message


def test_no_optimizer_is_refused_where_no_worker_reports_packages(check: Any, engine: Engine) -> None:
    assert check(optim="adamw_torch_8bit") == []
    add_worker(engine, backends=["celery"])
    assert check(optim="adamw_torch_8bit") == []


def test_a_worker_reports_the_packages_that_it_can_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    names = {traits.package for traits in OPTIMIZERS.values() if traits.package is not None}
    before = registration.installed_packages()
    assert set(before) <= {*names, LIGER_PACKAGE}
    for module in ("torchao", "liger_kernel"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert set(registration.installed_packages()) == {*before, "torchao", LIGER_PACKAGE}
