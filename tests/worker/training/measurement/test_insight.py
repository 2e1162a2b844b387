"""What a run tells of itself changes nothing in it: speed, memory, and on request distributions and a profile."""

import json
import math
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import OlmoConfig, OlmoForCausalLM, TrainerControl, TrainerState

from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import DeviceCapabilities
from app.estimator.flops import Operations
from tests.jobs import make_spec
from tests.worker.training.tiny import Forks, Outcome, make_job, make_pairs, make_prompts
from worker.training.context import TrainingContext
from worker.training.measurement import memory, throughput
from worker.training.measurement.histograms import EDGES, Histogram
from worker.training.run_state import MEMORY, MOST_RECORDS, History

COMMON: dict[str, Any] = {
    "max_seq_length": 64, "learning_rate": 1e-3, "max_steps": 4, "logging_steps": 2, "batch_size": 2, "save_steps": 2,
    "gradient_accumulation_steps": 2, "optim": "adamw_torch",
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"}, "lora": {"method": "lora", "lora_r": 4}, "qlora": {"method": "qlora", "lora_r": 4},
}  # fmt: skip


def completed(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.stderr[-3000:]
    assert outcome.result["outcome"] == "completed", outcome.result
    return outcome


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Ticking:
    """A clock that stands still but where the test lets it go on."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class TestThroughput:
    def test_rates_are_over_steps_and_waiting_for_data_and_nothing_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Ticking()
        monkeypatch.setattr(throughput, "time", clock)
        speed = throughput.Throughput()
        speed.begin(1000)
        for _ in range(2):
            with speed.count_waiting():
                clock.now += 1.0
            speed.record_step(4.0, samples=5)
            clock.now += 100.0  # a checkpoint, an evaluation
        rate, reported = speed.take_rates(1100)
        assert rate == 1.0
        assert reported == {"tokens_per_second": 10.0, "tokens": 1100, "step_seconds": 8.0, "data_seconds": 2.0}
        assert speed.take_rates(1100)[1]["step_seconds"] == 0.0

    def test_the_preparation_of_the_next_step_counts_as_waiting_and_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Ticking()
        monkeypatch.setattr(throughput, "time", clock)
        speed = throughput.Throughput()
        assert speed.take_wait() == 0.0
        with speed.waiting_within_step(torch.device("cpu")):
            clock.now += 3.0
        assert (speed.take_wait(), speed.take_wait()) == (3.0, 0.0)
        assert speed.take_rates(0)[1]["data_seconds"] == 3.0

    def test_mfu_is_what_was_computed_over_what_the_device_can_do_in_that_time(self) -> None:
        speed = throughput.Throughput()
        speed.operations, speed.peak_tflops = Operations(token=10**9, pair=10**6), 2.0
        speed.record_forward(torch.tensor(1000.0))
        speed.record_step(2.0, samples=1)
        assert speed.take_rates(500)[1]["mfu"] == pytest.approx((500 * 10**9 + 1000 * 10**6) / (2.0 * 2e12))

    def test_checkpoints_and_evaluations_are_not_in_the_time_of_steps(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = METHODS["lora"] | COMMON | {"logging_steps": 1, "save_steps": 1, "eval_steps": 1}
        done = completed(forks.run(make_job(tmp_path, tiny_model, chats, eval_data=chats, **config)))
        metrics = done.of("metric")
        elapsed = metrics[-1]["ts"] - metrics[0]["ts"]
        beside = sum(record["metrics"]["eval_seconds"] for record in done.of("eval")[:3])
        inside = sum(record["extra"]["step_seconds"] + record["extra"]["data_seconds"] for record in metrics[1:])
        assert inside <= elapsed - beside
        assert all(record["extra"]["data_seconds"] > 0 for record in metrics)

    @pytest.mark.parametrize("method", ["sft", "dpo"])
    def test_wall_clock_breakdown_divides_the_time_of_steps_into_phases(
        self, method: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        rows = chats if method == "sft" else make_pairs(tmp_path / "pairs.jsonl", 8)
        options = {"data_format": "chat" if method == "sft" else "preference"}
        objective = {"method": method, "lora_r": 4, "load_in_4bit": False}
        config = objective | COMMON | {"extra": {"wall_clock_breakdown": True}}
        done = completed(forks.run(make_job(tmp_path, tiny_model, rows, **options, **config)))
        parts = []
        for metric in done.of("metric"):
            phases = [metric["extra"][f"{phase}_seconds"] for phase in ("forward", "backward", "optimizer")]
            assert min(phases) > 0
            parts.append(sum(phases) / metric["extra"]["step_seconds"])
        assert max(parts) <= 1
        assert max(parts) > 0.5, "most of a step, unless another process had the processor meanwhile"

    def test_eval_log_steps_logs_progress_and_loss_of_each_evaluation(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        extra = {"eval_log_steps": 2, "eval_batch_size": 8}
        config = METHODS["lora"] | COMMON | {"eval_steps": 2, "extra": extra}
        done = completed(forks.run(make_job(tmp_path, tiny_model, chats, eval_data=chats, **config)))
        lines = [record["line"] for record in done.of("message") if "batches" in record["line"]]
        (last,) = [record["metrics"]["eval_loss"] for record in done.of("eval")][-1:]
        batches = len(chats.read_text().splitlines()) // 8
        steps = [record["step"] for record in done.of("eval")]
        places = [(step, batch) for step in steps for batch in range(2, batches + 1, 2)]
        assert len(places) == len(lines) > 0
        for line, (step, batch) in zip(lines, places, strict=True):
            assert line.startswith(f"Evaluation at step {step}: {batch} of {batches} batches, loss ")
        if batches % 2 == 0:  # the last line is about all batches
            assert f"loss {last:.4g} so far." in lines[-1]


def mfu_of(done: Outcome) -> list[float]:
    return [record["extra"]["mfu"] for record in done.of("metric")]


class TestFacts:
    def test_without_a_known_peak_there_is_no_mfu_and_the_facts_say_so(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        done = completed(forks.run(make_job(tmp_path, tiny_model, chats, **METHODS["full"], **COMMON)))
        facts = done.of("config")[0]["facts"]
        assert facts["peak_tflops"] is None and facts["flops_not_counted"] is None
        assert facts["flops_per_token"] == facts["flops_per_token_hardware"] > 6 * 20_000
        assert all("mfu" not in record["extra"] for record in done.of("metric"))
        assert "FLOPs per trained token" in (done.output / "README.md").read_text()

    def test_of_a_family_that_the_estimator_does_not_know_the_facts_have_a_reason_and_metrics_no_mfu(
        self, forks: Forks, copy_model: Callable[[], Path], chats: Path, tmp_path: Path
    ) -> None:
        model = copy_model()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        ids = {"vocab_size": 320, "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": None}
        OlmoForCausalLM(OlmoConfig(**sizes, **ids)).save_pretrained(model)
        config = METHODS["lora"] | COMMON | {"max_steps": 2, "extra": {"peak_tflops": 0.001}}
        done = completed(forks.run(make_job(tmp_path, model, chats, **config)))
        facts = done.of("config")[0]["facts"]
        assert "'olmo' is not supported by the estimator" in facts["flops_unknown"]
        assert not {"flops_per_token", "flops_per_token_hardware"} & set(facts)
        assert all("mfu" not in record["extra"] for record in done.of("metric"))
        card = (done.output / "README.md").read_text()
        assert "parameters: " in card and "FLOPs" not in card

    @pytest.mark.parametrize("packing", [pytest.param(False, marks=pytest.mark.full), True])
    def test_mfu_follows_from_the_facts_and_the_time(
        self, packing: bool, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = METHODS["lora"] | COMMON | {"packing": packing, "extra": {"peak_tflops": 0.001}}
        done = completed(forks.run(make_job(tmp_path, tiny_model, chats, **config)))
        facts = done.of("config")[0]["facts"]
        for mfu, record in zip(mfu_of(done), done.of("metric"), strict=True):
            about = facts["flops_per_token"] * record["extra"]["tokens_per_second"] / 1e9
            assert mfu == pytest.approx(about, rel=0.1)

    @pytest.mark.parametrize(
        "method", ["dpo", *(pytest.param(one, marks=pytest.mark.full) for one in ("reward", "rlhf"))]
    )
    def test_every_method_has_them(self, method: str, forks: Forks, tiny_model: Path, tmp_path: Path) -> None:
        rows = make_prompts(tmp_path / "r", 16) if method == "rlhf" else make_pairs(tmp_path / "r", 16)
        config: dict[str, Any] = COMMON | {
            "method": method, "lora_r": 4, "max_steps": 2, "extra": {"peak_tflops": 0.001}, "max_seq_length": 128,
        }  # fmt: skip
        if method == "rlhf":
            rewards = [{"type": "length", "max": 5}]
            config["rlhf"] = {"rewards": rewards, "num_generations": 2, "max_completion_length": 8, "beta": 0.1}
        form = "prompt" if method == "rlhf" else "preference"
        done = completed(forks.run(make_job(tmp_path, tiny_model, rows, data_format=form, **config)))
        facts = done.of("config")[0]["facts"]
        assert all(mfu > 0 for mfu in mfu_of(done))
        assert ("generating" in (facts["flops_not_counted"] or "")) == (method == "rlhf")


class TestGpuMemory:
    def test_every_metric_has_the_present_memory_and_the_peak_since_the_last(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        device = {"now": 0, "peak": 0}

        def use(megabytes: int) -> None:
            device["now"] = megabytes << 20
            device["peak"] = max(device["peak"], device["now"])

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: device["now"])
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: device["now"])
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: device["peak"])
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: device["peak"] + (50 << 20))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: device.update(peak=device["now"]))
        gpu = memory.GpuMemory()
        use(900)
        use(100)
        assert gpu.end_phase() == {"allocated_mb": 100.0, "reserved_mb": 100.0, "peak_mb": 900.0}
        use(300)
        assert gpu.take_peak() == (900.0, {"gpu_memory_current_mb": 300.0, "gpu_memory_reserved_mb": 950.0})
        use(200)
        assert gpu.take_peak() == (300.0, {"gpu_memory_current_mb": 200.0, "gpu_memory_reserved_mb": 350.0})
        assert gpu.take_peak() == (200.0, {"gpu_memory_current_mb": 200.0, "gpu_memory_reserved_mb": 250.0})

    def test_without_a_gpu_the_process_reports_its_own_peak(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        peak, reported = memory.GpuMemory().take_peak()
        assert peak is None
        now = psutil.Process().memory_info().rss / 2**20
        assert 0.9 * now < reported["host_memory_peak_mb"] < 100 * now

    def test_a_profile_on_a_gpu_has_each_phase_and_every_allocation(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        peaks, calls = count(1), []
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks) << 20)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"pickled"))
        config = TrainingConfig(base_model="tiny", extra={"memory_profile": True, "memory_profile_entries": 2000})
        silent: Any = type("Silent", (), {"message": lambda self, line: None})()
        run = TrainingContext(
            make_spec(tmp_path),
            config,
            set(),
            DeviceCapabilities(kind="cuda"),
            silent,
            silent,
            silent,
        )
        memory.record_allocations(run)  # before the model is loaded
        profiler = memory.MemoryProfiler(run, memory.GpuMemory())
        state, nothing = TrainerState(global_step=1), None
        profiler.on_train_begin()
        profiler.on_step_begin()
        profiler.on_pre_optimizer_step()
        profiler.on_step_end(nothing, state, TrainerControl())  # type: ignore[arg-type]
        profiler.on_train_end()
        (output := tmp_path / "output").mkdir()
        memory.write_profile(run, output)
        (step,) = json.loads((output / "memory_profile.json").read_text())["steps"]
        assert (step["forward_backward"]["peak_mb"], step["optimizer"]["peak_mb"]) == (2.0, 3.0)
        assert (output / "memory_snapshot.pickle").read_bytes() == b"pickled"
        assert calls == [{"max_entries": 2000}, {"enabled": None}]


class TestHistory:
    @pytest.mark.parametrize("saved", [1, 19, 20, 21, 40])
    def test_the_first_records_are_kept_and_a_resumed_run_keeps_the_same(
        self, saved: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setitem(MOST_RECORDS, MEMORY, 20)
        lines: list[str] = []
        report: Any = type("Report", (), {"message": lambda self, line: lines.append(line)})()
        config, machine = TrainingConfig(base_model="tiny"), DeviceCapabilities(kind="cpu")
        whole, resumed = (
            TrainingContext(make_spec(tmp_path / name), config, set(), machine, report, report, report)
            for name in ("whole", "resumed")
        )
        for name in ("whole", "resumed", "checkpoint"):
            (tmp_path / name).mkdir()
        whole.memory.start_from(None)
        for step in range(1, 50):
            whole.append_profile(whole.memory, {"step": step})
            if step == saved:
                whole.memory.copy_to(tmp_path / "checkpoint")
        assert [record["step"] for record in whole.memory.records()] == list(range(1, 21))
        assert lines == ["`memory_profile.jsonl` is full after step 20; later steps are left out."]
        resumed.memory.append_record({"step": 1000})  # of an attempt that was lost
        resumed.memory.start_from(tmp_path / "checkpoint")
        for step in range(saved + 1, 50):
            resumed.append_profile(resumed.memory, {"step": step})
        assert resumed.memory.records() == whole.memory.records()
        assert len(lines) == (2 if saved < 20 else 1)

    def test_metrics_have_no_bound(self, tmp_path: Path) -> None:
        history = History(tmp_path)
        history.start_from(None)
        for step in range(2000):
            history.append_record({"step": step})
        assert len(history.records()) == 2000 and not history.is_full


class TestDistributions:
    def test_histogram_of_parts_equals_that_of_all_numbers(self) -> None:
        histogram = Histogram()
        numbers = torch.tensor([0.0, 1.0, -1.5, 2.0**-40, 1e9, -1e9, 0.5], dtype=torch.bfloat16)
        histogram.add_tensor(numbers[:3])
        histogram.add_tensor(numbers[3:])
        reported = histogram.summary()
        exact = numbers.double()
        assert (reported["count"], reported["min"], reported["max"]) == (7, float(exact.min()), float(exact.max()))
        assert reported["mean"] == pytest.approx(float(exact.mean()))
        assert reported["std"] == pytest.approx(float(exact.std(correction=0)))
        ends = [*EDGES[1:], float("inf")]
        for low, high, held in zip(EDGES, ends, reported["bins"], strict=True):
            assert held == int(((exact >= low) & (exact < high)).sum())

    @pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
    def test_numbers_that_are_not_finite_are_null_in_valid_json(self, odd: float) -> None:
        for numbers in ([1.0, odd, 2.0], [odd]):
            histogram = Histogram()
            histogram.add_tensor(torch.tensor(numbers))
            reported = json.loads(json.dumps(histogram.summary(), allow_nan=False))
            assert reported["mean"] is None and reported["std"] is None
            assert reported["count"] == len(numbers)

    @pytest.mark.parametrize(
        "method", [one if one == "qlora" else pytest.param(one, marks=pytest.mark.full) for one in METHODS]
    )
    def test_a_run_with_everything_reported_is_the_same_to_the_last_bit_and_resumes_with_it(
        self, method: str, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = METHODS[method] | COMMON
        reported = config | {"extra": {"distributions_steps": 1, "memory_profile": True}}
        plain = completed(forks.run(make_job(tmp_path / "1", tiny_model, chats, **config)))
        watched = completed(forks.run(make_job(tmp_path / "2", tiny_model, chats, **reported)))
        assert watched.steps == plain.steps
        assert not (plain.output / "distributions.jsonl").exists()
        assert not (plain.output / "memory_profile.json").exists()
        messages = " ".join(record["line"] for record in watched.of("message"))
        assert "`distributions.jsonl`" in messages and "`memory_profile.json`" in messages

        whole = lines(watched.output / "distributions.jsonl")
        assert [line["step"] for line in whole] == [1, 2, 3, 4]
        events = [{name: one[name] for name in ("step", "edges", "groups")} for one in watched.of("distribution")]
        assert events == whole
        trained = watched.of("config")[0]["facts"]["parameters_trainable"]
        for line in whole:
            groups = line["groups"].values()
            assert sum(group["weights"]["count"] for group in groups) == trained
            assert all(sum(of["bins"]) == of["count"] for group in groups for of in group.values())
            assert any(group["gradients"]["std"] > 0 for group in groups)
        assert not any(part.isdigit() for name in whole[0]["groups"] for part in name.split("."))

        resumed = {"attempt": 2, "attempt_dir": str(tmp_path / "2" / "a2"), "resume_from": watched.checkpoint(2)}
        (tmp_path / "2" / "a2").mkdir()
        again = completed(forks.run(watched.job | resumed))
        assert lines(again.output / "distributions.jsonl") == whole
        profile = json.loads((again.output / "memory_profile.json").read_text())
        assert [(one["step"], one["attempt"]) for one in profile["steps"]] == [(1, 1), (2, 1), (3, 2), (4, 2)]
        assert all(one["optimizer"]["rss_mb"] > 10 for one in profile["steps"])
