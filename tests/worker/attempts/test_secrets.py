"""A run gets the secrets that it needs, over its own channel; nobody else can read them, nor does its log tell them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from anneal.contracts.attempt.job import JobSpec
from app.config import Settings
from app.infra.db import sync_engine
from app.secrets import store
from tests.factories import make_model
from tests.rows import add_run, add_worker, claim, run_row
from tests.stack import Stack
from tests.worker.attempts.test_job_builder import WAITS, Context
from tests.worker.process.launching import CPU, Said, start_launcher
from tests.worker.trainers import write_job
from worker.attempts.job_builder import Job, prepare_job
from worker.attempts.job_error import JobError

TOKEN = "token-of-ada/0123456789+abcdef"


def keep(settings: Settings, name: str = "hf_token", value: str = TOKEN) -> None:
    """Set a secret."""
    with sync_engine(settings.database_url or "", pool_size=0).begin() as connection:
        connection.execute(store.put_secret(store.encryption_keyring(connection, settings), name, value, None))


def prepared(settings: Settings, engine: Engine, base_model: str, **config: Any) -> Job:
    """The job of a run on this base model."""
    run = add_run(engine, backend="celery", config={"base_model": base_model, **config}, user_set_fields=["base_model"])
    context = Context(settings, engine)
    file = context.storage.dataset_file(run.dataset_id, "jsonl")
    file.parent.mkdir(parents=True)
    file.write_text('{"text": "a"}\n')
    claimed = claim(engine, add_worker(engine, backends=["celery"]))
    return prepare_job(context, run_row(engine, claimed.id), CPU, WAITS)  # type: ignore[arg-type]


def files_with(text: str, *roots: Path) -> list[Path]:
    return [path for root in roots for path in root.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_a_run_on_a_hub_model_gets_the_token_and_no_file_has_it(settings: Settings, engine: Engine) -> None:
    keep(settings)
    keep(settings, "other", "of-no-use-to-a-run")
    job = prepared(settings, engine, "ada/private")
    assert job.secrets == {"HF_TOKEN": TOKEN}
    assert TOKEN not in repr(job)
    assert files_with(TOKEN, settings.storage_root, settings.home) == []


def test_an_adapter_gets_it_since_its_base_may_be_of_the_hub(settings: Settings, engine: Engine) -> None:
    keep(settings)
    make_model(settings, "adapter", "adapter_config.json")
    assert prepared(settings, engine, "adapter").secrets == {"HF_TOKEN": TOKEN}


def test_so_does_a_run_with_a_reward_model_of_the_hub(settings: Settings, engine: Engine) -> None:
    keep(settings)
    make_model(settings, "local")
    rewards = [{"type": "model", "model": "ada/judge", "weight": 1.0}]
    job = prepared(settings, engine, "local", method="rlhf", rlhf={"rewards": rewards})
    assert job.secrets == {"HF_TOKEN": TOKEN}


@pytest.mark.parametrize(
    ("secret", "variable", "config"),
    [
        ("wandb_api_key", "WANDB_API_KEY", {"report_to": ["tensorboard", "wandb"]}),
        ("mlflow_tracking_token", "MLFLOW_TRACKING_TOKEN", {"report_to": ["mlflow"]}),
        ("hf_token", "HF_TOKEN", {"push_to_hub": "ada/tuned"}),
    ],
)
def test_a_run_gets_the_token_of_what_it_reports_or_pushes_to_and_no_other(
    secret: str, variable: str, config: dict[str, Any], settings: Settings, engine: Engine
) -> None:
    for name in ("wandb_api_key", "mlflow_tracking_token", "hf_token"):
        keep(settings, name, TOKEN + name)
    make_model(settings, "local")
    assert prepared(settings, engine, "local", **config).secrets == {variable: TOKEN + secret}


def test_a_run_that_needs_no_secret_gets_none(settings: Settings, engine: Engine) -> None:
    keep(settings)
    make_model(settings, "local")
    assert prepared(settings, engine, "local").secrets == {}


def test_a_worker_that_may_not_ask_the_hub_has_no_use_for_its_token(settings: Settings, engine: Engine) -> None:
    keep(settings)
    make_model(settings, "adapter", "adapter_config.json")
    alone = settings.model_copy(update={"allow_hub": False})
    assert prepared(alone, engine, "adapter").secrets == {}


def test_a_worker_without_the_key_file_lets_another_try(settings: Settings, engine: Engine, tmp_path: Path) -> None:
    keep(settings)
    elsewhere = settings.model_copy(update={"secret_key_file": tmp_path / "not here"})
    with pytest.raises(JobError, match="ANNEAL_SECRET_KEY_FILE") as refused:
        prepared(elsewhere, engine, "ada/private")
    assert refused.value.is_transient


@pytest.mark.parametrize("mode", ["zygote", "cold"])
def test_the_secret_reaches_its_own_process_and_is_seen_nowhere_else(tmp_path: Path, mode: str) -> None:
    """Not in an environment or a command line as the kernel shows them, nor in the memory that later runs inherit."""
    launcher = start_launcher(tmp_path / "home", mode)
    reported = []
    for secrets in ({"HF_TOKEN": TOKEN}, {}):
        folder = tmp_path / f"job{len(reported)}"
        said = Said(launcher.launch("tests.worker.trainers:secretive", write_job(folder), [CPU], secrets=secrets))
        assert said.to_the_end().code == 0, said.pieces
        reported.append(said.record("secret"))
    in_memory = TOKEN.encode() in memory_of(launcher.zygote_pid) if launcher.zygote_pid else False
    launcher.stop()
    assert [record["token"] for record in reported] == [TOKEN, None]
    assert "PATH=" in reported[0]["shown"]
    assert not any(TOKEN in record["shown"] for record in reported)
    assert not in_memory
    assert files_with(TOKEN, tmp_path) == []


def memory_of(pid: int) -> bytes:
    """All that a process can write to."""
    content = bytearray()
    with Path(f"/proc/{pid}/mem").open("rb") as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if region := re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line):
                begin, end = (int(number, 16) for number in region.groups())
                memory.seek(begin)
                content += memory.read(end - begin)
    assert b"tests.worker.trainers" in content
    return bytes(content)


def test_through_the_whole_service_no_event_shows_the_secret(tmp_path: Path) -> None:
    """The pretended trainer prints the token as its log line, and its configuration repeats it."""
    stack = Stack(tmp_path)
    try:
        keep(stack.settings)
        stack.add_worker()
        run_id = stack.create(
            {"steps": 3, "step_seconds": 0, "log_line": f"the token is {TOKEN}!"}, {"base_model": "ada/private"}
        )
        stack.until(run_id, "completed")
        events = stack.events(run_id)
        assert TOKEN not in json.dumps(events)
        assert [event["line"] for event in events if event["type"] == "log"].count("the token is [redacted]!") >= 3
        assert stack.client.get(f"/v1/runs/{run_id}/logs").text.count("[redacted]") >= 3
        assert files_with(TOKEN, stack.home / "logs") == []
    finally:
        stack.close()


def test_a_worker_holds_a_run_against_its_own_list_of_models(settings: Settings, engine: Engine) -> None:
    """An API with another list, or a run from before the list, gets no model past it."""
    limited = settings.model_copy(update={"allowed_models": "meta/*"})
    with pytest.raises(JobError, match="`meta/\\*`") as refused:
        prepared(limited, engine, "ada/private")
    assert (refused.value.code, refused.value.is_transient) == ("config_error", False)


def with_reward(settings: Settings, engine: Engine, url: str) -> Job:
    """The job of a run that is rewarded by a service."""
    make_model(settings, "local")
    rewards = [{"type": "http", "url": url, "weight": 1.0}]
    return prepared(settings, engine, "local", method="rlhf", rlhf={"rewards": rewards})


def test_a_run_gets_the_keys_of_the_hosts_that_its_rewards_call_and_no_others(
    settings: Settings, engine: Engine
) -> None:
    for name in ("judge_key", "other_key"):
        keep(settings, name, TOKEN + name)
    hosts = "API.example.com:8443=judge_key, other.example.com=other_key"
    allowing = settings.model_copy(update={"reward_hosts": hosts})
    job = with_reward(allowing, engine, "https://api.example.com:8443/v1")
    assert job.secrets == {"ANNEAL_REWARD_KEY_JUDGE_KEY": f"{TOKEN}judge_key"}
    (host,) = JobSpec.from_file(job.path).reward_hosts
    assert (host.name, host.port, host.is_private, host.secret) == ("api.example.com", 8443, False, "judge_key")
    assert files_with(TOKEN, settings.storage_root, settings.home) == []


def test_one_secret_may_be_a_token_of_the_hub_and_the_key_of_a_host(settings: Settings, engine: Engine) -> None:
    keep(settings)
    allowing = settings.model_copy(update={"reward_private_hosts": "10.1.2.3=hf_token"})
    rewards = [{"type": "http", "url": "http://10.1.2.3/x", "weight": 1.0}]
    job = prepared(allowing, engine, "ada/private", method="rlhf", rlhf={"rewards": rewards})
    assert job.secrets == {"HF_TOKEN": TOKEN, "ANNEAL_REWARD_KEY_HF_TOKEN": TOKEN}


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ("", "ANNEAL_REWARD_HOSTS"),
        ("api.example.com:8443=judge_key", "ANNEAL_REWARD_HOSTS"),
        ("api.example.com=judge_key", "anneal secrets set judge_key"),
    ],
    ids=["not allowed", "another port", "without key"],
)
def test_a_worker_holds_a_run_against_its_own_list_of_hosts_and_their_keys(
    hosts: str, says: str, settings: Settings, engine: Engine
) -> None:
    allowing = settings.model_copy(update={"reward_hosts": hosts})
    with pytest.raises(JobError, match=says) as refused:
        with_reward(allowing, engine, "https://api.example.com/v1")
    assert (refused.value.code, refused.value.is_transient) == ("config_error", False)
