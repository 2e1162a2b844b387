"""Rules for the container files: each rule yields one sentence per violation."""

import fnmatch
import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qsl, urlsplit

import typer
import yaml
from pydantic import ValidationError
from typer.exceptions import TyperException

from app.api.authorization import is_public_call
from app.cli.main import cli
from app.config import Settings
from app.server import REQUEST_GRACE_SECONDS
from tests.dockerfile import Stage, read

ROOT = Path(__file__).parents[1]
FILES = (
    "docker-compose.yml", "docker-compose.trainer.yml", "docker-compose.private.yml", "docker-compose.worker.yml",
    "Dockerfile.gpu", ".env.example", ".dockerignore", ".gitignore",
)  # fmt: skip
_VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(?:(:[-?])([^}]*))?\}")
_PINNED = re.compile(r"[\w./-]+:\d+(\.\d+)*(-[\w.]+)*")
_SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|API_KEY", re.IGNORECASE)
_HOST_KEYS = {
    "cgroup", "cgroup_parent", "device_cgroup_rules", "devices", "extra_hosts", "group_add", "ipc", "network_mode",
    "pid", "privileged", "runtime", "sysctls", "userns_mode", "uts",
}  # fmt: skip
"""Keys of a service that let it see or change its machine."""
_TRAINER_CAPABILITIES = {
    "api": {"DAC_OVERRIDE"},
    "worker": {"CHOWN", "DAC_OVERRIDE", "KILL", "SETGID", "SETUID"},
}
"""Capabilities with which `tests/reliability/test_stalls.py` shows that training as another user works."""
_CERTIFICATES = "/certificates/servers.pem"
_WORKER_MORE_SECONDS = 10  # same margin beyond the trainers' grace period as in app.standalone.supervisor
_API_MORE_SECONDS = 5


@dataclass(frozen=True)
class Files:
    """Texts of the container files, or of modified copies."""

    texts: dict[str, str]

    @classmethod
    def ours(cls) -> "Files":
        return cls({name: (ROOT / name).read_text() for name in FILES})

    @functools.cached_property
    def compose(self) -> dict[str, Any]:
        """Compose file of one machine."""
        return self.document("docker-compose.yml")

    @functools.cached_property
    def services(self) -> dict[str, dict[str, Any]]:
        return dict(self.compose["services"])

    @functools.cached_property
    def stages(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in read(self.texts["Dockerfile.gpu"])}

    @functools.cached_property
    def variables(self) -> dict[str, str]:
        """Variables of `.env.example`."""
        lines = [line for line in self.texts[".env.example"].splitlines() if line and not line.startswith("#")]
        return dict(line.split("=", 1) for line in lines)

    def document(self, name: str) -> dict[str, Any]:
        """Return a compose file with variables substituted from `.env.example`."""
        document: dict[str, Any] = self._substituted(_read_yaml(self.texts[name]))
        return document

    def _substituted(self, node: Any) -> Any:
        if isinstance(node, dict):
            return {key: self._substituted(value) for key, value in node.items()}
        if isinstance(node, list):
            return [self._substituted(value) for value in node]
        return _VARIABLE.sub(self._value, node) if isinstance(node, str) else node

    def _value(self, match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        return self.variables.get(name) or (rest if kind == ":-" else f"some{name.lower()}")

    def stage_of(self, service: str) -> Stage | None:
        """Return the Dockerfile stage of a service that we build, or None."""
        return self.stages.get(self.targets.get(self.services[service]["image"], ""))

    def environment(self, service: str) -> dict[str, str]:
        """Return the environment of a service: that of the image, overridden by compose."""
        stage = self.stage_of(service)
        return {**(stage.environment if stage else {}), **self.services[service].get("environment", {})}

    @property
    def targets(self) -> dict[str, str]:
        """Dockerfile stage of each image that we build."""
        building = (service for service in self.services.values() if "build" in service)
        return {service["image"]: service["build"]["target"] for service in building}

    @property
    def built(self) -> list[str]:
        """Services that run an image that we build."""
        return [name for name, service in self.services.items() if service["image"] in self.targets]

    def mounts(self, service: str) -> dict[str, str]:
        """Return the volume mounted at each path; "" for a tmpfs."""
        mounts = {mount.split(":")[1]: mount.split(":")[0] for mount in self.services[service].get("volumes", [])}
        return mounts | {mount.split(":")[0]: "" for mount in self.services[service].get("tmpfs", [])}


def _read_yaml(text: str) -> Any:
    """Read it as `yaml.safe_load` does, in a fifth of the time."""
    return yaml.load(text, Loader=yaml.CSafeLoader)


def problems(files: Files) -> list[str]:
    """Return all violations."""
    rules = (_commands, _copies, _users, _ports, _settings, _variables, _images, _volumes, _health, _graces, _order,
             _hardened, _isolated, _secrets, _trainer_user, _private, _worker_of_several)  # fmt: skip
    return [problem for rule in rules for problem in rule(files)]


def _commands(files: Files) -> Iterator[str]:
    ours = [(name, files.services[name].get("command")) for name in files.built]
    ours += [(stage.name, stage.command) for stage in files.stages.values() if stage.command]
    for name, command in ours:
        if not command or command[0] != "anneal":
            yield f"{name} does not run anneal"
        elif wrong := _no_command(command[1:]):
            yield f"{name}: `{' '.join(command)}` is not a valid command: {wrong}"
    documented = "\n".join(
        [*files.texts.values(), *(page.read_text() for page in (ROOT / "docs" / "operations").glob("*.md"))]
    )
    for service, line in re.findall(r"docker compose exec (\w+) anneal ([\w -]+)", documented):
        if service not in files.built:
            yield f"there is no service {service} to run `anneal {line}` in"
        if wrong := _no_command(line.split()):
            yield f"`anneal {line}` is not a valid command: {wrong}"


@functools.cache
def _root_command() -> Any:
    return typer.main.get_command(cli)


def _no_command(arguments: list[str]) -> str | None:
    """Return the reason why `anneal` does not accept these arguments, or None."""
    command = _root_command()
    try:
        while hasattr(command, "commands"):
            if not arguments or arguments[0] not in command.commands:
                return f"there is no {arguments[:1]}"
            command, arguments = command.commands[arguments[0]], arguments[1:]
        command.make_context("anneal", list(arguments))
    except TyperException as error:
        return str(error)
    return None


def _copies(files: Files) -> Iterator[str]:
    seen: set[str] = set()
    for stage in files.stages.values():
        for origin, sources in stage.copies:
            if origin is not None and origin not in seen:
                yield f"{stage.name} copies from {origin}, which is not an earlier stage"
            if origin is not None:
                continue
            for source in sources:
                if not (ROOT / source).exists():
                    yield f"{stage.name} copies {source}, which does not exist"
                if _is_ignored(source, files.texts[".dockerignore"]):
                    yield f"{stage.name} copies {source}, which .dockerignore excludes"
        if stage.last("WORKDIR") is None:
            yield f"{stage.name} has no WORKDIR"
        seen.add(stage.name)
    building = [name for name in files.built if "build" in files.services[name]]
    if len(building) > len(files.targets):
        yield f"{', '.join(building)}: two services build the same image concurrently"
    for name in set(files.built) - set(building):
        if files.services[name].get("pull_policy") != "never":
            yield f"{name} would pull our image from a registry"
    for name in building:
        build = files.services[name]["build"]
        if build["target"] not in files.stages:
            yield f"{name} builds {build['target']}, which is not a stage"
        if not (ROOT / build["context"] / build["dockerfile"]).is_file():
            yield f"{name} builds from {build['dockerfile']}, which does not exist"
    if not _is_ignored(".env", files.texts[".dockerignore"]):
        yield ".env gets into the images"


def _is_ignored(path: str, ignore: str) -> bool:
    ignored = False
    for line in ignore.splitlines():
        pattern = line.strip().removeprefix("!").rstrip("/")
        if line.strip() and not line.startswith("#") and fnmatch.fnmatch(path, pattern):
            ignored = not line.startswith("!")
    return ignored


def _users(files: Files) -> Iterator[str]:
    for name, service in files.services.items():
        stage = files.stage_of(name)
        user = service.get("user") or (stage.last("USER") if stage else None)
        if str(user or "root").split(":")[0] in ("root", "0"):
            yield f"{name} runs as root"


def _ports(files: Files) -> Iterator[str]:
    publishing = [name for name, service in files.services.items() if service.get("ports")]
    if publishing != ["api"]:
        yield f"{publishing} publish ports, not the API alone"
    for published in files.services["api"].get("ports", []):
        address, _, inside = str(published).rsplit(":", 2) if str(published).count(":") == 2 else ("", "", published)
        if address != "127.0.0.1":
            yield f"port {published} is published on every address"
        stage = files.stage_of("api")
        if {inside} != (stage.exposed if stage else set()) or inside != files.environment("api").get("ANNEAL_PORT"):
            yield f"port {inside} is published, but another port is exposed and listened on"
    if files.environment("api").get("ANNEAL_HOST") != "0.0.0.0":
        yield "the API does not listen on an address that is reachable from outside its container"


def _settings(files: Files) -> Iterator[str]:
    for name in files.built:
        ours = {key: str(value) for key, value in files.environment(name).items() if key.startswith("ANNEAL_")}
        for key in ours:
            if key.removeprefix("ANNEAL_").lower() not in Settings.model_fields:
                yield f"{name}: {key} is not a setting"
        try:
            with patch.dict(os.environ, ours):
                settings = Settings()
        except ValidationError as error:
            yield f"{name}: invalid settings: {error}"
            continue
        if "@postgres:5432/" not in (settings.database_url or "") or "@redis:6379" not in (settings.redis_url or ""):
            yield f"{name} does not have the URLs of both servers"
    database = files.services["postgres"]["environment"]
    account = f"//{database.get('POSTGRES_USER')}:{database.get('POSTGRES_PASSWORD')}@postgres:5432/"
    if account + str(database.get("POSTGRES_DB")) not in files.environment("api").get("ANNEAL_DATABASE_URL", ""):
        yield "the database URL does not match the account that postgres creates"


def _variables(files: Files) -> Iterator[str]:
    texts = {name: text for name, text in files.texts.items() if name.endswith(".yml")}
    used = [(found[1], found[2], found[3]) for text in texts.values() for found in _VARIABLE.finditer(text)]
    names = {name for name, _, _ in used}
    for name in names - files.variables.keys():
        yield f"{name} is not in .env.example"
    for name in files.variables.keys() - names:
        yield f"{name} is in .env.example, but unused"
    for name in {key for text in texts.values() for key in re.findall(r"^ {4,6}([A-Z_]+):$", text, re.MULTILINE)}:
        if f"# {name}=\n" not in files.texts[".env.example"]:
            yield f"{name} is passed on if it is set, but not in .env.example as a comment"
    for name, kind, rest in used:
        if kind is None:
            yield f"{name} may be unset without an error"
        if kind == ":?" and not (rest.endswith(".") and len(rest.split()) > 4):
            yield f"{name} is required without an error message that says what to do"
        if _SECRET.search(name) and (kind != ":?" or files.variables.get(name)):
            yield f"{name} has a default: a publicly known secret"


def _images(files: Files) -> Iterator[str]:
    images = [service["image"] for service in files.services.values() if service["image"] not in files.targets]
    images += [stage.image for stage in files.stages.values() if stage.image not in files.stages]
    for image in images:
        if not _PINNED.fullmatch(image):
            yield f"{image} is not pinned to a version"
    for name, expected in (("postgres", "postgres:18"), ("redis", "redis:8")):
        if not files.services[name]["image"].startswith(expected):
            yield f"{name} is not {expected}"


def _volumes(files: Files) -> Iterator[str]:
    used = {volume for name in files.services for volume in files.mounts(name).values() if volume}
    declared = set(files.compose["volumes"])
    for volume in used ^ declared:
        yield f"volume {volume} is used or declared, not both"
    if files.mounts("postgres").get("/var/lib/postgresql") != "postgres":
        yield "the data of postgres 18 is not in its volume"
    for name in files.built:
        mounts, environment = files.mounts(name), files.environment(name)
        stage = files.stage_of(name)
        commands = " ".join(argument for kind, argument in stage.instructions if kind == "RUN") if stage else ""
        if environment.get("ANNEAL_HOME") not in mounts:
            yield f"{name} cannot write to ANNEAL_HOME"
        for path, volume in mounts.items():
            # A new volume inherits the owner of the image folder at its mount point.
            if volume and not re.search(rf"install -d -o anneal\b[^&]*\s{re.escape(path)}\b", commands):
                yield f"{name}: {path} belongs to root"
    for setting, volume in (("ANNEAL_STORAGE", "storage"), ("ANNEAL_MODELS_ROOT", "models")):
        for name in ("api", "worker"):
            if files.mounts(name).get(files.environment(name).get(setting, "")) != volume:
                yield f"{name}: {setting} is not the volume {volume}"
    if files.mounts("worker").get(files.environment("worker")["ANNEAL_HOME"]) in (None, ""):
        yield "the spool of a worker does not survive its restart"
    if not files.environment("worker").get("HF_HOME", "").startswith(tuple(files.mounts("worker"))):
        yield "downloads of the worker have no volume"


def _health(files: Files) -> Iterator[str]:
    for name, service in files.services.items():
        stage = files.stage_of(name)
        if name != "migrate" and not service.get("healthcheck", {}).get("test") and not (stage and stage.health_check):
            yield f"{name} has no health check"
    for name, timing in _timings(files):
        if not 0 < timing.get("timeout", 0) <= timing.get("interval", 0) <= 30:
            yield f"{name}: a process that hangs is not noticed within a minute"
    for name in ("api", "worker"):
        stage = files.stage_of(name)
        if stage and stage.health_check and stage.health_check[0] != "python":
            yield f"{name}: its health check uses {stage.health_check[0]}, which is not in the image"
    api = files.stage_of("api")
    match = re.search(
        r"HTTPConnection\('127\.0\.0\.1', (\d+).*?'GET', '([^']+)'", " ".join(api.health_check if api else [])
    )
    if match is None or not is_public_call("GET", match[2]) or {match[1]} != (api.exposed if api else set()):
        yield "the health check of the API does not request its public path on its port"
    worker = files.stage_of("worker")
    if worker and worker.environment.get("ANNEAL_HOME", "?") not in " ".join(worker.health_check):
        yield "the health check of the worker does not look into its home"


def _timings(files: Files) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the seconds of each health check, in compose and in the images."""
    for name, service in files.services.items():
        timings = [(key, str(value)) for key, value in service.get("healthcheck", {}).items()]
        if timings:
            yield name, {key: int(value[:-1]) for key, value in timings if re.fullmatch(r"\d+s", value)}
    for stage in files.stages.values():
        if check := stage.last("HEALTHCHECK"):
            yield stage.name, {key: int(value) for key, value in re.findall(r"--([\w-]+)=(\d+)s\b", check)}


def _graces(files: Files) -> Iterator[str]:
    lease = float(files.environment("worker").get("ANNEAL_LEASE_SECONDS", 60))
    least = {
        "worker": Settings(lease_seconds=lease).save_grace_seconds + _WORKER_MORE_SECONDS,
        "api": REQUEST_GRACE_SECONDS + _API_MORE_SECONDS,
    }
    for name, seconds in least.items():
        match = re.fullmatch(r"(\d+)s", str(files.services[name].get("stop_grace_period", "10s")))
        if match is None or int(match[1]) < seconds:
            yield f"{name} is killed before the {seconds:g} s that it may take to end"


def _order(files: Files) -> Iterator[str]:
    for name, service in files.services.items():
        for other, condition in service.get("depends_on", {}).items():
            if other not in files.services:
                yield f"{name} waits for {other}, which is not a service"
            elif condition["condition"] == "service_healthy" and "healthcheck" not in files.services[other]:
                yield f"{name} waits for the health of {other}, which has no check"
    for name in ("api", "worker"):
        waits = {other: it["condition"] for other, it in files.services[name].get("depends_on", {}).items()}
        if waits.get("migrate") != "service_completed_successfully":
            yield f"{name} starts before the database has its schema"
    for name, service in files.services.items():
        if name == "migrate" and str(service.get("restart")).startswith(("always", "unless")):
            yield "migrate is restarted after success"
        if name != "migrate" and service.get("restart") != "unless-stopped":
            yield f"{name} is not restarted after a crash"
    devices = files.services["worker"].get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    if not any("gpu" in device.get("capabilities", []) for device in devices):
        yield "the worker has no GPU"


def _hardened(files: Files) -> Iterator[str]:
    for name, service in files.services.items():
        if service.get("read_only") is not True:
            yield f"{name} can write to its image"
        if service.get("cap_drop") != ["ALL"]:
            yield f"{name} keeps capabilities"
        if "no-new-privileges:true" not in service.get("security_opt", []):
            yield f"{name} can gain privileges"
        if service.get("privileged") or service.get("cap_add"):
            yield f"{name} is privileged"
    if not files.compose["networks"]["data"].get("internal"):
        yield "the servers are reachable from outside"
    for name in ("postgres", "redis"):
        if files.services[name]["networks"] != ["data"]:
            yield f"{name} is in more than the internal network"


def _isolated(files: Files) -> Iterator[str]:
    trainer = _read_yaml(files.texts["docker-compose.trainer.yml"])
    for document in (files.compose, trainer):
        for name, service in document["services"].items():
            for key in sorted(_HOST_KEYS & service.keys()):
                yield f"{name}: {key} takes it out of its container"
            for mount in service.get("volumes", []):
                if not isinstance(mount, str) or not re.match(r"[a-z]", mount):
                    yield f"{name}: {mount} is a folder of the machine"
    for name, path in (("api", "/models"), ("worker", "/keys")):
        if not any(mount.endswith(f":{path}:ro") for mount in files.services[name].get("volumes", [])):
            yield f"{name} can write to {path}"
    for name in files.services:
        for path in (mount for mount in files.services[name].get("tmpfs", []) if ":exec" in mount or ",exec" in mount):
            if name != "worker":  # where torch.compile and triton load the kernels that they have built
                yield f"{name} can execute what it writes to {path}"


def _trainer_user(files: Files) -> Iterator[str]:
    document = _read_yaml(files.texts["docker-compose.trainer.yml"])
    worker, stage = document["services"]["worker"], files.stage_of("worker")
    user, commands = worker["environment"].get("ANNEAL_TRAINER_USER"), ""
    if stage:
        commands = " ".join(argument for kind, argument in stage.instructions if kind == "RUN")
    if not re.search(rf"useradd --uid (?!10001\b)\d+ [^&]*\b{user}\b", commands):
        yield f"the image has no user {user} to train as"
    for volume in worker["volumes"]:
        if not re.search(rf"install -d -o {user} -g {user} -m 0700 {volume.partition(':')[2]}\b", commands):
            yield f"{volume} does not belong to {user} alone"
    if not worker["environment"].get("HF_HOME", "").startswith(tuple(it.partition(":")[2] for it in worker["volumes"])):
        yield f"{user} cannot write downloads"
    for path in ("/storage", "/models"):
        if not re.search(rf"-m 07[0-7][1357] {path}\b", commands):
            yield f"{user} cannot enter {path}"
    for path in ("/keys", "/var/lib/anneal"):
        if not re.search(rf"-m 0700 [^&]*{path}\b", commands):
            yield f"{user} can enter {path}"
    for name, service in document["services"].items():
        if set(service.get("cap_add", [])) != _TRAINER_CAPABILITIES.get(name, set()):
            yield f"{name} has other capabilities than training as another user needs"
        if set(service) - {"user", "cap_add", "environment", "volumes"}:
            yield f"{name} changes more than the user that trains"


def _secrets(files: Files) -> Iterator[str]:
    for stage in files.stages.values():
        for name, argument in stage.instructions:
            if _SECRET.search(argument) or "type=secret" in argument:
                yield f"{stage.name}: a secret in a layer ({name})"
    for name in files.built:
        for setting, value in files.environment(name).items():
            if _SECRET.search(setting) and setting != "ANNEAL_SECRET_KEY_FILE" and value is not None:
                yield f"{name}: {setting} is in its environment: {value}"
    for name in ("api", "migrate", "worker", "redis"):
        words = " ".join(map(str, files.services[name].get("command", [])))
        if "somepostgres_password" in words or "someredis_password" in words:
            yield f"{name}: a secret among the arguments of a process"
    if ".env" not in files.texts[".gitignore"].splitlines():
        yield ".env can be committed"


def _private(files: Files) -> Iterator[str]:
    """Check the servers that workers of other machines use."""
    servers = files.document("docker-compose.private.yml")["services"]
    if set(servers) != {"postgres", "redis"}:
        yield f"{sorted(servers)} are at the private address, not the two servers"
        return
    for service in _read_yaml(files.texts["docker-compose.private.yml"])["services"].values():
        for port in service["ports"]:
            if not port.startswith("${SERVERS_ADDRESS:?"):
                yield f"{port} is not published at the private address alone"
    urls = files.document("docker-compose.worker.yml")["services"]["worker"]["environment"]
    for name, url in (("postgres", urls["ANNEAL_DATABASE_URL"]), ("redis", urls["ANNEAL_REDIS_URL"])):
        server = servers[name]
        outside, inside = server["ports"][0].split(":")[-2:]
        if urlsplit(url).port != int(outside):
            yield f"{name} is published on port {outside}, but workers connect to another one"
        if set(server) - {"command", "environment", "ports", "volumes", "networks"}:
            yield f"{name} changes more at its private address than what it listens on"
        if not all(mount.endswith(":/certificates:ro") for mount in server["volumes"]):
            yield f"{name} can write to a folder of the machine"
        options = " ".join([*server.get("command", []), *server.get("environment", {}).values()])
        if _CERTIFICATES not in options or not re.search(rf"ssl=on|--tls-port {inside}\b", options):
            yield f"{name} does not encrypt at its private address"
    if "$$REDIS_ARGUMENTS" not in files.texts["docker-compose.yml"]:
        yield "redis does not get its arguments"


def _worker_of_several(files: Files) -> Iterator[str]:
    """Check the worker with host networking: that of one machine, with other connections."""
    document = files.document("docker-compose.worker.yml")
    if set(document["services"]) != {"worker"}:
        yield "the file of a worker starts something else"
    ours, single = dict(document["services"]["worker"]), dict(files.services["worker"])
    if ours.pop("network_mode", None) != "host":
        yield "a worker of several machines cannot train with others: it has not the network of its machine"
    environment, of_one = ours.pop("environment"), single.pop("environment")
    mounts, of_one_mounts = ours.pop("volumes"), single.pop("volumes")
    for key in ("networks", "depends_on"):
        single.pop(key)
    if different := sorted(key for key in ours.keys() | single.keys() if ours.get(key) != single.get(key)):
        yield f"a worker of several machines has another {', '.join(different)} than that of one"
    certificates = [mount for mount in mounts if mount not in of_one_mounts]
    if len(mounts) != len(of_one_mounts) + 1 or not certificates[0].endswith(":/certificates:ro"):
        yield "a worker of several machines has other folders than that of one, or can write to the certificate"
    urls = {"ANNEAL_DATABASE_URL", "ANNEAL_REDIS_URL"}
    added = {"ANNEAL_GROUP_INTERFACE"}
    for key in sorted((environment.keys() | of_one.keys()) - urls - added):
        if environment.get(key, "") != of_one.get(key, ""):
            yield f"a worker of several machines has another {key} than that of one"
    if not added <= environment.keys():
        yield "a worker of several machines cannot name its ANNEAL_GROUP_INTERFACE"
    database, redis = urlsplit(environment["ANNEAL_DATABASE_URL"]), urlsplit(environment["ANNEAL_REDIS_URL"])
    expected = {"require_auth": "scram-sha-256", "sslmode": "verify-full", "sslrootcert": _CERTIFICATES}
    if dict(parse_qsl(database.query)) != expected or not database.password:
        yield "a worker of several machines does not verify PostgreSQL"
    expected = {"ssl_cert_reqs": "required", "ssl_ca_certs": _CERTIFICATES}
    if redis.scheme != "rediss" or dict(parse_qsl(redis.query)) != expected or not redis.password:
        yield "a worker of several machines does not verify Redis"
