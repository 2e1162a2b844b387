"""How a run ends: stops, failures; each says why and leaves nothing half-written."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from anneal.contracts.attempt.messages import ControlMessage
from anneal.contracts.stop import StopRequest
from tests.waiting import eventually
from tests.worker.training.tiny import (
    Forks,
    Outcome,
    make_chat_dataset,
    make_job,
    parse_records,
    write_rows,
)
from worker.checkpoint_files.manifest import verify
from worker.training.__main__ import _ended_by
from worker.training.failures import TrainingFailure, classify_error
from worker.training.model.base_model import load_failure
from worker.training.ranks import Ranks
from worker.wire.control import Control
from worker.wire.reporter import Reporter

QUICK: dict[str, Any] = {"method": "lora", "max_seq_length": 64, "batch_size": 2, "gradient_accumulation_steps": 1}


def checkpoints(outcome: Outcome) -> list[str]:
    """Folders of checkpoints on disk, finished or not."""
    return sorted(path.name for path in outcome.folder.iterdir() if "checkpoint" in path.name)


def failed(outcome: Outcome, code: str) -> str:
    """The message of a classified failure."""
    assert outcome.code == 1
    assert outcome.result["outcome"] == "failed", outcome.result
    assert outcome.result["error"]["code"] == code, (outcome.result, outcome.stderr[-2000:])
    return str(outcome.result["error"]["message"])


class TestStops:
    def test_sigterm_saves_and_releases(self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path) -> None:
        pid = forks.start(make_job(tmp_path, tiny_model, chats, max_steps=100_000, logging_steps=1, **QUICK))
        eventually(lambda: [r for r in forks.said() if r["type"] == "metric"], timeout=60)
        os.kill(pid, signal.SIGTERM)
        done = forks.wait()
        assert done.code == 0
        assert (done.result["outcome"], done.result["why"]) == ("stopped", "drain")
        step = done.result["step"]
        assert max(done.steps) == step
        assert done.checkpoint(step)["step"] == step
        assert not done.output.exists()

    def test_a_stop_ends_an_evaluation_at_once_and_leaves_it_to_the_resumed_run(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        job = make_job(tmp_path, tiny_model, chats, eval_data=chats, max_steps=100, eval_steps=2, **QUICK)
        done = forks.run(job, course={"drain_at_evaluation": 1})
        assert (done.result["outcome"], done.result["step"]) == ("stopped", 2)
        state = json.loads((Path(done.checkpoint(2)["path"]) / "anneal_state.json").read_text())
        assert state["eval_pending"] is True
        assert done.of("eval") == []

    def test_a_stop_while_tokenising_ends_at_once(self, forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
        rows = make_chat_dataset(tmp_path / "rows.jsonl", 1000).read_text()
        many = tmp_path / "many.jsonl"
        many.write_text(rows * 200)
        pid = forks.start(make_job(tmp_path, tiny_model, many, **QUICK))
        eventually(lambda: [r for r in forks.said() if r["type"] == "progress"], timeout=60)
        os.kill(pid, signal.SIGTERM)
        done = forks.wait()
        assert (done.code, done.result["outcome"], done.result["why"]) == (0, "stopped", "drain")
        assert done.steps == {}

    @pytest.mark.parametrize("save", [True, False])
    def test_a_users_stop_over_the_control_socket_saves_only_if_asked(
        self, save: bool, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        job = make_job(tmp_path, tiny_model, chats, max_steps=100_000, logging_steps=1, **QUICK)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(tmp_path / "control"))
            listening.listen()
            forks.start(job, control=tmp_path / "control")
            control, _ = listening.accept()
        with control:
            eventually(lambda: [r for r in forks.said() if r["type"] == "metric"], timeout=60)
            control.send(ControlMessage(stop=StopRequest("checkpoint" if save else "discard")).to_json())
            done = forks.wait()
        assert done.code == 0
        assert (done.result["outcome"], done.result["why"]) == ("stopped", "stop")
        kinds = [record["kind"] for record in done.of("checkpoint") if record["step"] == done.result["step"]]
        assert kinds == (["stop"] if save else [])

    def test_a_stop_after_the_last_step_finds_the_run_completed(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        pid = forks.start(make_job(tmp_path, tiny_model, chats, max_steps=3, **QUICK))
        eventually(lambda: [r for r in forks.said() if r["type"] == "checkpoint"], timeout=60)
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        assert forks.wait().result["outcome"] == "completed"


class TestFailures:
    @pytest.mark.parametrize("limit", [30_000, 230_000], ids=["in-the-weights", "in-the-optimizer"])
    def test_a_full_disk_is_said_and_nothing_half_written_stays(
        self, limit: int, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = QUICK | {"method": "full", "optim": "adamw_torch"}
        done = forks.run(make_job(tmp_path, tiny_model, chats, max_steps=4, save_steps=2, **config), file_bytes=limit)
        failed(done, "disk_full")
        assert checkpoints(done) == []
        assert max(done.steps) in (2, 3, 4), "it is heard of after the step at which the thread has failed"

    def test_a_non_finite_loss_fails_before_it_corrupts_anything(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path, copy_model: Callable[[], Path]
    ) -> None:
        model = copy_model()
        weights = load_file(model / "model.safetensors")
        weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 3e38)
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        done = forks.run(make_job(tmp_path, model, chats, max_steps=4, save_steps=1, **QUICK))
        assert "step 1" in failed(done, "non_finite_loss")
        assert checkpoints(done) == []
        assert done.of("metric") == []

    def test_bad_rows_are_named_by_line(self, forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "bad.jsonl", [{"text": "good"}, {"txt": "?"}, {"text": 3}, "x"])
        with path.open("ab") as file:
            file.write(b'\n{"text": "half\xc3"}\n{broken\n')
        message = failed(forks.run(make_job(tmp_path, tiny_model, path, data_format="text", **QUICK)), "bad_data")
        assert all(f"line {line}" in message for line in (2, 3, 4, 6, 7)), message
        assert "line 1:" not in message

    def test_an_empty_dataset_is_bad_data(self, forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "empty.jsonl", [])
        failed(forks.run(make_job(tmp_path, tiny_model, path, data_format="text", **QUICK)), "bad_data")

    def test_a_model_that_is_missing_is_not_found_and_one_without_weights_or_with_torn_ones_says_so(
        self, forks: Forks, chats: Path, tmp_path: Path, copy_model: Callable[[], Path]
    ) -> None:
        failed(forks.run(make_job(tmp_path / "1", tmp_path / "nowhere", chats, **QUICK)), "model_not_found")
        model = copy_model()
        (model / "model.safetensors").unlink()
        failed(forks.run(make_job(tmp_path / "2", model, chats, **QUICK)), "config_error")
        (model / "model.safetensors").write_bytes(b"torn")
        reported = failed(forks.run(make_job(tmp_path / "3", model, chats, **QUICK)), "config_error")
        assert "model.safetensors" in reported and "damaged" in reported

    def test_weights_in_a_pickle_are_never_loaded(
        self, forks: Forks, chats: Path, tmp_path: Path, copy_model: Callable[[], Path]
    ) -> None:
        model = copy_model()
        torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
        (model / "model.safetensors").unlink()
        failed(forks.run(make_job(tmp_path, model, chats, **QUICK)), "model_not_found")

    def test_more_tokens_than_the_model_takes_is_a_config_error(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        done = forks.run(make_job(tmp_path, tiny_model, chats, method="lora", max_seq_length=4096))
        assert "256" in failed(done, "config_error")

    @pytest.mark.parametrize(
        ("config", "message"),
        [({"optim": "paged_adamw_8bit"}, "optim"), ({"extra": {"removed": 1}}, "`extra.removed` is not a field")],
    )
    def test_a_configuration_that_this_machine_or_version_cannot_honor_is_a_config_error(
        self, config: dict[str, Any], message: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        done = forks.run(make_job(tmp_path, tiny_model, chats, **config))
        assert message in failed(done, "config_error")

    @pytest.mark.parametrize("field", ["target_modules", "modules_to_save"])
    def test_a_module_that_the_model_lacks_is_a_config_error(
        self, field: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        done = forks.run(make_job(tmp_path, tiny_model, chats, **QUICK, **{field: ["nope"]}))
        assert "nope" in failed(done, "config_error")

    def test_of_several_target_modules_each_must_be_there(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = QUICK | {"target_modules": ["q_proj", "kay_proj", "self_attn.v_proj"]}
        message = failed(forks.run(make_job(tmp_path, tiny_model, chats, **config)), "config_error")
        assert "no module kay_proj;" in message
        assert "k_proj" in message.replace("kay_proj", "") and "q_proj" in message

    def test_a_tokenizer_with_more_tokens_than_the_model_is_a_config_error(
        self, forks: Forks, chats: Path, tmp_path: Path, copy_model: Callable[[], Path]
    ) -> None:
        model = copy_model()
        tokenizer = AutoTokenizer.from_pretrained(model)
        rows = len(tokenizer)
        tokenizer.add_tokens([" row"])
        tokenizer.save_pretrained(model)
        message = failed(forks.run(make_job(tmp_path, model, chats, **QUICK)), "config_error")
        assert f"token id {rows}," in message and f"{rows} tokens" in message
        assert "Use the tokenizer that the model was trained with" in message and "`pad_token`" in message

    def test_a_pickled_adapter_is_never_loaded(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        adapter = tmp_path / "adapter"
        adapter.mkdir()
        described = {"peft_type": "LORA", "base_model_name_or_path": str(tiny_model), "target_modules": ["q_proj"]}
        (adapter / "adapter_config.json").write_text(json.dumps(described))
        torch.save({}, adapter / "adapter_model.bin")
        message = failed(forks.run(make_job(tmp_path, adapter, chats, **QUICK)), "model_not_found")
        assert "adapter_model.safetensors" in message and "pickle" in message

    def test_a_merged_base_is_gone_however_its_run_ends(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        adapter = forks.run(make_job(tmp_path / "1", tiny_model, chats, max_steps=1, **QUICK)).output
        base = {"base": {"name": "tiny", "path": str(tiny_model), "hub": None, "revision": None}}
        stopped = make_job(tmp_path / "2", adapter, chats, max_steps=100_000, logging_steps=1, **QUICK)
        stopped["base_model"] |= base
        pid = forks.start(stopped)
        eventually(lambda: [r for r in forks.said() if r["type"] == "metric"], timeout=60)
        assert (Path(stopped["attempt_dir"]) / "base_model").is_dir()
        os.kill(pid, signal.SIGTERM)
        assert forks.wait().result["outcome"] == "stopped"
        job = make_job(tmp_path / "3", adapter, chats, **QUICK, target_modules=["nope"])
        wrong = forks.run(job | {"base_model": job["base_model"] | base})
        failed(wrong, "config_error")
        for folder in (Path(stopped["attempt_dir"]), wrong.folder):
            assert not (folder / "base_model").exists()

    def test_bad_evaluation_data_are_called_so_before_anything_is_merged(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        bad = write_rows(tmp_path / "bad.jsonl", [{"txt": "?"}])
        job = make_job(tmp_path, tiny_model, chats, eval_data=bad, eval_steps=1, **QUICK)
        done = forks.run(job)
        assert "evaluation data" in failed(done, "bad_data")
        assert [record["name"] for record in done.of("phase")] == ["loading", "tokenizing"]

    def test_a_disk_that_is_full_at_the_start_is_said_too(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        job = make_job(tmp_path, tiny_model, chats, **QUICK)
        failed(forks.run(job | {"journal": "/dev/full"}), "disk_full")

    def test_a_hub_model_is_not_found_without_the_hub(self, forks: Forks, chats: Path, tmp_path: Path) -> None:
        job = make_job(tmp_path, tmp_path, chats, **QUICK)
        job["base_model"] = {"name": "owner/none", "path": None, "hub": "owner/none", "revision": None}
        assert "owner/none" in failed(forks.run(job), "model_not_found")


def _build_error() -> subprocess.CalledProcessError:
    """The error with which Triton reports that a compiler failed."""
    return subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c", "-O3", "-shared", "-fPIC", "-o", "main.so"])


class TestClassify:
    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (MemoryError(), "out_of_memory"),
            (
                RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
                "out_of_memory",
            ),
            (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
            (
                RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
                "out_of_memory",
            ),
            (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"), "out_of_memory"),
            (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "out_of_memory"),
            (
                RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1000'),
                "out_of_memory",
            ),
            (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
            (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "device_error"),
            (RuntimeError("CUDA error: an illegal memory access was encountered"), "device_error"),
            (RuntimeError("No CUDA GPUs are available"), "device_error"),
            (RuntimeError("CUDA driver error: operation not supported"), "device_error"),
            # An index out of range, in the data or the model.
            (RuntimeError("CUDA error: device-side assert triggered"), "internal"),
            (OSError(errno.ENOENT, "No such file"), "internal"),
            (TrainingFailure("bad_data", "rows"), "bad_data"),
            (ValueError("surprise"), "internal"),
        ],
    )
    def test_an_exception_becomes_a_stable_code(self, error: Exception, code: str) -> None:
        assert classify_error(error).code == code

    @pytest.mark.parametrize(
        ("error", "has_headers", "remedy"),
        [
            (RuntimeError("Failed to find C compiler. Please specify via CC"), True, "`gcc` and `libc6-dev`"),
            (_build_error(), False, f"`python{sys.version_info.major}.{sys.version_info.minor}-dev`"),
            (_build_error(), True, "`/usr/bin/gcc` failed, with a message in the log"),
        ],
    )
    def test_kernel_that_cannot_be_compiled_fails_the_device_and_names_the_package_to_install(
        self, error: Exception, has_headers: bool, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        if has_headers:
            (tmp_path / "Python.h").touch()
        monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
        failure = classify_error(error)
        assert failure.code == "device_error"
        assert remedy in failure.message

    def test_a_cause_counts_as_much_as_what_was_made_of_it(self) -> None:
        error = RuntimeError("the writer failed")
        error.__context__ = OSError(errno.EDQUOT, "Disk quota exceeded")
        assert classify_error(error).code == "disk_full"


class TestNotLoaded:
    def test_a_gated_model_of_the_hub_asks_the_operator_to_log_in(self) -> None:
        request = httpx.Request("GET", "https://hub.invalid")
        refusal = GatedRepoError("gated", response=httpx.Response(403, request=request))
        error = OSError("You are trying to access a gated repo.")
        error.__cause__ = refusal
        failure = load_failure(error, "owner/gated", "model")
        assert failure.code == "model_not_found"
        assert "owner/gated" in failure.message and "`anneal secrets set hf_token`" in failure.message

    def test_a_model_of_a_hub_that_is_out_of_reach_may_be_a_folder_instead(self) -> None:
        failure = load_failure(OSError("We couldn't connect to the hub."), "owner/model", "configuration")
        assert failure.code == "model_not_found" and "below ANNEAL_MODELS_ROOT" in failure.message
        assert "ANNEAL_MODELS_ROOT" not in load_failure(OSError("no config.json"), "/models/m", "model").message

    @pytest.mark.parametrize(("wrong", "reason"), [
        ({"hidden_size": 65}, "not a multiple of the number of attention heads (4)"),
        ({"hidden_size": "big"}, "expected int, got str"),
        ({"num_key_value_heads": 0}, "ZeroDivisionError"),
    ])  # fmt: skip
    def test_a_config_that_makes_no_sense_is_reported_with_its_reason_and_where_to_look(
        self, tmp_path: Path, wrong: dict[str, Any], reason: str
    ) -> None:
        fields = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
        (tmp_path / "config.json").write_text(json.dumps(fields | {"vocab_size": 32, "intermediate_size": 64} | wrong))
        with pytest.raises((StrictDataclassError, ZeroDivisionError)) as raised:
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        failure = load_failure(raised.value, str(tmp_path), "model")
        assert failure.code == "config_error" and reason in failure.message and "config.json" in failure.message

    def test_an_empty_file_of_weights_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").touch()
        failure = load_failure(SafetensorError("header too small"), str(tmp_path), "model")
        assert failure.code == "config_error" and "model.safetensors is empty" in failure.message
        assert "download it again" in failure.message


class TestKilledWhileSaving:
    def test_a_checkpoint_is_reported_only_when_it_is_whole(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        job = make_job(tmp_path, tiny_model, chats, max_steps=100_000, save_steps=1, **QUICK)
        pid = forks.start(job)
        eventually(lambda: len([r for r in forks.said() if r["type"] == "checkpoint"]) > 5, timeout=60)
        os.kill(pid, signal.SIGKILL)
        done = forks.wait()
        assert done.code == -signal.SIGKILL
        for record in done.of("checkpoint"):
            assert verify(done.folder / record["name"], record["manifest_sha256"]) == []


def test_ranks_that_have_loaded_something_else_are_named_with_it() -> None:
    class First(Ranks):
        def gather_values(self, value: Any) -> list[Any]:
            return [value, value, value | {"tokenizers": "b"}, {"models": "x"}]

    message = (
        "The processes of the run have different tokenizers: a on ranks 0, 1; b on rank 2; unknown on rank 3. Copy it."
    )
    with pytest.raises(TrainingFailure, match=f"^{re.escape(message)}$"):
        First(0, 4).check_same({"models": "x", "tokenizers": "a"}, "Copy it.")


def test_a_failure_on_another_rank_is_reported_with_that_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """The worker pauses the device of that rank."""

    class Second(Ranks):
        def gather_values(self, value: Any) -> list[Any]:
            return [value, (("device_error", "the GPU failed"), False)]

    with pytest.raises(TrainingFailure, match="On rank 1: the GPU failed") as raised:
        Second(0, 2).agree_on(None, stopped=False)
    result = _ended_by(raised.value, Control())
    assert (result["outcome"], result["rank"]) == ("failed", 1)
    Reporter(None).send({"type": "result", **result})
    (record,) = parse_records(capfd.readouterr().out)
    assert record["rank"] == 1
