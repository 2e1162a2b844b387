"""Units of systemd and manifests of Kubernetes match the code, the images and the Compose files."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config import Settings
from app.server import REQUEST_GRACE_SECONDS
from tests.nodes import ROOT

UNITS = sorted((ROOT / "deploy").glob("*.service"))
CHART = ROOT / "deploy" / "helm"
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yml").read_text()))
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
_SECRET = {"POSTGRES_PASSWORD", "REDIS_PASSWORD", "ANNEAL_DATABASE_URL", "ANNEAL_REDIS_URL"}


def named(kind: str, name: str) -> dict[str, Any]:
    (manifest,) = (it for it in MANIFESTS if (it["kind"], it["metadata"]["name"]) == (kind, name))
    return manifest


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(["helm", *arguments], capture_output=True, text=True, check=False, env={"PATH": path})


def rendered(*values: str) -> list[dict[str, Any]]:
    """Manifests that the chart makes of these values."""
    done = helm("template", "anneal", str(CHART), *(part for value in values for part in ("--set", value)))
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest is not None]


def pods() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the name, the specification, and that of its pods, of each workload."""
    for manifest in MANIFESTS:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            yield manifest["metadata"]["name"], manifest["spec"], manifest["spec"]["template"]["spec"]


@pytest.mark.needs("systemd")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    text, program = unit.read_text(), Path(sys.executable).parent / "anneal"
    assert text.count("/opt/anneal/.venv/bin/anneal") == 1
    (tmp_path / unit.name).write_text(text.replace("/opt/anneal/.venv/bin/anneal", str(program)))
    command = ["systemd-analyze", "verify", str(tmp_path / unit.name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_unit_leaves_anneal_the_time_to_save_and_a_failing_training_alone(unit: Path) -> None:
    settings = dict(line.split("=", 1) for line in unit.read_text().splitlines() if "=" in line and line[0] != "#")
    needed = Settings().save_grace_seconds + REQUEST_GRACE_SECONDS + 15
    assert int(settings["TimeoutStopSec"]) >= needed
    assert (settings["KillMode"], settings["OOMPolicy"], settings["User"]) == ("mixed", "continue", "anneal")


def test_pods_run_the_commands_and_images_of_compose_with_its_times() -> None:
    for role in ("api", "worker"):
        spec = next(pod for name, _, pod in pods() if name == f"anneal-{role}")
        (container,) = spec["containers"]
        assert container["command"] == COMPOSE[role]["command"] and container["image"] == COMPOSE[role]["image"]
        assert f"{spec['terminationGracePeriodSeconds']}s" == COMPOSE[role]["stop_grace_period"]
    for name in ("postgres", "redis"):
        spec = next(pod for found, _, pod in pods() if found == f"anneal-{name}")
        assert spec["containers"][0]["image"] == COMPOSE[name]["image"]


def test_configuration_names_settings_and_no_secret_is_in_the_file() -> None:
    settings = {f"ANNEAL_{name.upper()}" for name in Settings.model_fields}
    values = named("ConfigMap", "anneal")["data"]
    assert values.keys() <= settings and not values.keys() & _SECRET
    for name, _, pod in pods():
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            for variable in container.get("env", ()):
                assert ("valueFrom" in variable) == (variable["name"] in _SECRET), (name, variable)
                assert not variable["name"].startswith("ANNEAL_") or variable["name"] in settings
    comment = (ROOT / "deploy" / "kubernetes.yml").read_text().partition("apiVersion")[0]
    assert all(name in comment for name in _SECRET)


def test_every_mount_has_its_volume_every_claim_exists_and_every_service_its_pods() -> None:
    claims = {it["metadata"]["name"] for it in MANIFESTS if it["kind"] == "PersistentVolumeClaim"}
    labels = []
    for name, spec, pod in pods():
        labels.append(spec["template"]["metadata"]["labels"])
        assert spec["selector"]["matchLabels"] == labels[-1]
        own_claims = [claim["metadata"] for claim in spec.get("volumeClaimTemplates", ())]
        volumes = {volume["name"] for volume in (*pod.get("volumes", ()), *own_claims)}
        mounted = {
            mount["name"]
            for container in (*pod.get("initContainers", ()), *pod["containers"])
            for mount in container.get("volumeMounts", ())
        }
        assert mounted == volumes, name
        used = [volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
        assert {claim["claimName"] for claim in used} <= claims, name
        # Otherwise Kubernetes sets ANNEAL_PORT and others for the services named `anneal…`.
        assert pod["enableServiceLinks"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] is True, name
    for manifest in MANIFESTS:
        if manifest["kind"] == "Service":
            assert manifest["spec"]["selector"] in labels


def test_compose_files_use_nothing_newer_than_the_documented_minimum() -> None:
    page = (ROOT / "docs" / "operations" / "deploy.md").read_text()
    assert "Docker Compose 2.3.3" in page
    keys = "include|develop|attach|gpus|post_start|pre_stop|provider|start_interval"
    newer = re.compile(rf"^\s*(?:{keys}):|![a-z]+", re.MULTILINE)
    for path in ROOT.glob("docker-compose*.yml"):
        assert newer.findall(path.read_text()) == [], path.name


@pytest.mark.full
@pytest.mark.needs("helm")
@pytest.mark.parametrize("release", ["1.29", "1.37"])
def test_manifests_have_the_schema_of_kubernetes(release: str) -> None:
    import kubernetes_validate

    others = rendered(
        "ingress.isEnabled=true", "volumes.models.class=shared", "postgres.class=fast", "workers.cpu.gpus=0",
        "workers.cpu.tolerations[0].key=pool", "workers.cpu.settings.ANNEAL_SLOTS=2", "images.pullSecrets[0]=registry",
    )  # fmt: skip
    for manifest in (*MANIFESTS, *others):
        kubernetes_validate.validate(manifest, release, strict=True)


@pytest.mark.needs("helm")
class TestChart:
    def test_has_no_fault_and_makes_the_manifests_of_the_repository(self) -> None:
        linted = helm("lint", "--strict", str(CHART))
        assert linted.returncode == 0, linted.stdout
        assert rendered() == MANIFESTS, "`make manifests` writes deploy/kubernetes.yml"

    def test_of_the_version_of_the_project(self) -> None:
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        assert chart["version"] == chart["appVersion"] == version("anneal")

    def test_leaves_out_what_there_is_elsewhere(self) -> None:
        manifests = rendered(
            "postgres.isEnabled=false", "redis.isEnabled=false", "volumes.models.claim=shared-models",
            "volumes.storage.isEnabled=false", "settings.ANNEAL_STORAGE=s3://bucket/anneal",
        )  # fmt: skip
        names = {(it["kind"], it["metadata"]["name"]) for it in manifests}
        assert names == {
            ("ConfigMap", "anneal"), ("PersistentVolumeClaim", "anneal-keys"), ("Service", "anneal"),
            ("Service", "anneal-worker"), ("Deployment", "anneal-api"), ("StatefulSet", "anneal-worker"),
        }  # fmt: skip
        for manifest in manifests[-2:]:
            volumes = {volume["name"]: volume for volume in manifest["spec"]["template"]["spec"]["volumes"]}
            assert "storage" not in volumes
            assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "shared-models"}

    def test_has_groups_of_workers_with_time_for_their_leases(self) -> None:
        manifests = rendered(
            "workers.worker=null", "workers.large.gpus=8", "workers.large.settings.ANNEAL_WORKER_LABELS=large",
            "workers.cpu.gpus=0", "workers.cpu.replicas=3", "workers.cpu.nodeSelector.pool=cpu",
            "settings.ANNEAL_LEASE_SECONDS=300",
        )  # fmt: skip
        groups = {it["metadata"]["name"]: it["spec"] for it in manifests if it["kind"] == "StatefulSet"}
        assert groups.keys() == {"anneal-postgres", "anneal-large", "anneal-cpu"}
        large, cpu = groups["anneal-large"], groups["anneal-cpu"]
        assert (large["replicas"], cpu["replicas"]) == (1, 3)
        (container,) = large["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 8}
        assert container["env"] == [{"name": "ANNEAL_WORKER_LABELS", "value": "large"}]
        assert large["template"]["spec"]["terminationGracePeriodSeconds"] == 620
        assert cpu["template"]["spec"]["nodeSelector"] == {"pool": "cpu"}
        assert cpu["template"]["spec"]["containers"][0]["resources"]["limits"] == {"memory": "64Gi"}

    def test_opens_the_api_to_the_host_of_its_ingress(self) -> None:
        manifests = rendered("ingress.isEnabled=true", "ingress.host=tune.example.org", "ingress.class=nginx")
        (ingress,) = (it for it in manifests if it["kind"] == "Ingress")
        assert ingress["spec"]["tls"] == [{"hosts": ["tune.example.org"], "secretName": "anneal-tls"}]
        buffered = {name: value for name, value in ingress["metadata"]["annotations"].items() if "buffering" in name}
        assert len(buffered) == 2 and set(buffered.values()) == {"off"}, "neither responses nor uploads"
        (configuration,) = (it for it in manifests if it["kind"] == "ConfigMap")
        assert configuration["data"]["ANNEAL_ALLOWED_HOSTS"] == "anneal,tune.example.org"

    @pytest.mark.parametrize(
        ("value", "place"),
        [
            ("api.replica=3", "replica"),
            ("workers.large.gpu=8", "workers.large"),
            ("workers.Large.gpus=8", "Large"),
            ("settings.ANNEAL_LEASE_SECONDS=a minute", "ANNEAL_LEASE_SECONDS"),
            ("settings.lease=60", "lease"),
            ("volumes.storage.size=plenty", "volumes.storage.size"),
        ],
    )
    def test_refuses_a_value_that_there_is_not_by_its_place(self, value: str, place: str) -> None:
        refused = helm("template", "anneal", str(CHART), "--set", value)
        assert refused.returncode != 0 and place in refused.stderr
