"""Models small enough to train in a second, data for them, and runs of the training process on both."""

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anneal.contracts.training_config.fields import TrainingConfig
from tests import fork_server
from worker.checkpoint_files.manifest import verify
from worker.wire.journal import read_journal

_WORDS = (
    "a",
    "the",
    "model",
    "learns",
    "from",
    "rows",
    "of",
    "text",
    "and",
    "tells",
    "what",
    "it",
    "saw",
    "one",
    "two",
)
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1",
}  # fmt: skip
CORPUS = [" ".join(_WORDS[(i * j + j) % len(_WORDS)] for j in range(1, 25)) for i in range(40)]


def make_tiny_model(
    folder: Path | str,
    *,
    seed: int = 0,
    hidden: int = 32,
    layers: int = 1,
    dropout: float = 0.0,
    chat_template: str | None = None,
    bos: bool = False,
) -> Path:
    """Write a Llama with random weights and a byte-level BPE tokenizer trained on the spot into `folder`.

    Its vocabulary has about 300 tokens, `<|end|>` ends a text, and it takes at most 256 tokens. With `bos` the
    tokenizer puts `<|begin|>` before every text, as those of many families do.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = Path(folder)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|pad|>", *(["<|begin|>"] if bos else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    if bos:
        begin = ("<|begin|>", bpe.token_to_id("<|begin|>"))
        bpe.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|pad|>", model_max_length=256
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 2,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        attention_dropout=dropout,
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_chat_dataset(path: Path | str, rows: int) -> Path:
    """Write `rows` short chats of one question and one answer as JSONL."""
    return write_rows(
        path,
        (
            {
                "messages": [
                    {"role": "user", "content": f"what is row {row}"},
                    {"role": "assistant", "content": CORPUS[row % len(CORPUS)][: 20 + row % 50]},
                ]
            }
            for row in range(rows)
        ),
    )


def make_pairs(path: Path | str, rows: int, *, chat: bool = False) -> Path:
    """Write `rows` preference pairs as JSONL: the better answer is made of words, the other of their letters."""

    def pair(row: int) -> dict[str, Any]:
        text = CORPUS[row % len(CORPUS)]
        prompt, chosen, rejected = f"what is row {row}", text[: 20 + row % 30], text[10 : 30 + row % 20][::-1]
        if not chat:
            return {"prompt": prompt + "\n", "chosen": chosen, "rejected": rejected}
        said = {"chosen": chosen, "rejected": rejected}
        answers = {name: [{"role": "assistant", "content": answer}] for name, answer in said.items()}
        return {"prompt": [{"role": "user", "content": prompt}], **answers}

    return write_rows(path, map(pair, range(rows)))


def make_rated(path: Path | str, rows: int, *, chat: bool = False) -> Path:
    """Write `rows` rated answers as JSONL: every second one, which is made of words, is desirable."""

    def rated(row: int) -> dict[str, Any]:
        text, label = CORPUS[row % len(CORPUS)], row % 2 == 0
        prompt, answer = f"what is row {row}", text[: 20 + row % 30] if label else text[10 : 30 + row % 20][::-1]
        if not chat:
            return {"prompt": prompt + "\n", "completion": answer, "label": label}
        said = [{"role": "assistant", "content": answer}]
        return {"prompt": [{"role": "user", "content": prompt}], "completion": said, "label": label}

    return write_rows(path, map(rated, range(rows)))


def make_prompts(path: Path | str, rows: int, *, chat: bool = False) -> Path:
    """Write `rows` prompts with an answer as JSONL."""

    def prompt(row: int) -> dict[str, Any]:
        text = f"what is row {row}"
        return {"prompt": [{"role": "user", "content": text}] if chat else text + "\n", "answer": str(row)}

    return write_rows(path, map(prompt, range(rows)))


def write_rows(path: Path | str, rows: Iterable[Any]) -> Path:
    """Write rows as JSONL."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_job(
    folder: Path | str,
    model: Path | str,
    data: Path | str,
    *,
    run_id: str = "run_test",
    attempt: int = 1,
    data_format: str = "chat",
    eval_data: Path | str | None = None,
    extra_eval: Mapping[str, Path | str] | None = None,
    resume_from: dict[str, Any] | None = None,
    **config: Any,
) -> dict[str, Any]:
    """A job as the supervisor writes it; `config` holds what the user gave beside `base_model`."""
    folder = Path(folder)
    output = folder / f"a{attempt}"
    output.mkdir(parents=True, exist_ok=True)

    def described(path: Path | str) -> dict[str, Any]:
        return {"id": "ds_test", "path": str(path), "format": data_format, "rows": None, "sha256": None}

    return {
        "run_id": run_id,
        "attempt": attempt,
        "backend": "celery",
        "config": {"base_model": "tiny", **config},
        "user_set_fields": ["base_model", *config],
        "dataset": described(data),
        "eval_dataset": described(eval_data) if eval_data else None,
        "extra_eval_datasets": {name: described(path) for name, path in (extra_eval or {}).items()},
        "base_model": {"name": "tiny", "path": str(model), "hub": None, "revision": None},
        "attempt_dir": str(output),
        "resume_from": resume_from,
        "journal": str(folder / "journal.jsonl"),
        "device": {"kind": "cpu", "index": 0, "id": "cpu"},
        "trust_remote_code": False,
        "hub_allowed": False,
        "worker": {"id": "wrk_test", "host": "here"},
    }


def load_output(output: Path, base: Path, kind: str = "CausalLM", **options: Any) -> Any:
    """The model of an output, loaded as its card says: an adapter on `base`, or on the base that it contains."""
    import transformers
    from peft import PeftModel

    auto = getattr(transformers, f"AutoModelFor{kind}")
    if not (output / "adapter_config.json").exists():
        return auto.from_pretrained(output)
    own = output / "base_model"
    return PeftModel.from_pretrained(auto.from_pretrained(own if own.is_dir() else base, **options), str(output))


@dataclass
class Outcome:
    """What a training process said and left behind."""

    code: int
    records: list[dict[str, Any]]
    job: dict[str, Any]
    stderr: str = ""

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The records of one type, in order."""
        return [record for record in self.records if record["type"] == kind]

    @property
    def result(self) -> dict[str, Any]:
        """The result record."""
        results = self.of("result")
        assert len(results) == 1, (self.records[-3:], self.stderr[-3000:])
        return results[0]

    @property
    def folder(self) -> Path:
        """The attempt's folder."""
        return Path(self.job["attempt_dir"])

    @property
    def output(self) -> Path:
        """The exported model."""
        return self.folder / "output"

    @property
    def steps(self) -> dict[int, tuple[str, list[int]]]:
        """Exact loss and row numbers of each step of this attempt, from the journal."""
        return {
            event["step"]: (event["loss_hex"], event["samples"])
            for event in read_journal(self.job["journal"])
            if event["event"] == "step" and event["attempt"] == self.job["attempt"]
        }

    def checkpoint(self, step: int) -> dict[str, Any]:
        """The checkpoint of `step` as `resume_from` of another job; checked to be whole."""
        (record,) = (record for record in self.of("checkpoint") if record["step"] == step)
        path = self.folder / record["name"]
        assert verify(path, record["manifest_sha256"]) == []
        return {
            "path": str(path),
            "step": step,
            "manifest_sha256": record["manifest_sha256"],
        }


def parse_records(text: str) -> list[dict[str, Any]]:
    """The records among the lines that a training process printed."""
    records = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "type" in record:
            if record["type"] == "config":
                TrainingConfig.model_validate(record["effective"])  # the worker would not use it otherwise
            records.append(record)
    return records


def run_cold(job: dict[str, Any], **variables: str) -> Outcome:
    """Run `python -m worker.training job.json`, with `variables` in its environment, and wait for its end."""
    done = subprocess.run(
        [sys.executable, "-m", "worker.training", str(write_job(job))],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT | variables,
        check=False,
    )
    return Outcome(done.returncode, parse_records(done.stdout), job, done.stderr)


def write_job(job: dict[str, Any]) -> Path:
    """Write the job file into the attempt's folder; another process of the attempt may be reading it."""
    path = Path(job["attempt_dir"]) / "job.json"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(job, file)
    Path(file.name).replace(path)
    return path


class Forks:
    """A process that has imported the training code and forks one child for each job: a fresh process, fast."""

    def __init__(self, path: Path | None = None, **variables: str) -> None:
        """`path` is of a server that several processes share; `variables` join the environment of a new server."""
        self._own = None if path else tempfile.TemporaryDirectory()
        self._path = path or Path(self._own.name if self._own else "") / "forks"
        command = [sys.executable, "-m", "tests.worker.training.forks"]
        connection, self._server = fork_server.connect(self._path, command, ENVIRONMENT | variables)
        self._lines = connection.makefile("rw")
        connection.close()
        self._running: tuple[dict[str, Any], Path] | None = None
        self._always: dict[str, Any] = {}

    def another(self) -> "Forks":
        """Return a connection of its own to the same server, for jobs at the same time."""
        return Forks(self._path)

    def beside(self, *folders: Path) -> "Forks":
        """Return the same server for jobs that import from these folders too."""
        other = copy.copy(self)
        other._always = {"folders": [str(folder) for folder in folders]}
        return other

    def run(self, job: dict[str, Any], **limits: Any) -> Outcome:
        """Run a job to its end.

        `file_bytes` limits the size of its files, `variables` join its environment, `disk` and `course` are for
        `troubles`, and `half_attention`, `counted_device` and `cuda_autocast` begin those; with `watch_disk` the last
        record is that of `disk.main`.
        """
        self.start(job, **limits)
        return self.wait()

    def start(self, job: dict[str, Any], control: Path | None = None, **limits: Any) -> int:
        """Start a job; returns its process id. It connects to a listening socket `control` to be told things."""
        out = Path(job["attempt_dir"])
        request = {
            "job": str(write_job(job)),
            "stdout": str(out / "stdout"),
            "stderr": str(out / "stderr"),
            **self._always,
            **limits,
        }
        if control is not None:
            request["control"] = str(control)
        print(json.dumps(request), file=self._lines, flush=True)
        self._running = job, out
        return int(json.loads(self._lines.readline())["pid"])

    def said(self) -> list[dict[str, Any]]:
        """The records of the running job so far."""
        assert self._running is not None
        path = self._running[1] / "stdout"
        return parse_records(path.read_text()) if path.exists() else []

    def wait(self) -> Outcome:
        """Wait for the end of the running job."""
        assert self._running is not None
        code = int(json.loads(self._lines.readline())["code"])
        job, out = self._running
        return Outcome(code, parse_records((out / "stdout").read_text()), job, (out / "stderr").read_text())

    def close(self) -> None:
        """End the connection, and the server if this started it; other connections go on."""
        self._lines.close()
        if self._server is not None:
            fork_server.end(self._server)
