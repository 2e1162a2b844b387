"""Container files match the code, and every rule that checks this can fail. Needs no container engine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.workers.status_files import WorkerStatusFile
from tests.container_rules import Files, problems
from tests.server import ApiServer

COMPOSE, TRAINER, PRIVATE, WORKER, DOCKERFILE, EXAMPLE, IGNORE, GIT = (
    "docker-compose.yml",
    "docker-compose.trainer.yml",
    "docker-compose.private.yml",
    "docker-compose.worker.yml",
    "Dockerfile.gpu",
    ".env.example",
    ".dockerignore",
    ".gitignore",
)
HOME = "/var/lib/anneal"

SPOILED = [
    (COMPOSE, "command: [anneal, api]", "command: [anneal, serve]", "is not a valid command"),
    (COMPOSE, "command: [anneal, migrate]", "command: [anneal, migrate, --fast]", "is not a valid command"),
    (COMPOSE, "exec api anneal keys create", "exec api anneal keys make", "is not a valid command"),
    (COMPOSE, "exec api anneal", "exec web anneal", "no service web"),
    (DOCKERFILE, 'CMD ["anneal", "worker"]', 'CMD ["anneal", "work"]', "is not a valid command"),
    (DOCKERFILE, "COPY migrations migrations", "COPY migration migration", "which does not exist"),
    (DOCKERFILE, "COPY --from=build-worker", "COPY --from=builder", "not an earlier stage"),
    (IGNORE, "!migrations/", "", "which .dockerignore excludes"),
    (IGNORE, "*\n", "", ".env gets into the images"),
    (DOCKERFILE, " AS worker\n", " AS gpu\n", "which is not a stage"),
    (DOCKERFILE, "USER anneal\nEXPOSE", "EXPOSE", "api runs as root"),
    (COMPOSE, "user: redis", "user: root", "redis runs as root"),
    (COMPOSE, "    shm_size: 256mb", '    ports: ["127.0.0.1:5432:5432"]', "not the API alone"),
    (COMPOSE, '"127.0.0.1:${ANNEAL_PORT', '"0.0.0.0:${ANNEAL_PORT', "on every address"),
    (COMPOSE, ":8700\"]", ":8000\"]", "port 8000 is published"),
    (COMPOSE, 'ANNEAL_PORT: "8700"', 'ANNEAL_PORT: "9000"', "exposed and listened on"),
    (COMPOSE, "ANNEAL_HOST: 0.0.0.0", "ANNEAL_HOST: 127.0.0.1", "is reachable"),
    (COMPOSE, "ANNEAL_MODELS_ROOT: /models", "ANNEAL_MODEL_ROOT: /models", "is not a setting"),
    (EXAMPLE, "ANNEAL_LOG_FORMAT=json", "ANNEAL_LOG_FORMAT=xml", "invalid settings"),
    (COMPOSE, "@redis:6379", "@cache:6379", "the URLs of both servers"),
    (COMPOSE, "POSTGRES_DB: anneal", "POSTGRES_DB: other", "does not match the account"),
    (EXAMPLE, "REDIS_PASSWORD=\n", "", "REDIS_PASSWORD is not in .env.example"),
    (EXAMPLE, "ANNEAL_PORT=8700", "ANNEAL_PORT=8700\nANNEAL_CACHE=/c", "but unused"),
    (EXAMPLE, "# AWS_ENDPOINT_URL=\n", "", "AWS_ENDPOINT_URL is passed on"),
    (EXAMPLE, "POSTGRES_PASSWORD=\n", "POSTGRES_PASSWORD=anneal\n", "publicly known"),
    (COMPOSE, "${ANNEAL_LOG_FORMAT:-json}", "${ANNEAL_LOG_FORMAT}", "without an error"),
    (COMPOSE, ":?Copy .env.example to .env and set REDIS_PASSWORD there.}", ":?unset}", "without an error message"),
    (COMPOSE, "image: redis:8", "image: redis:latest", "not pinned"),
    (COMPOSE, "image: postgres:18", "image: postgres:17", "is not postgres:18"),
    (DOCKERFILE, "python:3.12-slim-trixie AS api", "python AS api", "not pinned"),
    (COMPOSE, "postgres:/var/lib/postgresql", "postgres:/var/lib/postgresql/data", "not in its volume"),
    (COMPOSE, "  cache:\n", "", "volume cache"),
    (COMPOSE, "-storage}:/storage", "-storage}:/data", "ANNEAL_STORAGE is not the volume"),
    (COMPOSE, "worker-home:/var/lib/anneal", "worker-home:/home/anneal", "cannot write to ANNEAL_HOME"),
    (COMPOSE, "      - worker-home:/var/lib/anneal\n", "", "does not survive"),
    (DOCKERFILE, "/keys /cache", "/keys", "/cache belongs to root"),
    (DOCKERFILE, "HF_HOME=/cache/huggingface", "HF_HOME=/hub", "have no volume"),
    (DOCKERFILE, "'/healthz'", "'/readyz'", "does not request its public path"),
    (DOCKERFILE, "'127.0.0.1', 8700", "'127.0.0.1', 80", "does not request its public path"),
    (DOCKERFILE, '"python", "-P", "-c", "import http', '"curl", "-P", "-c", "import http', "not in the image"),
    (DOCKERFILE, "Path('/var/lib/anneal')", "Path('/home/anneal')", "does not look into its home"),
    (COMPOSE, "    healthcheck:\n      test: [CMD-S", "    x-check:\n      test: [CMD-S", "redis has no health check"),
    (COMPOSE, "stop_grace_period: 140s", "stop_grace_period: 60s", "worker is killed before"),
    (COMPOSE, 'ANNEAL_LEASE_SECONDS: "60"', 'ANNEAL_LEASE_SECONDS: "120"', "worker is killed before"),
    (COMPOSE, "stop_grace_period: 30s", "", "api is killed before"),
    (COMPOSE, "service_completed_successfully", "service_started", "its schema"),
    (COMPOSE, "    pull_policy: never\n", "", "pull our image from a registry"),
    (
        COMPOSE,
        "    pull_policy: never\n",
        "    build: {context: ., dockerfile: Dockerfile.gpu, target: api}\n",
        "two services build the same image",
    ),
    (COMPOSE, "restart: on-failure:3", "restart: always", "migrate is restarted"),
    (COMPOSE, "    restart: unless-stopped\n\n  # Hints", "\n  # Hints", "postgres is not restarted"),
    (COMPOSE, "capabilities: [gpu]", "capabilities: [video]", "has no GPU"),
    (COMPOSE, "read_only: true", "read_only: false", "can write to its image"),
    (COMPOSE, "cap_drop: [ALL]", "cap_drop: [NET_RAW]", "keeps capabilities"),
    (COMPOSE, "no-new-privileges:true", "label:disable", "can gain privileges"),
    (COMPOSE, "    internal: true", "    internal: false", "reachable from outside"),
    (DOCKERFILE, "PYTHONUNBUFFERED=1", "HF_TOKEN=abc", "a secret in a layer"),
    (COMPOSE, '"$$REDIS_PASSWORD" >', '"${REDIS_PASSWORD:?Set it there, in .env, please.}" >', "among the arguments"),
    (DOCKERFILE, "USER anneal\nEXPOSE", "RUN echo API_KEY=abc > /key\nUSER anneal\nEXPOSE", "a secret in a layer"),
    (DOCKERFILE, "RUN --mount=type=cache", "RUN --mount=type=secret --mount=type=cache", "a secret in a layer"),
    (COMPOSE, "ANNEAL_HOST: 0.0.0.0", "ANNEAL_HOST: 0.0.0.0\n      HF_TOKEN: abc", "HF_TOKEN is in"),
    (COMPOSE, "- ${STORAGE_FOLDER:-storage}:/storage", "- /s:/storage", "folder of the machine"),
    (EXAMPLE, "STORAGE_FOLDER=", "STORAGE_FOLDER=/srv/storage", "folder of the machine"),
    (COMPOSE, "- worker-home:", "- /var/run/docker.sock:/docker.sock\n      - worker-home:", "folder of the machine"),
    (COMPOSE, "    shm_size: 2gb", "    pid: host\n    shm_size: 2gb", "out of its container"),
    (TRAINER, "    user: root\n    cap_add: [CHOWN", "    user: root\n    ipc: host\n    cap_add: [CHOWN", "out of"),
    (COMPOSE, "models}:/models:ro", "models}:/models", "api can write to /models"),
    (COMPOSE, "keys}:/keys:ro", "keys}:/keys", "worker can write to /keys"),
    (COMPOSE, "tmpfs: [/tmp, /data]", 'tmpfs: ["/tmp:exec", /data]', "redis can execute what it writes"),
    (COMPOSE, "      interval: 5s\n", "", "postgres: a process that hangs is not noticed"),
    (DOCKERFILE, "--interval=10s --timeout=5s --start-period=120s", "--interval=10m", "worker: a process that hangs"),
    (GIT, ".env", "", ".env can be committed"),
    (TRAINER, "ANNEAL_TRAINER_USER: trainer", "ANNEAL_TRAINER_USER: nobody", "no user nobody"),
    (TRAINER, "trainer:/trainer", "trainer:/home", "does not belong to trainer alone"),
    (TRAINER, "HF_HOME: /trainer", "HF_HOME: /cache", "cannot write downloads"),
    (TRAINER, "KILL, ", "SYS_ADMIN, ", "other capabilities"),
    (TRAINER, "    user: root\n    cap_add: [CHOWN", "    privileged: true\n    cap_add: [CHOWN", "changes more"),
    (PRIVATE, "ssl=on", "ssl=off", "postgres does not encrypt"),
    (PRIVATE, "--tls-port 6380", "--port 6380", "redis does not encrypt"),
    (PRIVATE, "6380:6380", "6379:6379", "workers connect to another one"),
    (PRIVATE, "${SERVERS_ADDRESS:?Set", "0.0.0.0:${SERVERS_ADDRESS:?Set", "not published at the private address alone"),
    (PRIVATE, ":/certificates:ro", ":/certificates", "can write to a folder of the machine"),
    (PRIVATE, "    command: [postgres", "    user: root\n    command: [postgres", "postgres changes more"),
    (PRIVATE, "  redis:\n", "  api:\n", "not the two servers"),
    (COMPOSE, " $$REDIS_ARGUMENTS", "", "redis does not get its arguments"),
    (WORKER, "  worker:\n", "  api: {image: anneal-api}\n  worker:\n", "starts something else"),
    (WORKER, "network_mode: host", "networks: [outside]", "has not the network of its machine"),
    (WORKER, "read_only: true", "read_only: false", "another read_only"),
    (WORKER, "shm_size: 2gb", "pid: host\n    shm_size: 2gb", "another pid"),
    (WORKER, "stop_grace_period: 140s", "stop_grace_period: 10s", "another stop_grace_period"),
    (WORKER, 'ANNEAL_LEASE_SECONDS: "60"', 'ANNEAL_LEASE_SECONDS: "30"', "another ANNEAL_LEASE_SECONDS"),
    (WORKER, "      ANNEAL_GROUP_INTERFACE: ${ANNEAL_GROUP_INTERFACE:-}\n", "", "cannot name its"),
    (WORKER, "-keys}:/keys:ro", "-keys}:/keys", "other folders"),
    (WORKER, "servers.pem.}:/certificates:ro", "servers.pem.}:/certificates", "can write to the certificate"),
    (WORKER, "sslmode=verify-full", "sslmode=require", "does not verify PostgreSQL"),
    (WORKER, "require_auth=scram-sha-256&", "", "does not verify PostgreSQL"),
    (WORKER, "rediss://", "redis://", "does not verify Redis"),
    (WORKER, ":6380/0", ":6379/0", "workers connect to another one"),
    (DOCKERFILE, "-m 0711 /storage", "-m 0700 /storage", "cannot enter /storage"),
    (DOCKERFILE, "-m 0700 /var/lib/anneal /keys", "-m 0755 /var/lib/anneal /keys", "can enter /keys"),
]  # fmt: skip


def test_the_container_files_agree_with_the_code() -> None:
    assert problems(Files.ours()) == []


@pytest.mark.parametrize(("file", "right", "wrong", "reported"), SPOILED, ids=[f"{it[0]}: {it[2]!r}" for it in SPOILED])
def test_a_spoiled_copy_is_found_out(file: str, right: str, wrong: str, reported: str) -> None:
    texts = dict(Files.ours().texts)
    assert right in texts[file], "the file has changed: spoil another place of it"
    texts[file] = texts[file].replace(right, wrong)
    actual = problems(Files(texts))
    assert any(reported in problem for problem in actual), actual


def _ask(command: list[str]) -> int:
    """Run a health check as in the image and return its exit code."""
    return subprocess.run([sys.executable, *command[1:]], timeout=30, capture_output=True).returncode


def test_the_health_check_of_the_api_distinguishes_one_that_answers_from_one_that_is_gone(
    shared_api: ApiServer,
) -> None:
    check = Files.ours().stages["api"].health_check
    assert _ask([part.replace("8700", str(shared_api.port)) for part in check]) == 0
    assert _ask([part.replace("8700", "1") for part in check]) != 0
    elsewhere = [part.replace("8700", str(shared_api.port)).replace("/healthz", "/readyz") for part in check]
    assert _ask(elsewhere) != 0, "it has no key, and needs none"


def test_the_health_check_of_a_worker_distinguishes_one_that_runs_from_one_that_is_gone(tmp_path: Path) -> None:
    check = [part.replace(HOME, str(tmp_path)) for part in Files.ours().stages["worker"].health_check]
    assert _ask(check) != 0
    note = WorkerStatusFile(tmp_path, "wrk_1")
    note.open()  # of this very process, which lives
    assert _ask(check) == 0
    note.close()
    assert _ask(check) != 0


def test_redis_gets_a_configuration_that_it_takes(tmp_path: Path) -> None:
    """Read the configuration that its shell writes, with a plain password."""
    words = Files.ours().services["redis"]["command"]
    assert words[:2] == ["sh", "-c"]
    written = tmp_path / "redis.conf"
    script = words[2].replace("$$", "$").replace("/tmp/redis.conf", str(written)).replace("exec redis-server", "cat")
    done = subprocess.run(
        ["sh", "-c", script], env={"REDIS_PASSWORD": "s3cret", "PATH": "/usr/bin:/bin"}, capture_output=True, timeout=30
    )
    assert done.returncode == 0
    lines = done.stdout.decode().splitlines()
    assert lines == ["requirepass s3cret", 'save ""', "appendonly no", "maxmemory 256mb", "maxmemory-policy noeviction"]
    assert written.stat().st_mode & 0o077 == 0


def test_the_python_of_the_images_is_one_that_anneal_takes() -> None:
    versions = re.findall(r"python:3\.(\d+)", Files.ours().texts[DOCKERFILE])
    assert versions and all(int(version) >= 11 for version in versions)
