"""`push_to_hub`: the output arrives on the hub byte for byte; what goes wrong there never costs the run."""

import hashlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from anneal.contracts.attempt.messages import ControlMessage
from anneal.contracts.stop import StopRequest
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import DeviceCapabilities
from tests.jobs import make_spec
from tests.waiting import eventually
from tests.worker.training.output.hub_server import COMMIT, SMALL, Hub
from tests.worker.training.tiny import Forks, Outcome, make_job
from worker.training.context import TrainingContext
from worker.training.output import hub_push
from worker.wire.control import Control
from worker.wire.reporter import Reporter

TOKEN = "hf_of-ada-0123456789"
CONFIG: dict[str, Any] = {
    "method": "full", "max_seq_length": 64, "batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 2,
    "push_to_hub": "ada/tuned",
}  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Hub]:
    with Hub().open() as hub:
        yield hub


@pytest.fixture(scope="module")
def pushing_forks(served: Hub) -> Iterator[Forks]:
    """Training processes whose hub is the stand-in."""
    server = Forks(HF_ENDPOINT=served.url, HF_TOKEN=TOKEN)
    yield server
    server.close()


@pytest.fixture
def hub(served: Hub) -> Iterator[Hub]:
    """The stand-in, with nothing in it."""
    for things in (served.tokens, served.repositories, served.commits, served.answers):
        things.clear()
    yield served
    served.never_answers, served.role = "", "write"
    served.ends.set()
    served.asked.clear()


def job(folder: Path, model: Path, data: Path, **more: Any) -> dict[str, Any]:
    return {**make_job(folder, model, data, **{**CONFIG, **more}), "hub_allowed": True}


def files(folder: Path) -> dict[str, bytes | str]:
    """The files as the stand-in has them in a commit."""
    contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {
        name: content if len(content) <= SMALL else hashlib.sha256(content).hexdigest()
        for name, content in contents.items()
    }


def lines(outcome: Outcome, level: str) -> list[str]:
    return [record["line"] for record in outcome.of("message") if record["level"] == level]


@pytest.mark.full
def test_every_file_of_the_output_arrives_as_it_is_in_one_commit_of_a_private_repository(
    hub: Hub, pushing_forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    done = pushing_forks.run(job(tmp_path, tiny_model, chats, report_to=["tensorboard"]))
    assert done.result["outcome"] == "completed", done.stderr[-3000:]
    (commit,) = hub.commits
    assert commit == files(done.output)
    assert {"model.safetensors", "README.md", "metrics.jsonl", "tokenizer.json"} <= set(commit)
    assert any(name.startswith("tensorboard/") for name in commit)
    stored = sum(path.stat().st_size for path in Path(hub.storage).rglob("default.*"))
    assert stored > (done.output / "model.safetensors").stat().st_size / 2, "large files go to their own storage"
    (repository,) = hub.repositories
    assert (repository["name"], repository["organization"], repository["visibility"]) == ("tuned", "ada", "private")
    assert hub.tokens == {f"Bearer {TOKEN}"}
    url = f"{hub.url}/ada/tuned/commit/{COMMIT}"
    assert done.result["hub"] == {"repo": "ada/tuned", "commit": COMMIT, "url": url}
    assert f"Pushed to the hub: {url}" in lines(done, "info")
    last = [record for record in done.of("progress") if record["phase"] == "pushing"][-1]
    assert last["done"] == last["total"] > 0, "it says how far it is"
    card = (done.output / "README.md").read_text()
    assert 'from_pretrained("ada/tuned")' in card and str(tmp_path) not in card and "base_model:" not in card


@pytest.mark.full
@pytest.mark.parametrize("place", ["/api/repos/create", "/preupload/", "/xet-write-token/", "/commit/"])
def test_a_hub_that_fails_for_a_moment_is_asked_again(
    place: str, hub: Hub, pushing_forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    hub.answers.append((place, 503))
    done = pushing_forks.run(job(tmp_path, tiny_model, chats))
    assert done.result["hub"]["commit"] == COMMIT, (done.of("message"), done.stderr[-3000:])
    assert hub.commits == [files(done.output)]
    assert not hub.answers


@pytest.mark.full
def test_a_hub_that_refuses_costs_the_push_and_not_the_run(
    hub: Hub, pushing_forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    hub.answers.append(("/commit/", 403))
    done = pushing_forks.run(job(tmp_path, tiny_model, chats))
    assert (done.code, done.result["outcome"], done.result["output"]) == (0, "completed", "output")
    assert (done.output / "model.safetensors").is_file()
    (line,) = lines(done, "error")
    assert "was not pushed to ada/tuned" in line and "403" in line and "hf upload ada/tuned" in line
    assert "403" in done.result["hub"]["error"]


@pytest.mark.full
def test_a_users_stop_ends_a_push_at_once_and_leaves_the_run_complete(
    hub: Hub, pushing_forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    hub.never_answers = "/commit/"
    hub.ends.clear()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "control"))
        listening.listen()
        pushing_forks.start(job(tmp_path, tiny_model, chats), control=tmp_path / "control")
        control, _ = listening.accept()
    with control:
        eventually(hub.asked.is_set, timeout=60)
        control.send(ControlMessage(stop=StopRequest("checkpoint")).to_json())
        done = pushing_forks.wait()
    assert (done.result["outcome"], done.result["output"]) == ("completed", "output")
    assert done.result["hub"] == {"repo": "ada/tuned", "error": "a stop was requested"}
    assert "was not pushed" in lines(done, "error")[0]


@pytest.mark.full
def test_a_worker_that_ends_during_a_push_leaves_it_to_the_next(
    hub: Hub, pushing_forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    hub.never_answers = "/commit/"
    hub.ends.clear()
    pid = pushing_forks.start(job(tmp_path, tiny_model, chats))
    eventually(hub.asked.is_set, timeout=60)
    os.kill(pid, signal.SIGTERM)
    done = pushing_forks.wait()
    assert (done.result["outcome"], done.result["why"]) == ("stopped", "drain")

    hub.never_answers = ""
    hub.ends.set()
    again = job(tmp_path, tiny_model, chats, attempt=2, resume_from=done.checkpoint(2))
    done = pushing_forks.run(again)
    assert done.result["outcome"] == "completed"
    assert hub.commits == [files(done.output)]


@pytest.mark.full
def test_without_a_token_a_run_fails_before_it_trains(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    done = forks.run(job(tmp_path, tiny_model, chats))
    assert done.result["error"]["code"] == "config_error"
    assert "anneal secrets set hf_token" in done.result["error"]["message"]
    assert not done.of("phase")


class TestCheckBeforeTraining:
    """What a push needs is tried before the first step."""

    @pytest.mark.full
    def test_token_that_may_only_read_fails_the_run(
        self, hub: Hub, pushing_forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        hub.role = "read"
        done = pushing_forks.run(job(tmp_path, tiny_model, chats))
        assert (done.result["error"]["code"], done.steps) == ("config_error", {})
        assert "may only read" in done.result["error"]["message"]

    @pytest.mark.full
    def test_token_that_the_hub_refuses_fails_the_run(
        self, hub: Hub, pushing_forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        hub.answers.append(("/api/whoami-v2", 401))
        done = pushing_forks.run(job(tmp_path, tiny_model, chats))
        assert (done.result["error"]["code"], done.steps) == ("config_error", {})
        assert "anneal secrets set hf_token" in done.result["error"]["message"]

    @pytest.mark.full
    @pytest.mark.parametrize(("name", "fails"), [("grace/tuned", True), ("analysts/tuned", False)])
    def test_name_of_an_owner_for_whom_the_token_may_not_write_fails_the_run(
        self, name: str, fails: bool, hub: Hub, pushing_forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        done = pushing_forks.run(job(tmp_path, tiny_model, chats, push_to_hub=name))
        assert done.result["outcome"] == ("failed" if fails else "completed")
        if fails:
            assert "`ada`, `analysts`" in done.result["error"]["message"]

    @pytest.mark.full
    def test_hub_that_cannot_be_asked_costs_a_warning(
        self, hub: Hub, pushing_forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        hub.answers.append(("/api/whoami-v2", 500))
        done = pushing_forks.run(job(tmp_path, tiny_model, chats))
        assert done.result["hub"]["commit"] == COMMIT, done.result
        assert any("not known before the end" in line for line in lines(done, "warning"))


@pytest.mark.full
def test_a_hub_that_never_answers_is_given_up(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.get_session(), "timeout", None)  # what it is again after the test
    monkeypatch.setattr(hub_push, "_TIMEOUT_SECONDS", 0.5)
    hub.never_answers = "/api/repos/create"
    hub.ends.clear()
    (tmp_path / "output").mkdir()
    config = TrainingConfig.model_validate({"base_model": "tiny", "push_to_hub": "ada/tuned"})
    nothing: Any = None
    run = TrainingContext(
        make_spec(tmp_path, hub_allowed=True), config, set(), DeviceCapabilities(), Reporter(None), Control(), nothing
    )
    assert hub_push.push_output(run, tmp_path / "output") == {"repo": "ada/tuned", "error": "timed out"}
