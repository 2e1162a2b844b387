"""Promises about token statistics: exact figures over what is trained on, with a tokenizer that is there."""

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from app.config import Settings
from app.datasets import importer, token_counter
from app.datasets.token_counter import TokenCounter
from app.infra.db import sync_engine
from app.infra.ids import new_id
from app.infra.process import sandbox
from app.infra.storage import Storage
from tests.app.uploads import PeakMemory, errors, lines, parquet, upload
from tests.factories import Trainer, make_dataset, make_model, make_run
from tests.server import ApiServer, ProcessServer, ThreadServer

_AT_ONCE = 40


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


def _tokenizer(folder: Path) -> Path:
    """One token a word; saved, as trainers do, with a cut at 4 tokens."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.enable_truncation(4)
    file = folder / "tokenizer.json"
    words.save(str(file))
    return file


def _counted(api: ApiServer, content: bytes, name: str = "d.jsonl", tokenizer: str = "tiny") -> Any:
    answer = upload(api, content, name, tokenizer=tokenizer)
    assert answer.status_code == 201, answer.text
    reported = answer.json()["token_statistics"]
    assert api.client.get(f"/v1/datasets/{answer.json()['id']}").json()["token_statistics"] == reported
    return reported


def test_the_figures_are_exact(api: ApiServer, settings: Settings) -> None:
    _tokenizer(make_model(settings))
    lengths = [*range(1, 101)] * 20 + [70_000]
    content = lines(*({"text": "a " * length} for length in lengths))
    assert _counted(api, content) == {
        "tokenizer": "tiny", "rows": 2001, "sequences": 2001, "total": 101_000 + 70_000,
        "mean": round(171_000 / 2001, 2), "min": 1, "p50": 51, "p95": 96, "max": 70_000,
    }  # fmt: skip
    assert upload(api, content).json()["token_statistics"] is None


@pytest.mark.parametrize(
    ("row", "tokens"),
    [
        ({"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "a"}], "n": "b b"}, 3),
        ({"prompt": "a", "completion": "a b", "n": "b"}, 3),
        # Either answer comes with the prompt.
        ({"prompt": "a", "chosen": "a b", "rejected": "b"}, 5),
        ({"prompt": "a b", "answer": "b b b"}, 2),
    ],
)
def test_contents_of_the_format_are_counted_and_nothing_else(
    api: ApiServer, settings: Settings, row: dict[str, Any], tokens: int
) -> None:
    _tokenizer(make_model(settings))
    assert _counted(api, lines(row, row))["total"] == tokens * 2
    assert _counted(api, parquet([row]), "d.parquet")["total"] == tokens


def test_a_pair_is_two_sequences_each_with_the_prompt(api: ApiServer, settings: Settings) -> None:
    _tokenizer(make_model(settings))
    said = [{"role": "assistant", "content": "b " * 10}]
    pairs = [
        {"prompt": "a " * 100, "chosen": "b " * 10, "rejected": "b " * 30},
        {"prompt": "a " * 200, "chosen": "b", "rejected": "b"},
        {"prompt": [{"role": "user", "content": "a " * 50}], "chosen": said, "rejected": said},
    ]
    reported = _counted(api, lines(*pairs))
    assert (reported["rows"], reported["sequences"], reported["total"]) == (3, 6, 110 + 130 + 2 * 201 + 2 * 60)
    assert (reported["min"], reported["max"]) == (60, 201)


def test_the_tokenizer_of_a_runs_output_can_be_named(api: ApiServer, settings: Settings) -> None:
    engine = sync_engine(settings.database_url or "", pool_size=0)
    run = make_run(api.client, make_dataset(engine))["id"]
    assert errors(api, lines({"text": "a"}), tokenizer=run) == [("tokenizer", "base_run_without_output")]
    trainer = Trainer(engine, run).begin()
    output = trainer.write_output(Storage(settings))
    trainer.complete()
    (output / "adapter_config.json").write_text("{}")
    _tokenizer(output)
    assert _counted(api, lines({"text": "a b"}), tokenizer=run)["total"] == 2


def test_a_tokenizer_that_is_not_there_is_reported_before_the_file_is_read(api: ApiServer, settings: Settings) -> None:
    make_model(settings, "without")
    (make_model(settings, "broken") / "tokenizer.json").write_text('{"model": 1}')
    local = {"../etc": "outside_models_root", "nowhere": "model_not_found", new_id("run"): "base_run_without_output",
             "without": "tokenizer_not_found", "broken": "bad_tokenizer", "": "outside_models_root"}  # fmt: skip
    for name, code in local.items():
        problems = errors(api, b"what is in here does not matter", tokenizer=name)
        assert problems == [("tokenizer", code)], (name, problems)


def test_many_uploads_at_once_do_not_wait_for_each_other(settings: Settings) -> None:
    """More of them than a process has threads for blocking work, each of which needs some more of these."""
    _tokenizer(make_model(settings))
    with ThreadServer(settings) as api, ThreadPoolExecutor(_AT_ONCE) as pool:

        def upload(number: int) -> Any:
            return _counted(api, lines({"text": "a " * number}))["total"]

        assert list(pool.map(upload, range(1, _AT_ONCE + 1))) == list(range(1, _AT_ONCE + 1))
        assert upload(3) == 3


def test_a_tokenizer_that_makes_much_of_a_short_text_costs_its_own_process(settings: Settings) -> None:
    swell = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    bomb = json.loads(_tokenizer(make_model(settings)).read_text())
    bomb["normalizer"] = {"type": "Sequence", "normalizers": [swell] * 5}
    (make_model(settings, "bomb") / "tokenizer.json").write_text(json.dumps(bomb))
    with ProcessServer(settings) as api:
        assert _counted(api, lines({"text": "a"}))["total"] == 1
        with PeakMemory(api.process.pid) as memory:
            assert errors(api, lines({"text": "a" * 50}), tokenizer="bomb") == [("tokenizer", "bad_tokenizer")]
        assert psutil.Process(api.process.pid).children() == []
    assert memory.grown < 30e6


def test_a_row_longer_than_a_batch_counts_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_counter, "_BATCH_CHARACTERS", 100)
    monkeypatch.setattr(token_counter, "_PIECE_CHARACTERS", 40)
    counter = TokenCounter("words", _tokenizer(tmp_path), Settings(home=tmp_path))
    for words in (3, 1000, 1, 50, 50, 200):
        counter.add_sequence(["a " * words])
    reported = counter.compute_statistics(3)
    counter.close()
    assert (reported["rows"], reported["sequences"], reported["total"], reported["min"], reported["max"]) == (
        3,
        6,
        1304,
        1,
        1000,
    )


def test_a_folder_of_the_same_name_where_the_service_was_started_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise SystemExit('not ours')")
    (tmp_path / "json.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path)
    counter = TokenCounter("words", _tokenizer(tmp_path), Settings(home=tmp_path))
    counter.add_sequence(["a b"])
    assert counter.compute_statistics(1)["total"] == 2
    counter.close()


def test_number_of_token_counting_processes_is_limited(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_slots", {})
    monkeypatch.setattr(sandbox, "MAX_PROCESSES", 1)
    monkeypatch.setattr(importer, "SLOT_TIMEOUT_SECONDS", 0.3)
    file = _tokenizer(make_model(settings))
    first = TokenCounter("words", file, settings)
    with ThreadServer(settings) as api:
        for content, name in ((lines({"text": "a"}), "d.jsonl"), (parquet([{"text": "a"}]), "d.parquet")):
            refused = upload(api, content, name, tokenizer="tiny")
            assert (refused.status_code, refused.json()["code"]) == (503, "too_many_uploads")
            assert refused.headers["retry-after"] == "30"
        assert upload(api, parquet([{"text": "a"}]), "d.parquet").status_code == 201
        first.close()
        assert _counted(api, lines({"text": "a a"}))["total"] == 2


def test_memory_does_not_grow_with_rows_or_with_long_ones(tmp_path: Path) -> None:
    counter = TokenCounter("words", _tokenizer(tmp_path), Settings(home=tmp_path))
    for _ in range(2):
        counter.add_sequence(["a b " * 100_000])
    tracemalloc.start()
    for number in range(20_000):
        counter.add_sequence(["a " * (number % 50), "b"])
    counter.add_sequence(["a b " * 500_000])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    reported = counter.compute_statistics(20_003)
    counter.close()
    assert (reported["sequences"], reported["max"]) == (20_003, 1_000_000)
    assert peak < 20e6, json.dumps(peak)
