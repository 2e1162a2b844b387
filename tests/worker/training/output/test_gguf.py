"""`gguf`: the converter that the operator installs gets a whole model, and its troubles never cost trained weights."""

import os
import signal
import socket
import types
from pathlib import Path
from typing import Any

import pytest

from anneal.contracts.attempt.messages import ControlMessage
from anneal.contracts.stop import StopRequest
from anneal.contracts.training_config.fields import TrainingConfig
from tests.jobs import make_spec
from tests.waiting import eventually
from tests.worker.training.output.test_export import QUICK, paths_in
from tests.worker.training.tiny import Forks, make_job
from worker.training.failures import TrainingFailure
from worker.training.output import gguf
from worker.wire.reporter import Reporter

QUICK_GGUF = QUICK | {"max_steps": 2, "gguf": "q8_0"}
CONVERTER = """
import argparse, json, os, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("model", type=pathlib.Path)
for name in ("--outfile", "--outtype", "--metadata"):
    parser.add_argument(name, required=True)
asked = parser.parse_args()
from safetensors import safe_open
with safe_open(asked.model / "model.safetensors", "np") as tensors:
    names = sorted(tensors.keys())
assert (asked.model / "tokenizer.json").is_file() and (asked.model / "config.json").is_file()
seen = {"type": asked.outtype, "about": json.loads(pathlib.Path(asked.metadata).read_text()), "tensors": names}
seen |= {"offline": os.environ["HF_HUB_OFFLINE"], "secrets": [name for name in os.environ if name == "HF_TOKEN"]}
pathlib.Path(asked.outfile).write_bytes(b"GGUF" + json.dumps(seen).encode())
"""
FAILS = CONVERTER + 'print("INFO: loading"); sys.exit("ERROR: Model LlamaForCausalLM is not supported")\n'
HANGS = """
import pathlib, subprocess, sys, time
if "--print-supported-models" in sys.argv:
    sys.exit("TEXT models:\\n  - LlamaForCausalLM")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(__file__).with_suffix(".child").write_text(str(child.pid))
time.sleep(600)
"""


def converter(folder: Path, text: str = CONVERTER) -> str:
    path = folder / "convert.py"
    path.write_text(text)
    return str(path)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def lines(done: Any, level: str) -> list[str]:
    return [one["line"] for one in done.of("message") if one["level"] == level]


class TestRuns:
    def test_a_whole_model_is_converted_beside_its_weights(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        job = make_job(tmp_path, tiny_model, chats, method="full", **QUICK_GGUF)
        done = forks.run({**job, "gguf_converter": converter(tmp_path)}, variables={"HF_TOKEN": "hf_secret"})
        assert done.result["outcome"] == "completed", done.result
        written = (done.output / "model.gguf").read_bytes()
        assert written.startswith(b"GGUF") and (done.output / "model.safetensors").is_file()
        assert b'"q8_0"' in written and b'"offline": "1"' in written and b'"secrets": []' in written
        assert b'"general.name": "tiny"' in written and b'"general.finetune": "run_test"' in written
        assert b"model.layers.0.mlp.up_proj.weight" in written
        assert any("Wrote `model.gguf` (q8_0" in line for line in lines(done, "info"))
        assert not list(done.folder.glob(".*gguf*")) and paths_in(done.output, tiny_model, tmp_path) == []

    def test_a_failure_costs_a_training_nothing_else_and_an_export_of_the_checkpoint_repairs_it(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = QUICK_GGUF | {"method": "lora", "output": "merged"}
        broken = converter(tmp_path, FAILS)
        done = forks.run({**make_job(tmp_path / "1", tiny_model, chats, **config), "gguf_converter": broken})
        assert (done.result["outcome"], done.result["output"]) == ("completed", "output"), done.result
        assert (done.output / "model.safetensors").is_file() and not (done.output / "model.gguf").exists()
        (line,) = lines(done, "error")
        assert "exit status 1" in line and "LlamaForCausalLM is not supported" in line and "export" in line

        job = make_job(tmp_path / "2", tiny_model, "missing", resume_from=done.checkpoint(2), **config)
        job |= {"task": "export", "gguf_converter": broken}
        failed = forks.run(job)
        assert (failed.result["outcome"], failed.result["error"]["code"]) == ("failed", "config_error")
        assert "LlamaForCausalLM is not supported" in failed.result["error"]["message"]
        assert not failed.output.exists()

        converter(tmp_path)
        exported = forks.run({**job, "attempt_dir": str(tmp_path / "2")})
        assert exported.result["outcome"] == "completed", exported.result
        # Merged: the tensors are those of the whole model.
        assert b"model.layers.0.self_attn.q_proj.weight" in (exported.output / "model.gguf").read_bytes()

    def test_without_a_converter_a_run_fails_before_it_loads_anything(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        job = make_job(tmp_path, tiny_model, chats, method="full", **QUICK_GGUF)
        done = forks.run({**job, "gguf_converter": str(tmp_path / "gone.py")})
        error = done.result["error"]
        assert error["code"] == "config_error" and done.of("phase") == []
        assert "git clone https://github.com/ggml-org/llama.cpp" in error["message"]
        assert "ANNEAL_GGUF_CONVERTER" in error["message"]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("import package_that_is_not_here", "No module named 'package_that_is_not_here'"),
            ("print('TEXT models:\\n  - GPT2LMHeadModel\\n  - Qwen3ForCausalLM')", "the class LlamaForCausalLM"),
        ],
        ids=["cannot-start", "does-not-know-the-model"],
    )
    @pytest.mark.parametrize("config", [{"method": "full"}, {"method": "lora", "output": "merged"}])
    def test_a_converter_that_cannot_convert_the_model_fails_the_run_before_the_first_step(
        self, config: dict[str, Any], text: str, words: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        job = make_job(tmp_path, tiny_model, chats, **QUICK_GGUF, **config)
        done = forks.run({**job, "gguf_converter": converter(tmp_path, text)})
        assert (done.result["error"]["code"], done.steps) == ("config_error", {})
        assert words in done.result["error"]["message"]

    @pytest.mark.parametrize("why", ["stop", "drain"])
    def test_a_stop_ends_the_converter_and_what_it_started(
        self, why: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        job = make_job(tmp_path, tiny_model, chats, method="full", **QUICK_GGUF)
        job["gguf_converter"] = converter(tmp_path, HANGS)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(tmp_path / "control"))
            listening.listen()
            pid = forks.start(job, control=tmp_path / "control")
            control, _ = listening.accept()
        with control:
            started = tmp_path / "convert.child"
            eventually(lambda: started.exists() and started.read_text(), timeout=60)
            if why == "drain":
                os.kill(pid, signal.SIGTERM)
            else:
                control.send(ControlMessage(stop=StopRequest("checkpoint")).to_json())
            done = forks.wait()
        eventually(lambda: not is_alive(int(started.read_text())), timeout=60)
        if why == "drain":
            assert (done.result["outcome"], done.result["why"]) == ("stopped", "drain")
            assert not done.output.exists()
        else:
            assert done.result["outcome"] == "completed"
            assert "A stop was requested" in lines(done, "error")[0]
            assert (done.output / "model.safetensors").is_file() and not (done.output / "model.gguf").exists()


class TestBounds:
    def export(self, folder: Path, text: str, **job: Any) -> Any:
        """As much of an export as the conversion reads."""
        spec = make_spec(folder, task="export", gguf_converter=converter(folder, text), **job)
        config = TrainingConfig(base_model="tiny", method="full", gguf="f16")
        return types.SimpleNamespace(
            config=config, folder=folder, job=spec, report=Reporter(None), raise_if_stopped=lambda: None
        )

    def test_a_converter_that_writes_nothing_is_ended(
        self, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gguf, "_STALLED_SECONDS", 0.3)
        with pytest.raises(TrainingFailure, match="wrote nothing for"):
            gguf.add_gguf(self.export(tmp_path, "import time; time.sleep(600)"), tiny_model)

    def test_a_file_that_does_not_fit_is_not_begun(self, tiny_model: Path, tmp_path: Path) -> None:
        with pytest.raises(TrainingFailure, match="does not fit on the disk: it needs 1 MiB") as failure:
            gguf.add_gguf(self.export(tmp_path, "raise SystemExit", disk_reserve_bytes=2**60), tiny_model)
        assert failure.value.code == "disk_full"

    def test_a_program_without_a_module_suffix_is_started_as_it_is(self, tiny_model: Path, tmp_path: Path) -> None:
        run = self.export(tmp_path, "")
        program = tmp_path / "convert"
        program.write_text("#!/bin/sh\necho bytes > $3\n")
        program.chmod(0o755)
        run.job = run.job.model_copy(update={"gguf_converter": program})
        try:
            gguf.add_gguf(run, tiny_model)
            assert (tiny_model / "model.gguf").read_text() == "bytes\n"
        finally:
            (tiny_model / "model.gguf").unlink(missing_ok=True)
        program.write_text("")
        with pytest.raises(TrainingFailure, match="cannot be started"):
            gguf.add_gguf(run, tiny_model)
