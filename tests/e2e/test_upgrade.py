"""Homes of earlier releases: this version migrates them, serves what they have, and trains their runs on."""

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pytest

from app.backup.restore import RestoreJob
from app.config import Settings
from app.infra.storage import Storage
from app.tables import migrate
from tests import zygotes
from tests.app.backup.conftest import Quiet
from tests.conftest import Services
from tests.server import ProcessServer
from tests.slowness import slowness
from tests.stack import WorkerProcess
from tests.upgrade.home import Release, migration_digests, releases
from tests.waiting import eventually
from worker.wire.journal import read_journal


@dataclass
class UpgradedService:
    """Home of a release, migrated, with the API of this version and a worker."""

    release: Release
    revisions: tuple[str, str]
    api: ProcessServer


@pytest.fixture(scope="module", params=releases(), ids=lambda release: release.version)
def upgraded(
    request: pytest.FixtureRequest,
    services: Services,
    forked_zygotes: zygotes.Server,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[UpgradedService]:
    release: Release = request.param
    home = tmp_path_factory.mktemp("upgraded")
    with tarfile.open(release.archive) as archive:
        archive.extractall(home, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    settings = Settings(
        home=home,
        database_url=services.create_database(template="template1"),
        redis_url=services.fresh_redis(),
        host="127.0.0.1",
        port=0,
        lease_seconds=15 * slowness(),
    )
    restored = RestoreJob(settings, home / "backup", Quiet()).run()
    assert restored.problems == []
    revisions = restored.backup.manifest.revision, migrate.upgrade_schema(settings)[1]
    with ProcessServer(settings) as api:
        api.wait_until_up()
        variables = forked_zygotes.variables(settings.trainer_environment())
        worker = WorkerProcess(settings, home / "worker.log", program="tests.zygotes", variables=variables)
        yield UpgradedService(release, revisions, api)
        worker.kill()
    services.drop_database(settings.database_url or "")


@pytest.mark.parametrize("release", releases(), ids=lambda release: release.version)
def test_migrations_of_a_release_are_kept_unchanged(release: Release) -> None:
    digests = migration_digests()
    changed = [name for name, digest in release.migrations.items() if digests.get(name) != digest]
    assert changed == [], f"databases of version {release.version} have run them: add a migration instead"


def test_home_of_a_release_is_migrated_to_the_newest_revision(upgraded: UpgradedService) -> None:
    assert upgraded.revisions == (max(upgraded.release.migrations)[:4], migrate.needed_revision())


def test_runs_events_metrics_files_and_keys_of_the_release_are_served(upgraded: UpgradedService) -> None:
    release = upgraded.release
    run = f"/v1/runs/{release.completed_run}"
    with upgraded.api.client_with(release.key) as client:
        shown = client.get(run).raise_for_status().json()
        assert (shown["status"], shown["tags"]) == ("completed", ["kept"])
        runs = client.get("/v1/runs").json()["data"]
        assert {item["id"] for item in runs} == {release.completed_run, release.live_run}
        events = client.get(f"{run}/events", params={"follow": "false", "format": "ndjson"}).text.splitlines()
        assert [json.loads(event)["type"] for event in events] == release.event_types
        curve = client.get(f"{run}/metrics", params={"names": "loss"}).json()["series"]["loss"]
        assert [*zip(curve["steps"], curve["values"], strict=True)] == [(step, loss) for step, loss in release.losses]
        content = client.get(f"/v1/datasets/{release.dataset}/content").content
        assert sha256(content).hexdigest() == release.dataset_sha256
        (checkpoint,) = client.get(f"{run}/checkpoints").json()["data"]
        for path in (f"checkpoints/{checkpoint['id']}/download", "artifacts/adapter_model.safetensors"):
            assert client.get(f"{run}/{path}").status_code == 200, path


def test_run_that_was_training_in_the_release_continues_from_its_checkpoint(upgraded: UpgradedService) -> None:
    run = f"/v1/runs/{upgraded.release.live_run}"

    def ended() -> dict[str, Any] | None:
        shown: dict[str, Any] = upgraded.api.client.get(run).json()
        return shown if shown["status"] in ("completed", "failed", "cancelled") else None

    shown = eventually(ended, timeout=240, what="the run of the release ends")
    assert (shown["status"], shown["attempt"], shown["current_step"]) == ("completed", 2, 200), shown["error_message"]
    journal = read_journal(Storage(upgraded.api.settings).journal_path(upgraded.release.live_run))
    assert min(line["step"] for line in journal if line["event"] == "step" and line["attempt"] == 2) > 4
