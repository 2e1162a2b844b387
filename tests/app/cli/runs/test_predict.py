"""The lines of docs/guides/predictions.md, and the command `anneal predict`."""

import json
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Engine

from anneal.contracts.schemas.runs.requests import PredictionConfig, PredictionCreate
from app.infra.storage import Storage
from tests.conftest import Anneal, json_of
from tests.factories import Trainer, make_dataset, make_model, make_run
from tests.nodes import ROOT
from tests.server import ApiServer
from tests.waiting import eventually
from worker.training.prediction.answers_file import AnsweredRow

GUIDE = (ROOT / "docs" / "guides" / "predictions.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
RUN = "run_01k3x9m6q2v8s4t0w7y5z1a3b6"
LORA = {"base_model": "my-model", "method": "lora", "lora_r": 8, "max_steps": 10}
ROWS = "".join(
    json.dumps({"messages": [{"role": "user", "content": f"{row}?"}, {"role": "assistant", "content": "yes"}]}) + "\n"
    for row in range(3)
)


def blocks_of(kind: str) -> list[str]:
    return [block for block_kind, block in BLOCKS if block_kind == kind]


@pytest.fixture
def run_id(emptied_api: ApiServer, engine: Engine) -> Iterator[str]:
    """A finished run on a model of the guide's name, with a checkpoint."""
    if not (emptied_api.settings.models_folder / "my-model").exists():
        make_model(emptied_api.settings, "my-model")
    run = make_run(emptied_api.client, make_dataset(engine), config=LORA, backend="celery")["id"]
    trainer = Trainer(engine, run).begin()
    trainer.checkpoint(5)
    trainer.complete().write_output(Storage(emptied_api.settings))
    Path("heldout.jsonl").write_text(ROWS)
    yield run


def answer(api: ApiServer, engine: Engine, status: str = "completed") -> str:
    """Act as the worker of the prediction that waits; answers its id."""
    waiting = {"task": "predict", "status": "pending"}
    pending = eventually(lambda: api.client.get("/v1/runs", params=waiting).json()["data"])
    prediction: str = pending[0]["id"]
    trainer = Trainer(engine, prediction).begin(total=3)
    folder = Storage(api.settings).output_dir(prediction, 1)
    folder.mkdir(parents=True)
    for name in ("predictions.jsonl", "predictions.parquet", "metrics.jsonl"):
        (folder / name).write_text(f"{name} of {prediction}")
    trainer.events("eval", {"step": 3, "metrics": {"eval_bleu": 31.5}})
    trainer.complete() if status == "completed" else trainer.fail()
    return prediction


def test_every_command_of_the_guide_works(emptied_api: ApiServer, engine: Engine, anneal: Anneal, run_id: str) -> None:
    (block,) = blocks_of("bash")
    commands = [shlex.split(line.partition("  #")[0].replace(RUN, run_id))[1:] for line in block.splitlines()]
    assert len(commands) == 3
    with ThreadPoolExecutor(1) as pool:
        for command in commands:
            done = pool.submit(anneal, *command)
            prediction = answer(emptied_api, engine)
            assert re.search(r"^eval_bleu +31.5$", done.result().stdout, re.MULTILINE)
            if "-o" in command:
                assert Path(command[command.index("-o") + 1]).read_text() == f"predictions.jsonl of {prediction}"
    models = [run["parent_run_id"] for run in emptied_api.client.get("/v1/runs?task=predict").json()["data"]]
    assert models == [None, run_id, None]
    listed = json_of(anneal("runs", "list", "--task", "predict", "--sort", "best", "--json"))["data"]
    assert len(listed) == 3


def test_program_of_the_guide_prints_scores_and_downloads_answers(
    emptied_api: ApiServer,
    engine: Engine,
    anneal: Anneal,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ANNEAL_URL", emptied_api.url)
    monkeypatch.setenv("ANNEAL_API_KEY", emptied_api.key)
    dataset = anneal("datasets", "upload", "heldout.jsonl").stdout.strip()
    (program,) = blocks_of("python")
    program = program.replace('"run_…"', repr(run_id)).replace('"ds_…"', repr(dataset))
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(exec, program, {})
        prediction = answer(emptied_api, engine)
        done.result()
    assert "'eval_bleu': 31.5" in capsys.readouterr().out
    assert Path("answers/predictions.jsonl").read_text() == f"predictions.jsonl of {prediction}"


def test_table_of_answers_is_downloaded_by_its_ending(
    emptied_api: ApiServer, engine: Engine, anneal: Anneal, run_id: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(anneal, "predict", run_id, "heldout.jsonl", "-o", "answers.parquet", "--json")
        prediction = answer(emptied_api, engine)
        assert json_of(done.result())["id"] == prediction
        assert Path("answers.parquet").read_text() == f"predictions.parquet of {prediction}"
        failed = pool.submit(anneal, "predict", run_id, "heldout.jsonl", "-o", "none.jsonl", code=3)
        answer(emptied_api, engine, "failed")
        failed.result()
    assert not Path("none.jsonl").exists()
    assert "leave `--no-wait` out" in anneal("predict", run_id, "heldout.jsonl", "-o", "x", "--no-wait", code=2).stderr


def test_requests_rows_and_options_of_the_guide_are_those_of_the_service() -> None:
    row, request, *_ = (json.loads(block) for block in blocks_of("json"))
    assert row.keys() == AnsweredRow.__annotations__.keys()
    PredictionCreate.model_validate(request)
    (sentence,) = re.findall(r"^`config` has (.*?)\. Anything", GUIDE, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", sentence)) == PredictionConfig.model_fields.keys()
    assert re.findall(r"^\| `(\w+)` \|.*\| (?:mean|`corpus_\w+`) \|$", GUIDE, re.MULTILINE) == list(row["scores"])
