"""What one run has tokenised the next one takes up: the same to the last bit, or made anew."""

import datetime
import hashlib
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

from anneal.contracts.training_config.fields import TrainingConfig
from tests.worker.training.disk import Disk
from tests.worker.training.tiny import Forks, make_job, write_rows
from worker.training.data import dataset
from worker.training.data.dataset import Tokens
from worker.training.data.token_cache import Entry, TokenCache, Write
from worker.training.data.tokenization import tokenizer_digest
from worker.training.failures import TrainingFailure

SCHEMA = pa.schema([("numbers", pa.int64())])
PARTS = {"of": "these"}
GIB = 1 << 30


def numbers(write: Write) -> dict[str, Any]:
    """Makes a table of a thousand numbers."""
    for start in range(0, 1000, 100):
        write(pa.record_batch([pa.array(range(start, start + 100))], schema=SCHEMA))
    return {"count": 1000}


def never(write: Write) -> dict[str, Any]:
    raise AssertionError("it was made before")


def values(entry: Entry) -> list[int]:
    return [int(one) for one in entry.table["numbers"].to_pylist()]


class Folder:
    """A folder of entries, and what was warned of."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.mkdir()
        self.warnings: list[str] = []

    def cache(self, limit_bytes: int = GIB) -> TokenCache:
        """The cache of another run."""
        return TokenCache(self.path, limit_bytes, warn=self.warnings.append)

    @property
    def entries(self) -> list[Path]:
        """The files of entries; there is nothing else in the folder."""
        paths = list(self.path.iterdir())
        assert all(path.suffix == ".tokens" for path in paths), paths
        return paths


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "tokens")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk, this process can write no file that is longer, in bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestEntries:
    def test_entry_is_reused_by_the_next_run(self, folder: Folder) -> None:
        first = folder.cache().get_or_build(PARTS, SCHEMA, numbers)
        second = folder.cache().get_or_build(PARTS, SCHEMA, never)
        assert (first.from_cache, second.from_cache) == (False, True)
        assert values(first) == values(second) == list(range(1000))
        assert first.facts == second.facts == {"count": 1000}
        assert first.name == second.name
        assert not folder.cache().get_or_build({"of": "others"}, SCHEMA, numbers).from_cache

    def test_another_process_waits_only_for_what_is_missing(self, folder: Folder) -> None:
        entries: list[Entry] = []
        other = TokenCache(
            folder.path, GIB, wait_for_maker=lambda: entries.append(folder.cache().get_or_build(PARTS, SCHEMA, numbers))
        )
        assert [values(other.get_or_build(PARTS, SCHEMA, never)) for _ in range(2)] == [list(range(1000))] * 2
        assert len(entries) == 1

    def test_a_table_lies_in_its_file_and_not_in_memory(self, folder: Folder) -> None:
        before = pa.total_allocated_bytes()
        built, read = (folder.cache().get_or_build(PARTS, SCHEMA, numbers) for _ in range(2))
        assert built.table.nbytes == read.table.nbytes == 8000
        assert pa.total_allocated_bytes() - before < 1000

    @pytest.mark.parametrize("place", [0, 0.3, 0.6, 0.9, 0.99, 0.999, 1])
    @pytest.mark.parametrize("harm", ["changed", "cut off", "longer"])
    def test_a_damaged_file_is_noticed_and_rebuilt(self, place: float, harm: str, folder: Folder) -> None:
        folder.cache().get_or_build(PARTS, SCHEMA, numbers)
        (path,) = folder.entries
        whole = bytearray(path.read_bytes())
        at = int(place * (len(whole) - 1))
        if harm == "changed":
            whole[at] ^= 1
        else:
            whole[at : None if harm == "cut off" else at] = b"" if harm == "cut off" else b"\0"
        path.write_bytes(whole)
        rebuilt = folder.cache().get_or_build(PARTS, SCHEMA, numbers)
        assert not rebuilt.from_cache and values(rebuilt) == list(range(1000))
        assert len(folder.warnings) == 1 and "corrupt" in folder.warnings[0]
        assert folder.cache().get_or_build(PARTS, SCHEMA, never).from_cache

    def test_an_entry_under_the_name_of_another_is_not_taken_for_it(self, folder: Folder) -> None:
        folder.cache().get_or_build(PARTS, SCHEMA, numbers)
        (path,) = folder.entries
        folder.cache().get_or_build({"of": "others"}, SCHEMA, numbers)
        (other,) = set(folder.entries) - {path}
        path.replace(other)
        assert not folder.cache().get_or_build({"of": "others"}, SCHEMA, numbers).from_cache

    def test_links_and_files_of_others_are_not_read(self, folder: Folder, tmp_path: Path) -> None:
        folder.cache().get_or_build(PARTS, SCHEMA, numbers)
        (path,) = folder.entries
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert not folder.cache().get_or_build(PARTS, SCHEMA, numbers).from_cache
        assert path.is_file() and not path.is_symlink()
        if os.getuid() == 0:
            os.chown(path, 65534, 65534)
            assert not folder.cache().get_or_build(PARTS, SCHEMA, numbers).from_cache

    def test_entry_that_fails_while_being_built_leaves_no_file(self, folder: Folder) -> None:
        def fails(write: Write) -> dict[str, Any]:
            numbers(write)
            raise TrainingFailure("bad_data", "line 7")

        with pytest.raises(TrainingFailure, match="line 7"):
            folder.cache().get_or_build(PARTS, SCHEMA, fails)
        assert folder.entries == []

    def test_a_file_has_its_name_only_once_it_is_on_the_disk(self, folder: Folder) -> None:
        with Disk().watched() as disk:
            folder.cache().get_or_build(PARTS, SCHEMA, numbers)
        assert [call.split()[0] for call in disk.calls] == ["fsync", "rename"] and disk.problems == []

    def test_two_that_make_the_same_at_once_do_not_meet(self, folder: Folder) -> None:
        inner: list[Entry] = []

        def both(write: Write) -> dict[str, Any]:
            inner.append(folder.cache().get_or_build(PARTS, SCHEMA, numbers))
            return numbers(write)

        outer = folder.cache().get_or_build(PARTS, SCHEMA, both)
        assert values(outer) == values(inner[0]) == list(range(1000))
        assert len(folder.entries) == 1 and folder.warnings == []
        assert folder.cache().get_or_build(PARTS, SCHEMA, never).from_cache

    def test_draft_of_a_killed_run_is_removed_when_the_next_entry_is_built(self, folder: Folder) -> None:
        def dies(write: Write) -> dict[str, Any]:
            numbers(write)
            os.kill(os.getpid(), signal.SIGKILL)
            return {}

        child = os.fork()
        if child == 0:
            folder.cache().get_or_build(PARTS, SCHEMA, dies)
        os.waitpid(child, 0)
        assert [path.suffix for path in folder.path.iterdir()] == [".draft"]
        folder.cache().get_or_build(PARTS, SCHEMA, numbers)
        assert len(folder.entries) == 1


class TestRoom:
    def test_least_recently_used_entry_is_evicted_first(self, folder: Folder) -> None:
        names: dict[int, Path] = {}
        for number in range(3):
            folder.cache().get_or_build({"of": number}, SCHEMA, numbers)
            (names[number],) = set(folder.entries) - set(names.values())
            os.utime(names[number], (number, number))
        size = max(path.stat().st_size for path in folder.entries)
        used = folder.cache().get_or_build({"of": 0}, SCHEMA, never)
        folder.cache(3 * size).get_or_build({"of": 3}, SCHEMA, numbers)
        assert not names[1].exists() and names[0].exists() and names[2].exists()
        folder.cache(size).get_or_build({"of": 4}, SCHEMA, numbers)
        assert len(folder.entries) == 1 and not names[0].exists()
        assert values(used) == list(range(1000)), "a run goes on with what it has open"

    def test_entry_larger_than_the_limit_serves_only_its_own_run(self, folder: Folder) -> None:
        assert values(folder.cache(10).get_or_build(PARTS, SCHEMA, numbers)) == list(range(1000))
        assert folder.entries == []

    @pytest.mark.parametrize("room", [0, 1000, 8000, "all but the end"])
    def test_a_full_disk_is_said_and_the_run_goes_on_from_memory(self, room: int | str, folder: Folder) -> None:
        folder.cache().get_or_build({"of": "other"}, SCHEMA, numbers)
        size = folder.entries[0].stat().st_size
        with files_of_at_most(room if isinstance(room, int) else size - 1):
            built = folder.cache().get_or_build(PARTS, SCHEMA, numbers)
        assert values(built) == list(range(1000)) and built.facts == {"count": 1000}
        assert len(folder.entries) == 1, "nothing half written stays"
        assert len(folder.warnings) == 1 and "keeps them in memory" in folder.warnings[0]

    def test_a_folder_that_is_gone_costs_the_run_nothing(self, folder: Folder) -> None:
        folder.path.rmdir()
        assert values(folder.cache().get_or_build(PARTS, SCHEMA, numbers)) == list(range(1000))
        assert len(folder.warnings) == 1


ROWS = [
    {"prompt": f"what is row {row} of the text", "completion": "one two three " * (row % 5 + 1)} for row in range(40)
]
CHATS = [
    {"messages": [{"role": "user", "content": one["prompt"]}, {"role": "assistant", "content": one["completion"]}]}
    for one in ROWS
]


class Lab:
    """Runs that tokenise the same rows."""

    def __init__(self, folder: Folder, model: Path, rows: Path) -> None:
        self._folder, self._model, self._rows = folder, model, rows
        self.config: dict[str, Any] = {"loss_on": "completion", "packing": True}
        self.options: dict[str, Any] = {"max_length": 64, "chosen": None, "sha256": "a" * 64}
        self.format = "chat"
        self.change: Callable[[PreTrainedTokenizerBase], object] = lambda _: None

    def tokens(self) -> Tokens:
        """Of another run, whose tokenizer was changed by `change` after it was loaded."""
        tokenizer = AutoTokenizer.from_pretrained(self._model)
        tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
        self.change(tokenizer)
        return dataset.tokenize_file(
            str(self._rows), self.format, tokenizer, TrainingConfig(base_model="tiny", **self.config),
            progress=lambda done, total: None, cache=self._folder.cache(), **self.options,
        )  # fmt: skip


@pytest.fixture
def lab(folder: Folder, tiny_model: Path, tmp_path: Path) -> Lab:
    both = [{**chat, **row, "text": row["prompt"]} for chat, row in zip(CHATS, ROWS, strict=True)]
    return Lab(folder, tiny_model, write_rows(tmp_path / "rows.jsonl", both))


class TestTokens:
    @pytest.mark.parametrize("packing", [False, "bfd", "wrapped"])
    @pytest.mark.parametrize("loss_on", ["all", "completion", "assistant"])
    def test_tokens_from_cache_and_from_memory_are_equal(self, packing: bool | str, loss_on: str, lab: Lab) -> None:
        lab.config = {"loss_on": loss_on, "packing": bool(packing)}
        lab.config |= {"extra": {"packing_strategy": packing}} if packing else {}
        built, cached = lab.tokens(), lab.tokens()
        lab.options["sha256"] = None
        unkept = lab.tokens()
        assert [one.are_cached for one in (built, cached, unkept)] == [False, True, False]
        assert built.dataset.to_list() == cached.dataset.to_list() == unkept.dataset.to_list()
        for tokens in (cached, unkept):
            assert (tokens.rows, tokens.tokens, tokens.highest_id) == (built.rows, built.tokens, built.highest_id)
            assert tokens.remarks == built.remarks

    @pytest.mark.parametrize(
        ("where", "name", "value"),
        [
            ("options", "max_length", 63), ("options", "chosen", [1, 2, 3]), ("options", "sha256", "b" * 64),
            ("config", "loss_on", "all"), ("config", "truncation_mode", "keep_end"), ("config", "packing", False),
            ("config", "extra", {"packing_strategy": "wrapped"}),
        ],
    )  # fmt: skip
    def test_a_setting_that_matters_rebuilds_them(self, where: str, name: str, value: Any, lab: Lab) -> None:
        lab.tokens()
        getattr(lab, where)[name] = value
        assert not lab.tokens().are_cached and lab.tokens().are_cached

    def test_changed_format_rebuilds_the_tokens(self, lab: Lab) -> None:
        lab.tokens()
        for lab.format in ("text", "prompt_completion"):
            assert not lab.tokens().are_cached and lab.tokens().are_cached

    @pytest.mark.parametrize(
        "change",
        [
            lambda tokenizer: setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}"),
            lambda tokenizer: tokenizer.add_tokens(["row"]),
            lambda tokenizer: setattr(tokenizer, "split_special_tokens", True),
            lambda tokenizer: setattr(tokenizer, "eos_token", "<|pad|>"),
        ],
        ids=["template", "vocabulary", "special-tokens-split", "end"],
    )
    def test_changed_tokenizer_rebuilds_the_tokens(self, change: Callable[[Any], None], lab: Lab) -> None:
        lab.tokens()
        lab.change = change
        assert not lab.tokens().are_cached

    def test_settings_of_training_alone_do_not_rebuild_the_tokens(self, lab: Lab) -> None:
        lab.tokens()
        lab.config |= {"learning_rate": 0.5, "seed": 7, "method": "full", "batch_size": 1}
        assert lab.tokens().are_cached

    def test_a_tokenizer_is_the_same_before_and_after_it_was_used(self, lab: Lab, tiny_model: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        before = tokenizer_digest(tokenizer)
        tokenizer(["a", "b b"], padding=True, truncation=True, max_length=3)
        assert tokenizer_digest(tokenizer) == before

    def test_a_template_that_contains_the_day_is_another_one_tomorrow(
        self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        tokenizer.chat_template = "{{ strftime_now('%d') }}"

        class Tomorrow(datetime.date):
            @classmethod
            def today(cls) -> "Tomorrow":
                return cls(2999, 1, 1)

        before = tokenizer_digest(tokenizer)
        monkeypatch.setattr(datetime, "date", Tomorrow)
        assert tokenizer_digest(tokenizer) != before

    def test_a_change_of_what_comes_out_gives_the_code_another_version(self, tmp_path: Path) -> None:
        """Or runs would go on with what was made before. A tokenizer of bytes: no library changes what it says."""
        path = write_rows(tmp_path / "rows.jsonl", ROWS)
        rows = []
        for strategy in ("bfd", "wrapped"):
            config = TrainingConfig(
                base_model="tiny", loss_on="completion", packing=True, extra={"packing_strategy": strategy}
            )
            rows += dataset.tokenize_file(
                str(path), "prompt_completion", ByT5Tokenizer(), config, max_length=90, chosen=None,
                progress=lambda done, total: None,
            ).dataset.to_list()  # fmt: skip
        digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
        assert (dataset.VERSION, digest[:16]) == (4, "1fd7e199eb3642b1")

    def test_rows_left_out_are_reported_again(self, lab: Lab) -> None:
        lab.options["max_length"] = 50
        assert lab.tokens().remarks == lab.tokens().remarks != []


class TestRuns:
    CONFIG: dict[str, Any] = {
        "method": "lora", "lora_r": 4, "max_steps": 4, "batch_size": 2, "gradient_accumulation_steps": 1,
        "optim": "adamw_torch", "packing": True, "max_seq_length": 128, "eval_split": 0.2, "eval_steps": 2,
    }  # fmt: skip

    def job(self, folder: Folder, at: Path, model: Path, chats: Path) -> dict[str, Any]:
        job = make_job(at, model, chats, **self.CONFIG)
        job["dataset"]["sha256"] = hashlib.sha256(chats.read_bytes()).hexdigest()
        return job | {"token_cache": {"folder": str(folder.path), "limit_bytes": GIB}}

    def test_a_second_run_does_not_tokenise_and_trains_the_same_to_the_last_bit(
        self, folder: Folder, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        first, second = (forks.run(self.job(folder, tmp_path / name, tiny_model, chats)) for name in ("1", "2"))
        assert [one.result["outcome"] for one in (first, second)] == ["completed", "completed"]
        assert [one.of("config")[0]["facts"]["tokenized"] for one in (first, second)] == ["now", "cached"]
        assert first.steps == second.steps and len(first.steps) == 4
        losses = [[record["metrics"]["eval_loss"] for record in one.of("eval")] for one in (first, second)]
        assert losses[0] == losses[1] and len(losses[0]) == 2
        said = [[record["line"] for record in one.of("message")] for one in (first, second)]
        assert any("reused" in line for line in said[1]) and not any("reused" in line for line in said[0])
        assert len(folder.entries) == 2, "to train on, and held out"

    def test_a_disk_without_room_for_tokens_is_a_warning(
        self, folder: Folder, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        job = self.job(folder, tmp_path / "run", tiny_model, chats)
        folder.path.rmdir()
        done = forks.run(job)
        assert done.result["outcome"] == "completed"
        assert any(
            "cannot be cached" in json.dumps(record) for record in done.of("message") if record["level"] == "warning"
        )
