"""The output of a run: whose weights it has, in which form, and that it names no place of this machine."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from anneal.contracts.attempt.job import JobSpec
from anneal.contracts.methods import METHODS
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.resolution import resolve_config
from anneal.contracts.training_config.rules import DeviceCapabilities
from tests.worker.training.tiny import Forks, Outcome, load_output, make_job
from worker.training.loop import sampling
from worker.training.model import loader
from worker.training.model.base_model import find_base
from worker.training.output import export

QUICK: dict[str, Any] = {
    "max_seq_length": 64, "max_steps": 4, "logging_steps": 2, "batch_size": 4, "gradient_accumulation_steps": 1,
    "optim": "adamw_torch", "warmup_ratio": 0.0,
}  # fmt: skip
WEIGHTS = "model.safetensors"


def same(first: Path, second: Path) -> bool:
    """Return True if two files of weights contain the same numbers."""
    first_tensors, second_tensors = load_file(first), load_file(second)
    return first_tensors.keys() == second_tensors.keys() and all(
        torch.equal(first_tensors[name], second_tensors[name]) for name in first_tensors
    )


def paths_in(output: Path, *places: Path) -> list[str]:
    """The files of an output that name one of these places."""
    files = [path for path in output.rglob("*") if path.is_file()]
    return [path.name for path in files if any(str(place).encode() in path.read_bytes() for place in places)]


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        values: torch.Tensor = model.eval()(torch.arange(5, 45).reshape(2, 20)).logits
    return values


@pytest.fixture(scope="class")
def stopped_early(
    forks: Forks, tiny_model: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Outcome]:
    """A run of which the evaluations get worse after the first."""
    config = QUICK | {"method": "full", "learning_rate": 1.0, "max_steps": 50, "early_stopping_patience": 2}
    folder = tmp_path_factory.mktemp("early")
    config |= {"eval_split": 0.2, "eval_steps": 1, "extra": {"memory_profile": True}}
    yield forks.run(make_job(folder, tiny_model, chats, **config))


def best_of(done: Outcome) -> int:
    """The step of the best evaluation."""
    losses = {one["step"]: one["metrics"]["eval_loss"] for one in done.of("eval")}
    return min(losses, key=lambda step: (losses[step], step))


class TestWeights:
    def test_an_early_stop_exports_the_best_evaluated_weights_and_says_so(self, stopped_early: Outcome) -> None:
        done, best = stopped_early, best_of(stopped_early)
        assert (done.result["why"], done.result["step"]) == ("early_stopping", best + 2)
        assert same(done.output / WEIGHTS, done.folder / f"checkpoint-{best}" / WEIGHTS)
        assert not same(done.output / WEIGHTS, done.folder / f"checkpoint-{best + 2}" / WEIGHTS)
        (event,) = done.of("export")
        assert (event["weights"], event["step"], event["output"]) == ("best", best, "adapter")
        assert done.result["exported"] == f"best weights of step {best}, {event['reason']}"
        assert "best `eval_loss`" in event["reason"]
        assert json.loads((done.output / "export.json").read_text())["step"] == best
        assert f"best weights of step {best}" in (done.output / "README.md").read_text()

    def test_no_file_of_an_output_names_a_place_of_this_machine(self, stopped_early: Outcome, tiny_model: Path) -> None:
        assert paths_in(stopped_early.output, tiny_model, stopped_early.folder) == []
        assert 'from_pretrained(".")' in (stopped_early.output / "README.md").read_text()

    @pytest.mark.parametrize("state", ["whole", "damaged"])
    def test_the_best_of_an_earlier_attempt_is_exported_unless_it_is_damaged(
        self, state: str, stopped_early: Outcome, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        step = best_of(stopped_early)
        saved = stopped_early.checkpoint(step)
        sha256 = saved["manifest_sha256"] if state == "whole" else "0" * 64
        job = make_job(tmp_path, tiny_model, chats, method="full", eval_split=0.2, eval_steps=4, **QUICK)
        job["best_checkpoint"] = {**saved, "manifest_sha256": sha256, "metric": 0.001}
        done = forks.run(job)
        (event,) = done.of("export")
        if state == "whole":
            assert (event["weights"], event["step"]) == ("best", step)
            assert same(done.output / WEIGHTS, Path(saved["path"]) / WEIGHTS)
        else:
            assert (event["weights"], event["step"]) == ("last", 4)
            assert any("cannot be exported" in one["line"] for one in done.of("message"))

    def test_the_last_weights_are_exported_on_request(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        rate = {"learning_rate": 1.0, "lr_scheduler_type": "constant"}
        config = QUICK | rate | {"method": "full", "export": "last", "eval_split": 0.2, "eval_steps": 1}
        done = forks.run(make_job(tmp_path, tiny_model, chats, **config))
        assert best_of(done) < 4
        (event,) = done.of("export")
        assert (event["weights"], event["step"]) == ("last", 4)
        assert same(done.output / WEIGHTS, done.folder / "checkpoint-4" / WEIGHTS)


class TestForm:
    def test_a_model_whose_template_ends_turns_with_another_token_than_eos_ends_its_answers_there(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        base = tmp_path / "base"
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
        )
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        model.resize_token_embeddings(len(tokenizer))
        model.save_pretrained(base)
        tokenizer.save_pretrained(base)
        turn = tokenizer.convert_tokens_to_ids("<|im_end|>")

        config = QUICK | {"method": "lora", "output": "merged", "max_steps": 1}
        done = forks.run(make_job(tmp_path / "run", base, chats, **config))
        assert done.result["outcome"] == "completed", done.result
        ends = json.loads((done.output / "generation_config.json").read_text())["eos_token_id"]
        assert ends == [tokenizer.eos_token_id, turn]
        (warning,) = [one["line"] for one in done.of("message") if "<|im_end|>" in one["line"]]
        assert "generation_config.json of the output names it" in warning
        assert sampling.end_tokens(model, tokenizer) == ends, "predictions with the base or an adapter end there too"
        assert AutoTokenizer.from_pretrained(done.output).eos_token == tokenizer.eos_token

    @pytest.mark.parametrize("method", ["lora", "qlora"])
    def test_a_merged_output_loads_with_transformers_alone_and_computes_the_same(
        self, method: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = QUICK | {"method": method, "learning_rate": 2e-2, "use_dora": method == "lora", "output": "merged"}
        done = forks.run(make_job(tmp_path, tiny_model, chats, **config))
        assert done.result["outcome"] == "completed", done.result
        assert not (done.output / "adapter_config.json").exists() and not (done.output / "adapter").exists()
        assert "quantization_config" not in json.loads((done.output / "config.json").read_text())
        assert paths_in(done.output, tiny_model, tmp_path) == []
        assert "peft" not in (done.output / "README.md").read_text().split("## Data")[0]
        merged = logits(load_output(done.output, tiny_model))

        plain = AutoModelForCausalLM.from_pretrained(tiny_model)
        untrained = logits(plain)
        adapted = logits(PeftModel.from_pretrained(plain, str(done.folder / "checkpoint-4")))
        # The base of a 4-bit adapter differs from the original by its quantization.
        most = 1e-4 if method == "lora" else 0.3 * (adapted - untrained).abs().max()
        assert (merged - adapted).abs().max() < most
        assert (merged - untrained).abs().max() > 1e-2

    @pytest.mark.parametrize(
        "trained",
        [
            {"target_modules": ["q_proj", "embed_tokens"]},
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        ],
        ids=["adapted", "whole"],
    )
    def test_a_merged_output_of_tied_embeddings_computes_what_was_trained(
        self, trained: dict[str, Any], forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        model = tmp_path / "model"
        AutoModelForCausalLM.from_pretrained(tiny_model, tie_word_embeddings=True).save_pretrained(model)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(model)
        config = QUICK | trained | {"method": "lora", "learning_rate": 2e-2, "output": "merged"}
        done = forks.run(make_job(tmp_path / "run", model, chats, **config))
        assert done.result["outcome"] == "completed", done.result
        adapted = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(model), str(done.folder / "checkpoint-4")
        )
        merged = load_output(done.output, model)
        assert (logits(merged) - logits(adapted)).abs().max() < 1e-4
        assert not merged.config.tie_word_embeddings
        assert any("each as trained" in record["line"] for record in done.of("message"))

    @pytest.mark.parametrize("output", ["merged", "adapter"])
    def test_a_base_whose_files_have_4_bits_is_trained_as_stored_and_dequantized_to_merge(
        self, output: str, forks: Forks, four_bit_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = QUICK | {"method": "qlora", "learning_rate": 2e-2, "output": output}
        done = forks.run(make_job(tmp_path / "run", four_bit_model, chats, **config))
        assert done.result["outcome"] == "completed", done.result
        (reported,) = done.of("config")
        assert reported["effective"]["bnb_4bit_quant_type"] == "fp4"
        stored = AutoModelForCausalLM.from_pretrained(four_bit_model, device_map={"": "cpu"}).dequantize(torch.float32)
        untrained = logits(stored.float())
        adapted = logits(PeftModel.from_pretrained(stored.float(), str(done.folder / "checkpoint-4")))
        assert (adapted - untrained).abs().max() > 1e-2
        if output == "merged":
            assert "quantization_config" not in json.loads((done.output / "config.json").read_text())
            assert (logits(load_output(done.output, four_bit_model)) - adapted).abs().max() < 1e-4

    @pytest.mark.parametrize(
        ("config", "field"),
        [
            ({"method": "full"}, "`method`"),
            ({"method": "lora"}, "`method`"),
            ({"load_in_8bit": True}, "`load_in_8bit`"),
        ],
    )
    def test_a_configuration_that_the_files_of_the_base_contradict_fails_before_training(
        self, config: dict[str, Any], field: str, forks: Forks, four_bit_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        done = forks.run(make_job(tmp_path / "run", four_bit_model, chats, **QUICK, **config))
        error = done.result["error"]
        assert (error["code"], done.steps) == ("config_error", {})
        assert error["message"].startswith(field) and "4 bits" in error["message"]

    def test_a_base_whose_files_have_4_bits_is_evaluated(
        self, forks: Forks, four_bit_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        job = make_job(tmp_path / "run", four_bit_model, chats, method="full", max_seq_length=64, batch_size=4)
        done = forks.run({**job, "task": "evaluate"})
        assert done.result["outcome"] == "completed", done.result
        assert 4.0 < done.result["metrics"]["eval_loss"] < 8.0

    def test_a_base_whose_files_are_quantized_otherwise_fails_before_training(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        model = shutil.copytree(tiny_model, tmp_path / "model")
        described = json.loads((model / "config.json").read_text())
        described["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
        (model / "config.json").write_text(json.dumps(described))
        done = forks.run(make_job(tmp_path / "run", model, chats, **QUICK))
        error = done.result["error"]
        assert (error["code"], done.steps) == ("config_error", {})
        assert error["message"].startswith("`base_model`") and "`gptq`" in error["message"]


@pytest.fixture
def four_bit_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A tiny model whose files have 4 bits, of another type than the default of a run."""
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=options, device_map={"": "cpu"})
    model.save_pretrained(tmp_path / "four_bits")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "four_bits")
    return tmp_path / "four_bits"


class TestMergeOnAGpu:
    """The path of a GPU, on the CPU in its place."""

    @pytest.fixture(params=["lora", "qlora"])
    def trained(
        self, request: pytest.FixtureRequest, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> Outcome:
        """A run on a base whose own data type is bfloat16."""
        model = tmp_path / "model"
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(model)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(model)
        config = QUICK | {"method": request.param, "learning_rate": 2e-2}
        done = forks.run(make_job(tmp_path / "run", model, chats, **config))
        assert done.result["outcome"] == "completed", done.result
        return done

    @pytest.fixture
    def merge(
        self, trained: Outcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> Callable[[str], tuple[Path, list[str]]]:
        """Merges the adapter as a run on a device of a kind does; returns the folder and the messages."""
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
        job = JobSpec.model_validate(trained.job)

        def run_merge(kind: Literal["cpu", "cuda"]) -> tuple[Path, list[str]]:
            messages: list[str] = []
            machine = DeviceCapabilities(kind=kind, bf16=True)
            config = resolve_config(TrainingConfig(**trained.job["config"]), set(), machine).config
            run: Any = SimpleNamespace(
                machine=machine, config=config, job=job, method=METHODS[config.method],
                report=SimpleNamespace(message=lambda line, level: messages.append(line)),
            )  # fmt: skip
            folder = tmp_path / kind
            folder.mkdir()
            export.copy_weights(trained.folder / "checkpoint-4", folder)
            export._merge_output(
                run, find_base(job, config), folder, AutoTokenizer.from_pretrained(str(job.base_model.path))
            )
            return folder, messages

        return run_merge

    def test_weights_are_those_of_a_merge_on_the_cpu_and_computed_in_the_data_type_of_the_base(
        self, merge: Callable[[str], tuple[Path, list[str]]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        devices: list[tuple[str, torch.dtype]] = []
        load = loader.load_model

        def noting(base: Any, config: Any, machine: DeviceCapabilities, *more: Any, **options: Any) -> Any:
            model = load(base, config, machine, *more, **options)
            devices.append((machine.kind, model.lm_head.weight.dtype))
            return model

        monkeypatch.setattr(loader, "load_model", noting)
        (on_gpu, messages), (on_cpu, _) = merge("cuda"), merge("cpu")
        assert (devices, messages) == ([("cuda", torch.bfloat16), ("cpu", torch.float32)], [])
        assert same(on_gpu / WEIGHTS, on_cpu / WEIGHTS)
        assert {weight.dtype for weight in load_file(on_gpu / WEIGHTS).values()} == {torch.bfloat16}

    def test_too_little_memory_of_the_gpu_merges_on_the_cpu_and_says_so(
        self, merge: Callable[[str], tuple[Path, list[str]]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load = loader.load_model

        def without_gpu_memory(base: Any, config: Any, machine: DeviceCapabilities, *more: Any, **options: Any) -> Any:
            if machine.kind == "cuda":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return load(base, config, machine, *more, **options)

        monkeypatch.setattr(loader, "load_model", without_gpu_memory)
        (folder, messages), (on_cpu, none) = merge("cuda"), merge("cpu")
        assert same(folder / WEIGHTS, on_cpu / WEIGHTS)
        ((line,), others) = messages, none
        assert "too little free memory" in line and "merged on the CPU" in line and others == []


class TestExportOfACheckpoint:
    def test_writes_its_weights_without_data_and_without_training(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = QUICK | {"method": "lora", "learning_rate": 2e-2, "save_steps": 2}
        trained = forks.run(make_job(tmp_path / "1", tiny_model, chats, **config))
        saved = trained.checkpoint(2)
        for form in ("adapter", "merged"):
            job = make_job(tmp_path / form, tiny_model, "missing.jsonl", resume_from=saved, output=form, **config)
            done = forks.run({**job, "task": "export"})
            assert (done.result["outcome"], done.result["why"]) == ("completed", "export"), done.result
            assert (done.of("metric"), done.of("checkpoint"), done.steps) == ([], [], {})
            (event,) = done.of("export")
            assert (event["weights"], event["step"], event["output"]) == ("checkpoint", 2, form)
            assert paths_in(done.output, tiny_model, tmp_path) == []
        name = "adapter_model.safetensors"
        assert same(tmp_path / "adapter" / "a1" / "output" / name, Path(saved["path"]) / name)
        adapted, merged = (load_output(tmp_path / form / "a1" / "output", tiny_model) for form in ("adapter", "merged"))
        assert (logits(adapted) - logits(merged)).abs().max() < 1e-4
