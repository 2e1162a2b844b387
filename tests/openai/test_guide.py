"""docs/guides/coming-from-openai.md: its tables list each call and parameter of the official client, as they behave."""

import inspect
import re
import shlex
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import openai
import pytest
from sqlalchemy import Engine

from app.openai.ids import to_native_id
from app.webhooks.message import signed_headers
from tests.app.uploads import lines
from tests.conftest import Anneal
from tests.factories import Trainer, make_model
from tests.nodes import ROOT
from tests.openai.test_files import CHAT, PAIR, upload
from tests.openai.test_job_creation import run_of
from tests.server import ApiServer
from tests.waiting import eventually

GUIDE = (ROOT / "docs" / "guides" / "coming-from-openai.md").read_text()
PROGRAMS: list[str] = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
RESOURCES = (
    "files", "models", "fine_tuning.jobs", "fine_tuning.jobs.checkpoints", "fine_tuning.checkpoints.permissions",
    "fine_tuning.alpha.graders", "webhooks", "webhooks.event_types",
)  # fmt: skip


def table(heading: str) -> dict[str, str]:
    """The rows of the table whose first column has this name: names in the first column, with the second one."""
    (body,) = re.findall(rf"^\| {heading} \|.*\n\|---\|---\|\n((?:\|.*\n)+)", GUIDE, re.MULTILINE)
    return dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", body, re.MULTILINE))


CALLS = table("call")
SECRET = "whsec_" + "c2VjcmV0" * 4


def program_for(api: ApiServer, model: str) -> str:
    """The first program, on this service and model."""
    program = PROGRAMS[0].replace("http://127.0.0.1:8700", api.url).replace("anneal_…", api.key)
    return program.replace("Qwen/Qwen3-0.6B", model).replace("sleep(5)", "sleep(0.2)")


def resource(client: openai.OpenAI, name: str) -> Any:
    for part in name.split("."):
        client = getattr(client, part)
    return client


def calls_of_client(client: openai.OpenAI) -> Iterator[str]:
    for name in RESOURCES:
        methods = inspect.getmembers(type(resource(client, name)), inspect.isfunction)
        yield from (f"{name}.{method}" for method, _ in methods if not method.startswith("_"))


def test_table_lists_every_call_of_the_client(client: openai.OpenAI) -> None:
    assert sorted(CALLS) == sorted(calls_of_client(client))


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    make_model(emptied_api.settings, "tiny")
    return emptied_api


def arguments(client: openai.OpenAI) -> dict[str, Callable[[Any], Any]]:
    """Methods of the client by the call that they send."""
    file_id = upload(client, lines(CHAT)).id
    unreferenced_id = upload(client, lines(CHAT)).id

    def create_job() -> str:
        native = {"anneal": {"backend": "fake"}}
        job_id: str = client.fine_tuning.jobs.create(model="tiny", training_file=file_id, extra_body=native).id
        return job_id

    checkpoint_id = "ckpt_" + "0" * 26
    grader = {"type": "string_check", "name": "g", "input": "a", "reference": "b", "operation": "eq"}
    hook: dict[str, Any] = {"name": "n", "url": "https://hooks.invalid/x", "event_types": ["fine_tuning.job.failed"]}
    hook_id, unused_hook = (client.webhooks.create(**hook).id for _ in range(2))
    signed = signed_headers("evt", int(time.time()), b"{}", [SECRET])
    return {
        "files.create": lambda call: call(file=("x.jsonl", lines(CHAT)), purpose="fine-tune"),
        "files.list": lambda call: call(),
        "files.retrieve": lambda call: call(file_id),
        "files.delete": lambda call: call(unreferenced_id),
        "files.content": lambda call: call(file_id),
        "files.retrieve_content": lambda call: call(file_id),
        "files.wait_for_processing": lambda call: call(file_id),
        "models.list": lambda call: call(),
        "models.retrieve": lambda call: call("tiny"),
        "models.delete": lambda call: call("tiny"),
        "fine_tuning.jobs.create": lambda call: call(model="tiny", training_file=file_id),
        "fine_tuning.jobs.list": lambda call: call(metadata={"a": "b"}),
        **{
            f"fine_tuning.jobs.{name}": lambda call: call(create_job())
            for name in ("retrieve", "cancel", "pause", "resume", "list_events", "checkpoints.list")
        },
        "fine_tuning.checkpoints.permissions.create": lambda call: call(checkpoint_id, project_ids=["x"]),
        "fine_tuning.checkpoints.permissions.retrieve": lambda call: call(checkpoint_id),
        "fine_tuning.checkpoints.permissions.list": lambda call: call(checkpoint_id),
        "fine_tuning.checkpoints.permissions.delete": lambda call: call("p", fine_tuned_model_checkpoint=checkpoint_id),
        "fine_tuning.alpha.graders.run": lambda call: call(grader=grader, model_sample="x"),
        "fine_tuning.alpha.graders.validate": lambda call: call(grader=grader),
        "webhooks.create": lambda call: call(**hook),
        "webhooks.list": lambda call: call(),
        "webhooks.retrieve": lambda call: call(hook_id),
        "webhooks.update": lambda call: call(hook_id, name="other"),
        "webhooks.delete": lambda call: call(unused_hook),
        "webhooks.rotate_secret": lambda call: call(hook_id),
        "webhooks.unwrap": lambda call: call(b"{}", signed, secret=SECRET),
        "webhooks.verify_signature": lambda call: call(b"{}", signed, secret=SECRET),
        "webhooks.event_types.list": lambda call: call(),
    }


def test_call_succeeds_if_the_table_says_so_and_is_refused_otherwise(
    api: ApiServer, client: openai.OpenAI, subtests: pytest.Subtests
) -> None:
    making = arguments(client)
    # `webhooks.test` needs a receiver: `test_webhooks.py`.
    assert {*making, "webhooks.test"} == CALLS.keys()
    for name, text in [(name, CALLS[name]) for name in making]:
        with subtests.test(call=name):
            owner, _, method = name.rpartition(".")
            call = getattr(resource(client, owner), method)
            if text.startswith("no"):
                with pytest.raises(openai.APIStatusError) as refused:
                    making[name](call)
                assert refused.value.code in ("not_found", "method_not_allowed", "not_supported")
            else:
                making[name](call)


def test_tables_list_every_parameter_of_a_job(client: openai.OpenAI) -> None:
    parameters = inspect.signature(client.fine_tuning.jobs.create).parameters
    own = {name for name in parameters if name != "timeout" and not name.startswith("extra_")}
    assert set(table("parameter")) == own
    from openai.types.fine_tuning import (
        dpo_hyperparameters_param,
        reinforcement_hyperparameters_param,
        supervised_hyperparameters_param,
    )

    known = {
        *supervised_hyperparameters_param.SupervisedHyperparametersParam.__annotations__,
        *dpo_hyperparameters_param.DpoHyperparametersParam.__annotations__,
        *reinforcement_hyperparameters_param.ReinforcementHyperparametersParam.__annotations__,
    }
    assert set(table("hyperparameter")) == known


def test_table_lists_every_grader_of_the_client() -> None:
    import openai.types.graders as graders

    models = [model for name, model in inspect.getmembers(graders, inspect.isclass) if name.endswith("Grader")]
    assert set(table("grader")) == {get_args(model.model_fields["type"].annotation)[0] for model in models}


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("n_epochs", 7), ("batch_size", 10), ("learning_rate_multiplier", 3.0), ("beta", 0.7), ("seed", 5)],
)
def test_parameter_becomes_the_fields_that_the_table_names_and_no_other(
    api: ApiServer, client: openai.OpenAI, parameter: str, value: Any
) -> None:
    pairs = upload(client, lines(PAIR)).id

    def config_of(**parameters: Any) -> dict[str, Any]:
        method: Any = {"type": "dpo", "dpo": {"hyperparameters": parameters.pop("hyperparameters", {})}}
        job = client.fine_tuning.jobs.create(model="tiny", training_file=pairs, method=method, **parameters)
        config: dict[str, Any] = run_of(api, job.id)["config"]
        options = config.pop("dpo")
        return {**config, **{f"dpo.{name}": option for name, option in options.items()}}

    default = config_of()
    changed = config_of(**({"seed": value} if parameter == "seed" else {"hyperparameters": {parameter: value}}))
    text = (table("parameter") | table("hyperparameter"))[parameter]
    assert {name for name in changed if changed[name] != default[name]} == set(re.findall(r"`([\w.]+)`", text))


def test_first_program_creates_its_job(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.jsonl").write_bytes(lines(CHAT))
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(program_for(api, "tiny").partition("\nwhile ")[0], namespace)
    job = namespace["job"]
    assert (job.status, job.metadata) == ("queued", {"team": "docs"})
    run = run_of(api, job.id)
    assert (run["name"], run["config"]["epochs"], run["config"]["batch_size"]) == ("docstrings", 1, 4)


def test_native_fields_of_the_last_program_are_those_of_the_run(api: ApiServer, client: openai.OpenAI) -> None:
    file = upload(client, lines(CHAT))
    namespace: dict[str, Any] = {"client": client, "file": file}
    exec("job = " + PROGRAMS[2].strip().replace("Qwen/Qwen3-0.6B", "tiny"), namespace)
    run = run_of(api, namespace["job"].id)
    assert (run["config"]["lora_r"], run["resources"]["gpu"], run["priority"], run["tags"]) == (
        32, "H100", 10, ["nightly"],
    )  # fmt: skip
    assert run["dataset_id"] == to_native_id(file.id, "ds")


def test_jobs_of_the_past_become_run_files_with_the_lines_of_the_guide(
    api: ApiServer, client: openai.OpenAI, engine: Engine, anneal: Anneal, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(api.settings, "Qwen/Qwen3-0.6B")
    job = client.fine_tuning.jobs.create(model="tiny", training_file=upload(client, lines(CHAT)).id)
    client.fine_tuning.jobs.cancel(job.id)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{api.url}/openai/v1")  # this service in place of OpenAI's
    monkeypatch.setenv("OPENAI_API_KEY", api.key)
    program, *others = PROGRAMS[3:]
    assert others == []
    exec(program, {})
    Path("exported").mkdir()
    Path(f"exported/{job.training_file}.jsonl").write_bytes(client.files.content(job.training_file).content)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    (block,) = [text for language, text in blocks if not language]
    importing, creating = (shlex.split(line.replace("ftjob-abc123", job.id))[1:] for line in block.splitlines())
    anneal(*importing)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(anneal, *creating)
        pending = eventually(lambda: api.client.get("/v1/runs", params={"status": "pending"}).json()["data"])
        Trainer(engine, pending[0]["id"]).begin().complete()
        done.result()
    run = api.client.get(f"/v1/runs/{pending[0]['id']}").json()
    assert (run["config"]["base_model"], run["config"]["loss_on"]) == ("Qwen/Qwen3-0.6B", "assistant")
