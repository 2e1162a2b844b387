"""C9: 50,000 documents tokenized and packed, and again by a second run, against TRL's preparation.

The documents are pairs of docstrings of the local standard library, and the tokenizer is trained on them. Anneal is
timed from the JSONL file to the dataset that training reads, with its entry in the disk cache; TRL is timed for the
preparation of `SFTTrainer` with `packing=True` only (end tokens, tokens, labels, packs), without loading the file.
TRL's *again* uses what `datasets` cached for each step. Anneal encodes in one thread per core; TRL uses one core by
default, so it is also measured with one process per core. Both must produce the same packs, token by token.
"""

import ast
import hashlib
import itertools
import json
import os
import statistics
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import transformers
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from anneal.contracts.training_config.fields import TrainingConfig
from app.base_models.tiny_model import train_tokenizer, write_model
from benchmarks.ratios import Ratio
from worker.training.data import dataset
from worker.training.data.token_cache import TokenCache

DOCUMENTS = 50_000
LENGTH = 2048
ROUNDS = 5
AGAIN = 20
LIMIT_BYTES = 10 * 1024**3
GOAL_COLD, GOAL_AGAIN = 2.5, 1000.0


def main(scale: float = 1.0) -> bool:
    """Print times and ratios; return True if both goals are reached."""
    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    with tempfile.TemporaryDirectory(prefix="anneal-bench-") as folder:
        bench = _Bench(Path(folder), int(DOCUMENTS * scale))
        for _ in range(ROUNDS):
            bench.take_turns()
    return _print(bench)


class _Bench:
    """Document file, tokenizer, and preparation times of each side."""

    def __init__(self, home: Path, documents: int) -> None:
        docstrings = list(dict.fromkeys(_docstrings()))
        self._home = home
        self._file = home / "documents.jsonl"
        with self._file.open("w") as file:
            for text in _documents(docstrings, documents):
                file.write(json.dumps({"text": text}) + "\n")
        self._sha256 = hashlib.sha256(self._file.read_bytes()).hexdigest()
        write_model(home / "model", train_tokenizer(docstrings))
        self._rounds = 0
        self.seconds: dict[str, list[float]] = {}
        size = self._file.stat().st_size / 1e6
        print(f"C9 {documents:,} documents of {len(docstrings):,} docstrings, {size:.1f} MB", flush=True)

    def take_turns(self) -> None:
        """Run one round: `cold` with empty caches, then `again` with the caches of `cold`."""
        self._rounds += 1
        place = self._home / f"round-{self._rounds}"
        (place / "tokens").mkdir(parents=True)
        ours = self._ours("ours, cold", place)
        theirs = self._trl("TRL, cold", place / "trl")
        assert ours["input_ids"][:] == theirs["input_ids"][:], "other packs"
        assert ours["seq_lengths"][:] == theirs["seq_lengths"][:], "other packs"
        del ours, theirs
        self._trl(f"TRL, cold, {os.cpu_count()} processes", place / "trl-processes", dataset_num_proc=os.cpu_count())
        self._trl("TRL, again", place / "trl")
        for _ in range(AGAIN):
            self._ours(f"round {self._rounds}", place)
        self._took("ours, again", statistics.median(self.seconds.pop(f"round {self._rounds}")))

    def _ours(self, lane: str, place: Path) -> Dataset:
        tokenizer = self._tokenizer()
        config = TrainingConfig(base_model="bench", packing=True)
        with _as_in_a_trainer():
            began = time.perf_counter()
            tokenized = dataset.tokenize_file(
                str(self._file), "text", tokenizer, config, max_length=LENGTH, chosen=None, sha256=self._sha256,
                progress=lambda done, total: None, cache=TokenCache(place / "tokens", LIMIT_BYTES),
            )  # fmt: skip
            self._took(lane, time.perf_counter() - began)
        assert tokenized.are_cached == (lane != "ours, cold")
        return tokenized.dataset

    def _trl(self, lane: str, place: Path, **options: Any) -> Dataset:
        began = time.perf_counter()
        rows = load_dataset("json", data_files=str(self._file), split="train", cache_dir=str(place))
        self._took("load_dataset" + lane.removeprefix("TRL"), time.perf_counter() - began)
        trainer = _TimedTrainer(
            model=_smallest_model(),
            args=SFTConfig(
                output_dir=str(place / "out"), packing=True, max_length=LENGTH, report_to="none", use_cpu=True,
                bf16=False, **options,
            ),
            train_dataset=rows,
            processing_class=self._tokenizer(),
        )  # fmt: skip
        self._took(lane, trainer.preparing)
        prepared: Dataset = trainer.train_dataset
        return prepared

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self._home / "model")

    def _took(self, lane: str, seconds: float) -> None:
        self.seconds.setdefault(lane, []).append(seconds)


class _TimedTrainer(SFTTrainer):
    """TRL's trainer, with timing of its data preparation."""

    preparing = 0.0

    def _prepare_dataset(self, *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        prepared = super()._prepare_dataset(*arguments, **options)
        self.preparing += time.perf_counter() - began
        return prepared


def _docstrings() -> Iterator[str]:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(stdlib.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue  # some files of the library are invalid on purpose
        yield from filter(None, (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)))


def _documents(docstrings: list[str], count: int) -> Iterator[str]:
    """Yield pairs of docstrings: neighbors first, then at growing distance, so that no two are equal."""
    pairs = (
        f"{one}\n\n{docstrings[(place + distance) % len(docstrings)]}"
        for distance in itertools.count(1)
        for place, one in enumerate(docstrings)
    )
    return itertools.islice(pairs, count)


def _smallest_model() -> LlamaForCausalLM:
    """Return a minimal model for `SFTTrainer`; it is not part of the measurement."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


@contextmanager
def _as_in_a_trainer() -> Iterator[None]:
    """Disable tokenizer threads as training processes do; TRL encodes single texts and does not use them."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    yield
    del os.environ["TOKENIZERS_PARALLELISM"]


def _print(bench: _Bench) -> bool:
    for lane, took in bench.seconds.items():
        print(
            f"C9 {lane:28s} median {1e3 * statistics.median(took):9.1f} ms  min {1e3 * min(took):9.1f}  "
            f"max {1e3 * max(took):9.1f}  of {len(took)} rounds"
        )

    def ratio(slow: str, quick: str) -> Ratio:
        return Ratio([one / other for one, other in zip(bench.seconds[slow], bench.seconds[quick], strict=True)])

    cold, second = ratio("TRL, cold", "ours, cold"), ratio("TRL, cold", "ours, again")
    processes = next(lane for lane in bench.seconds if lane.startswith("TRL") and lane.endswith("processes"))
    print(f"C9 cold, TRL takes {cold} times as long; goal {GOAL_COLD:g}; in processes {ratio(processes, 'ours, cold')}")
    print(f"C9 a second run of ours takes 1/{second} of TRL's cold preparation; goal 1/{GOAL_AGAIN:g}")
    print(
        f"C9 a second run of TRL, from its own cache, takes {ratio('TRL, again', 'ours, again')} times as long as ours"
    )
    return cold.median >= GOAL_COLD and second.median >= GOAL_AGAIN
