"""Commands about the service and its workers."""

from importlib.metadata import version
from pathlib import Path

from typer.testing import CliRunner

from app.cli.main import cli
from tests.conftest import Anneal, json_of
from tests.factories import Trainer
from tests.server import ApiServer


def test_the_environment_names_another_service(shared_api: ApiServer, tmp_path: Path) -> None:
    there = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": shared_api.url, "ANNEAL_API_KEY": shared_api.key}
    assert CliRunner().invoke(cli, ["workers", "list"], env=there).exit_code == 0
    wrong = CliRunner().invoke(cli, ["workers", "list"], env={**there, "ANNEAL_API_KEY": "anneal_wrong"})
    assert wrong.exit_code == 1 and "anneal keys create" in wrong.stderr


def test_status_shows_what_runs_and_open_makes_a_link_that_works_once(
    anneal: Anneal, shared_api: ApiServer, trainer: Trainer, tmp_path: Path
) -> None:
    shown = anneal("status").stdout
    assert f"ready, version {version('anneal')}" in shown and shared_api.url in shown and "/home/logs" in shown
    assert f"{trainer.run_id}  running  0/100  counting" in shown
    status = json_of(anneal("status", "--json"))
    assert [run["id"] for run in status["active"]] == [trainer.run_id] and status["pending"] == []
    down = CliRunner().invoke(cli, ["status"], env={"ANNEAL_HOME": str(tmp_path / "other")})
    assert down.exit_code == 1 and "down" in down.stdout and "`anneal up`" in down.stderr
    link = json_of(anneal("open", "--print", "--json"))["url"]
    page, _, token = link.partition("#")
    assert page == f"{shared_api.url}/login"
    with shared_api.client_with(None) as browser:
        signed_in = [browser.post("/v1/session", json={"link": token}).status_code for _ in range(2)]
    assert signed_in == [201, 401]
    assert anneal("open", "--print").stdout.startswith(f"{page}#")


def test_workers_are_listed(anneal: Anneal, trainer: Trainer) -> None:
    assert trainer.worker_id in anneal("workers", "list").stdout
    assert any(worker["id"] == trainer.worker_id for worker in json_of(anneal("workers", "list", "--json"))["data"])
