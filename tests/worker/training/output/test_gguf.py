"""`gguf`: programs of llama.cpp, which the operator installs, get a whole model; a failure costs no trained weights."""

import importlib
import json
import os
import shutil
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from anneal.contracts.attempt.messages import ControlMessage
from anneal.contracts.field_types import GGUF_ALIASES, NEED_IMPORTANCE_MATRIX, GgufTypeName
from anneal.contracts.run_task import RunTask
from anneal.contracts.stop import StopRequest
from anneal.contracts.training_config.fields import TrainingConfig
from tests.jobs import make_spec
from tests.not_run import LLAMA_CPP
from tests.waiting import eventually
from tests.worker.training.output.test_export import QUICK, paths_in
from tests.worker.training.tiny import CORPUS, Forks, make_job
from worker.training.failures import TrainingFailure
from worker.training.output import gguf, program
from worker.training.output.modelfile import modelfile
from worker.wire.reporter import Reporter

QUICK_GGUF = QUICK | {"max_steps": 2, "gguf": "q8_0"}
CONVERTER = """
import argparse, json, os, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("model", type=pathlib.Path)
for name in ("--outfile", "--outtype"):
    parser.add_argument(name, required=True)
parser.add_argument("--metadata")
parser.add_argument("--vocab-only", action="store_true")
arguments = parser.parse_args()
assert (arguments.model / "tokenizer.json").is_file() and (arguments.model / "config.json").is_file()
if arguments.vocab_only:
    sys.exit()
from safetensors import safe_open
with safe_open(arguments.model / "model.safetensors", "np") as tensors:
    names = sorted(tensors.keys())
about = json.loads(pathlib.Path(arguments.metadata).read_text())
facts = {"type": arguments.outtype, "about": about, "tensors": names, "offline": os.environ["HF_HUB_OFFLINE"]}
facts |= {"secrets": [name for name in os.environ if name == "HF_TOKEN"]}
pathlib.Path(arguments.outfile).write_bytes(b"GGUF" + json.dumps(facts).encode())
"""
FAILS = CONVERTER + 'print("INFO: loading"); sys.exit("ERROR: Model LlamaForCausalLM is not supported")\n'
QUANTIZER = """
import os, pathlib, sys
if len(sys.argv) < 5:
    print("usage: llama-quantize\\n\\n   2  or  Q4_0    :  4.34G\\n  15  or  Q4_K_M  :  4.58G")
    sys.exit(1)
_, source, target, name, threads = sys.argv
for tensor in (1, 2):
    print(f"[{tensor:4d}/{2:4d}] blk.0.attn_q.weight - [32, 32], type = f32, converting to q4_K", flush=True)
    pathlib.Path(target).write_bytes(b"x" * tensor)
    __import__("time").sleep(0.3)
secrets = [name for name in os.environ if name == "HF_TOKEN"]
facts = f" quantized to {name} by {int(threads)}, secrets {secrets}"
pathlib.Path(target).write_bytes(pathlib.Path(source).read_bytes() + facts.encode())
"""
HANGS = """
import pathlib, subprocess, sys, time
if "--vocab-only" in sys.argv:
    sys.exit()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(__file__).with_suffix(".child").write_text(str(child.pid))
time.sleep(600)
"""


def converter(folder: Path, text: str = CONVERTER) -> str:
    path = folder / "convert.py"
    path.write_text(text)
    return str(path)


def quantizer(folder: Path, text: str = QUANTIZER) -> str:
    """A double of `llama-quantize`."""
    path = folder / "llama-quantize"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
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
        assert b'"type": "q8_0"' in written and b'"offline": "1"' in written and b'"secrets": []' in written
        assert b'"general.name": "tiny"' in written and b'"general.finetune": "run_test"' in written
        assert b"model.layers.0.mlp.up_proj.weight" in written
        assert any("Wrote `model.gguf` (Q8_0" in line for line in lines(done, "info"))
        assert not list(done.folder.glob(".*gguf*")) and paths_in(done.output, tiny_model, tmp_path) == []

    def test_most_types_are_quantized_from_the_type_of_the_weights_with_progress_and_a_modelfile(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        job = make_job(tmp_path, tiny_model, chats, method="full", **QUICK_GGUF | {"gguf": "q4_k_m"})
        job |= {"gguf_converter": converter(tmp_path), "gguf_quantizer": quantizer(tmp_path)}
        done = forks.run(job, variables={"HF_TOKEN": "hf_secret"})
        assert done.result["outcome"] == "completed", done.result
        written = (done.output / "model.gguf").read_bytes()
        assert b'"type": "f32"' in written and b" quantized to Q4_K_M by " in written and b"secrets []" in written
        assert (done.output / "Modelfile").read_text().splitlines()[0] == "FROM ./model.gguf"
        assert "ollama create" in (done.output / "README.md").read_text()
        assert not list(done.folder.glob(".*gguf*")) and not list(done.output.glob(".*"))
        parts = [(one["done"], one["total"]) for one in done.of("progress") if one["message"] == "quantizing to Q4_K_M"]
        assert (2, 2) in parts

    def test_a_failure_costs_a_training_nothing_else_and_an_export_of_the_checkpoint_repairs_it(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = QUICK_GGUF | {"method": "lora", "output": "merged"}
        broken = converter(tmp_path, FAILS)
        done = forks.run({**make_job(tmp_path / "1", tiny_model, chats, **config), "gguf_converter": broken})
        assert (done.result["outcome"], done.result.get("output")) == ("completed", "output"), done.result
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
            (None, "this worker lacks it: run `cmake"),
            ("raise SystemExit(127)", "does not start on this worker: exit status 127, without a message"),
            ("print('   2  or  Q4_0    :  4.34G')", "does not know: use one of Q4_0, or install a newer llama.cpp"),
        ],
        ids=["missing", "cannot-start", "does-not-know-the-type"],
    )
    def test_without_a_quantizer_for_its_type_a_run_fails_before_it_loads_anything(
        self, text: str | None, words: str, tmp_path: Path
    ) -> None:
        run = export_of(tmp_path, CONVERTER, gguf="Q4_K_M")
        if text is not None:
            run.job = run.job.model_copy(update={"gguf_quantizer": Path(quantizer(tmp_path, text))})
        with pytest.raises(TrainingFailure) as failure:
            gguf.check_programs(run)
        assert failure.value.code == "config_error" and words in failure.value.message

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("import package_that_is_not_here", "No module named 'package_that_is_not_here'"),
            ("raise SystemExit('ERROR: Model LlamaForCausalLM is not supported')", "LlamaForCausalLM is not supported"),
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


def export_of(folder: Path, text: str, *, gguf: Any = "f16", **job: Any) -> Any:
    """As much of an export as the conversion reads."""
    spec = make_spec(folder, task="export", gguf_converter=converter(folder, text), **job)
    config = TrainingConfig(base_model="tiny", method="full", gguf=gguf)
    return types.SimpleNamespace(
        config=config, folder=folder, job=spec, report=Reporter(None), raise_if_stopped=lambda: None,
        resume_from=spec, report_progress=lambda *_: None,
    )  # fmt: skip


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to add files to."""
    return shutil.copytree(tiny_model, tmp_path / "model")


class TestBounds:
    def test_a_converter_that_writes_nothing_is_ended(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(program, "_STALLED_SECONDS", 0.3)
        with pytest.raises(TrainingFailure, match="wrote nothing for"):
            gguf.add_gguf(export_of(tmp_path, "import time; time.sleep(600)"), model, tokenizer_of())

    def test_a_file_that_does_not_fit_is_not_begun(self, model: Path, tmp_path: Path) -> None:
        with pytest.raises(TrainingFailure, match="does not fit on the disk: it needs 1 MiB") as failure:
            gguf.add_gguf(export_of(tmp_path, "raise SystemExit", disk_reserve_bytes=2**60), model, tokenizer_of())
        assert failure.value.code == "disk_full"

    @pytest.mark.parametrize(("name", "size"), [("Q8_0", "9 MiB"), ("F32", "32 MiB"), ("Q4_K_M", "25 MiB")])
    def test_a_quantized_file_needs_room_for_the_unquantized_one_too(
        self, name: str, size: str, tmp_path: Path
    ) -> None:
        save_file({"weight": torch.zeros(8_000_000, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
        run = export_of(tmp_path, "", gguf=name, disk_reserve_bytes=2**60)
        with pytest.raises(TrainingFailure, match=f"it needs {size},"):
            gguf.add_gguf(run, tmp_path, tokenizer_of())

    @pytest.mark.parametrize(
        ("ends", "code"),
        [("failed to quantize: tensor has odd shape", "config_error"), ("No space left on device", "disk_full")],
    )
    def test_a_quantizer_that_fails_leaves_no_file(self, ends: str, code: str, model: Path, tmp_path: Path) -> None:
        fails = f"import sys; open(sys.argv[2], 'w').write('half'); sys.exit('llama_model_quantize: {ends}')"
        run = export_of(tmp_path, CONVERTER, gguf="Q4_K_M", gguf_quantizer=quantizer(tmp_path, fails))
        with pytest.raises(
            TrainingFailure, match=f"(?s)The quantizer of llama.cpp could not write .*{ends}"
        ) as failure:
            gguf.add_gguf(run, model, tokenizer_of())
        assert failure.value.code == code
        assert not list(model.glob(".*gguf")) and not (model / "Modelfile").exists()
        run.job = run.job.model_copy(update={"task": RunTask.train})
        gguf.add_gguf(run, model, tokenizer_of())  # it has trained: the output is kept
        assert not list(model.glob("*gguf")) and not (model / "Modelfile").exists()

    def test_a_program_without_a_module_suffix_is_started_as_it_is(self, model: Path, tmp_path: Path) -> None:
        run = export_of(tmp_path, "")
        wrapper = tmp_path / "convert"
        wrapper.write_text("#!/bin/sh\necho bytes > $3\n")
        wrapper.chmod(0o755)
        run.job = run.job.model_copy(update={"gguf_converter": wrapper})
        gguf.add_gguf(run, model, tokenizer_of())
        assert (model / "model.gguf").read_text() == "bytes\n"
        wrapper.write_text("")
        with pytest.raises(TrainingFailure, match="cannot be started"):
            gguf.add_gguf(run, model, tokenizer_of())


def tokenizer_of(chat_template: str | None = None) -> Any:
    """A tokenizer with the tokens `<|0|>`, `<|1|>` and so on, of which the first ends a text."""
    return types.SimpleNamespace(
        chat_template=chat_template, eos_token_id=0, decode=lambda ids: "".join(f"<|{token}|>" for token in ids)
    )


class TestModelfile:
    def modelfile(self, folder: Path, generation: dict[str, Any] | None, **tokenizer: Any) -> list[str]:
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        text = modelfile(folder, "model.gguf", types.SimpleNamespace(**vars(tokenizer_of()) | tokenizer))
        return text.splitlines()

    def test_has_what_the_generation_config_says_and_nothing_else(self, tmp_path: Path) -> None:
        generation = {
            "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "repetition_penalty": 1.05,
            "max_new_tokens": 2048, "do_sample": True, "eos_token_id": [7, 0], "pad_token_id": 1,
        }  # fmt: skip
        assert self.modelfile(tmp_path, generation) == [
            "FROM ./model.gguf", "PARAMETER temperature 0.6", "PARAMETER top_k 20", "PARAMETER top_p 0.95",
            "PARAMETER repeat_penalty 1.05", "PARAMETER num_predict 2048",
            'PARAMETER stop "<|7|>"', 'PARAMETER stop "<|0|>"',
        ]  # fmt: skip

    def test_without_a_generation_config_answers_end_with_the_tokenizers_token(self, tmp_path: Path) -> None:
        assert self.modelfile(tmp_path, None) == ["FROM ./model.gguf", 'PARAMETER stop "<|0|>"']

    def test_values_that_ollama_cannot_read_are_left_out(self, tmp_path: Path) -> None:
        odd = {"temperature": float("nan"), "top_k": True, "top_p": "high", "eos_token_id": None}
        assert self.modelfile(tmp_path, odd, decode=lambda _: 'a "quoted" end') == [
            "FROM ./model.gguf", 'PARAMETER stop """a "quoted" end"""',
        ]  # fmt: skip

    def test_a_chat_template_in_the_file_needs_a_version_of_ollama_that_reads_it(self, tmp_path: Path) -> None:
        lines = self.modelfile(tmp_path, None, chat_template="{{ messages }}", apply_chat_template=lambda *_, **__: "")
        assert "REQUIRES 0.30.0" in lines and not any(line.startswith("TEMPLATE") for line in lines)


def make_llama(folder: Path) -> Path:
    """Write a Llama with a tokenizer of a kind that llama.cpp knows by its structure, not by its vocabulary."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    octets = [f"<0x{octet:02X}>" for octet in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *octets], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = "{% for message in messages %}{{ message.content }}</s>{% endfor %}"
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.full
@pytest.mark.needs("llama.cpp")
class TestLlamaCpp:
    @pytest.mark.parametrize(
        ("name", "most"), [("F16", 0.001), ("Q8_0", 0.02), ("Q6_K", 0.04), ("Q4_K_M", 0.15), ("IQ4_XS", 0.2)]
    )
    def test_its_programs_write_the_trained_weights(
        self, name: str, most: float, forks: Forks, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(LLAMA_CPP / "gguf-py")
        reader, quants = (importlib.import_module(f"gguf.{one}") for one in ("gguf_reader", "quants"))
        base = make_llama(tmp_path / "base")
        job = make_job(tmp_path / "run", base, chats, method="full", **QUICK_GGUF | {"gguf": name})
        job["gguf_converter"] = str(LLAMA_CPP / "convert_hf_to_gguf.py")
        job["gguf_quantizer"] = str(LLAMA_CPP / "build/bin/llama-quantize")
        done = forks.run(job)
        assert (done.output / "model.gguf").is_file(), [*lines(done, "error"), done.result]
        file = reader.GGUFReader(done.output / "model.gguf")
        tensors = {tensor.name: tensor for tensor in file.tensors}
        (up,) = (tensors[one] for one in tensors if one == "blk.0.ffn_up.weight")
        trained = load_file(done.output / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].float().numpy()
        written = quants.dequantize(up.data, up.tensor_type).reshape(trained.shape)
        assert abs(written - trained).mean() / abs(trained).mean() < most
        assert "message.content" in file.get_field("tokenizer.chat_template").contents()
        assert file.get_field("tokenizer.ggml.eos_token_id").contents() == 2
        assert 'PARAMETER stop "</s>"' in (done.output / "Modelfile").read_text()

    def test_its_quantizer_knows_every_type_that_is_accepted_and_no_other_is_missing(self, tmp_path: Path) -> None:
        ended = program.run_program(
            export_of(tmp_path, ""), "it", [str(LLAMA_CPP / "build/bin/llama-quantize"), "--help"]
        )
        listed = set(gguf._LISTED_TYPE.findall(ended.output))
        accepted = {*get_args(GgufTypeName), *NEED_IMPORTANCE_MATRIX, *GGUF_ALIASES}
        assert listed == accepted

    def test_a_tokenizer_that_its_converter_does_not_know_fails_the_run_before_the_first_step(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        job = make_job(tmp_path, tiny_model, chats, method="full", **QUICK_GGUF)
        done = forks.run({**job, "gguf_converter": str(LLAMA_CPP / "convert_hf_to_gguf.py")})
        assert (done.result["error"]["code"], done.steps) == ("config_error", {})
        assert "does not convert this model" in done.result["error"]["message"]
