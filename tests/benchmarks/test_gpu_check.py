"""`make gpu-check`: its runner and its tables, and on a CPU the whole check with a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anneal.contracts.training_config.fields import TrainingConfig
from app.estimator import architecture
from app.estimator.activations import Precision
from app.estimator.forward_pass import Batch
from app.estimator.memory import estimate_memory
from benchmarks.gpu_check import markdown, publish
from benchmarks.gpu_check.jobs import Job, Run, estimated_peak_mb
from benchmarks.gpu_check.models import QWEN3_8B
from benchmarks.gpu_check.processes import Ended
from benchmarks.gpu_check.report import Report, Row
from benchmarks.gpu_check.runner import CPU_FACTOR, SECONDS, STAGES, Runner, Stage
from benchmarks.gpu_check.stages import parity, profile
from benchmarks.gpu_check.stages.throughput import ANNEAL, TRL, Cell, row_name
from tests.nodes import ROOT
from tests.worker.training.tiny import Outcome

LONG, MIX = Cell("qlora", "long", 0.05), Cell("qlora", "mix", 0.05)


def example(name: str, seconds: float = 30.0) -> Stage:
    return Stage(name, seconds, 0.0, f"tests.benchmarks.example_stages.{name}")


def gpu_report(**values: float) -> Report:
    """Return the report of an H100 with these speeds, by the names of the rows."""
    rows = [
        Row("throughput", name, values={"tokens_per_second": value, "step_seconds": 1.0})
        for name, value in values.items()
    ]
    stages = {"throughput": 200.0}
    return Report("2026-12-01T10:00:00+00:00", "abc", "NVIDIA H100 80GB HBM3", "cuda", False, "gpu-check", stages, rows)


@pytest.mark.parametrize("norms", ["liger-kernel 0.8.5", "transformers (liger-kernel does not have qwen3)"])
def test_estimate_of_a_run_counts_the_kernels_and_layers_that_the_run_reports(tmp_path: Path, norms: str) -> None:
    described = {"model_type": "qwen3", **QWEN3_8B}
    (tmp_path / "config.json").write_text(json.dumps(described))
    config = TrainingConfig.model_validate({"base_model": "any", "method": "qlora", "attn_implementation": "varlen"})
    plan = {"recomputed_layers": 10, "layers": 36}
    records = [
        {"type": "config", "effective": config.model_dump(mode="json"), "facts": {"kernels": {"norms": norms}}},
        {"type": "config", "effective": config.model_dump(mode="json"), "facts": {"step_plan": plan}},
    ]
    spec: dict[str, Any] = {"base_model": {"path": str(tmp_path)}, "device": {"kind": "cuda"}}
    run = Run(Job("any", spec), Ended(0, 1.0), Outcome(0, records, spec))
    precision = Precision.for_device(config, "cuda", has_liger=norms == "liger-kernel 0.8.5")
    model, batch = architecture.read_architecture(described), Batch(1, 4 * 4096, texts=4, positions_each=True)
    expected = estimate_memory(model, config, precision, batch, 10, "varlen").tensors
    assert estimated_peak_mb(run, 4096) == round(expected / 2**20, 1)


class TestRunner:
    def test_each_stage_has_a_result_although_others_hang_crash_or_fail(self, tmp_path: Path) -> None:
        last = Stage("last", 30, 0.0, example("records").path)
        stages = [example("records"), example("hangs", 2 / CPU_FACTOR), example("crashes"), example("raises"), last]
        report = Runner(tmp_path, SECONDS, tiny=True, preloaded=()).run(stages)
        rows = [(row.stage, row.name, row.status) for row in Report.load(tmp_path / "gpu-check.json").rows]
        assert rows == [
            ("records", "part", "ok"), ("hangs", "before", "ok"), ("hangs", "stage", "timeout"),
            ("crashes", "stage", "failed"), ("raises", "stage", "failed"), ("last", "part", "ok"),
        ]  # fmt: skip
        assert "time limit of 2 s" in report.of_stage("hangs")[1].text
        assert "no such kernel" in report.of_stage("raises")[0].text
        assert not Path(f"/proc/{report.value('hangs', 'before', 'program')}").exists(), (
            "what a stage started ends with it"
        )
        assert {path.name for path in tmp_path.iterdir()} == {"gpu-check.json", "gpu-check.md", "gpu-check.log"}
        assert "no such kernel" in (tmp_path / "gpu-check.log").read_text()

    def test_stages_beyond_the_time_limit_of_the_check_are_skipped(self, tmp_path: Path) -> None:
        report = Runner(tmp_path, 0.0, tiny=True, preloaded=()).run([example("records")])
        assert [(row.name, row.status) for row in report.rows] == [("stage", "skipped")]

    def test_time_limits_of_both_halves_fit_into_their_calls(self) -> None:
        names = [stage.name for stage in STAGES]
        reserved = {stage.name: stage.reserved for stage in STAGES}
        first, second = names[: names.index("throughput")], names[names.index("throughput") :]
        assert sum(reserved[name] for name in first) <= 240
        assert sum(reserved[name] for name in second) <= 420
        assert sum(reserved.values()) <= SECONDS <= 480

    def test_neither_runner_nor_stages_import_torch_or_pytest(self) -> None:
        """A stage that had a CUDA context could not fork processes that use the GPU."""
        names = [*(stage.path for stage in STAGES), "benchmarks.gpu_check.runner", "benchmarks.gpu_check.stage"]
        check = (
            f"import sys, {', '.join(names)}; print(sorted({{'torch', 'transformers', 'pytest'}} & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.strip() == "[]"


class TestTables:
    def test_goals_are_measured_from_the_rows_of_one_report(self) -> None:
        report = gpu_report(
            **{row_name(LONG, ANNEAL): 12_500.0, row_name(LONG, TRL): 10_000.0, row_name(MIX, ANNEAL): 9000.0,
               row_name(MIX, TRL): 3000.0}
        )  # fmt: skip
        report.rows += [Row("parity", name, values={"largest_difference": 2e-4}) for name in parity.RUNS]
        lines = markdown.goals_table(report).splitlines()
        assert "| QLoRA, 4×4096, dropout 0.05: tokens/s | ≥ 12,000 | 12,500 | yes |" in lines
        assert "| QLoRA, 4×4096: tokens/s, as a multiple of TRL's | ≥ 1.40 | 1.25 | no |" in lines
        assert "| QLoRA, mix packed: tokens/s, as a multiple of padded TRL's | ≥ 2.50 | 3.00 | yes |" in lines
        assert "| Losses of ten steps: largest difference from TRL's | ≤ 1.0e-03 | 2.0e-04 | yes |" in lines
        assert "| LoRA, 4×4096, dropout 0: tokens/s | ≥ 14,000 | not measured |  |" in lines

    def test_failed_comparisons_reach_no_goal(self) -> None:
        report = gpu_report()
        report.rows += [Row("parity", name, values={"largest_difference": 0.0}) for name in list(parity.RUNS)[:-1]]
        report.rows.append(Row("parity", "dpo", "failed", "no losses"))
        assert (
            "| Losses of ten steps: largest difference from TRL's | ≤ 1.0e-03 | not measured |  |"
            in markdown.goals_table(report)
        )

    def test_speeds_of_a_tiny_model_reach_no_goal(self) -> None:
        report = gpu_report(**{row_name(LONG, ANNEAL): 99_000.0})
        report.tiny = True
        assert "99,000" not in markdown.goals_table(report)

    def test_skipped_and_failed_parts_keep_their_reason(self) -> None:
        report = gpu_report(**{row_name(LONG, ANNEAL): 12_500.0})
        report.rows += [
            Row("throughput", "b", "skipped", "flash-attn | missing"),
            Row("device", "c", "failed", "no\ncompiler"),
        ]
        report.stages["device"] = 1.0
        page = markdown.page_part(report)
        assert "| b | skipped | flash-attn \\| missing |" in page
        assert "| c | failed | no compiler |" in page
        assert "12,500" in page and "NVIDIA H100 80GB HBM3, 2026-12-01" in page

    def test_kernels_are_grouped_by_name(self) -> None:
        expected = {
            "nvjet_tst_192x192": "matrix products", "flash_fwd_kernel": "attention",
            "kDequantizeBlockwise<bf16>": "dequantize", "_swiglu_forward_kernel": "norm, rope, SwiGLU",
            "vectorized_elementwise_kernel": "elementwise and other",
        }  # fmt: skip
        assert {name: profile.group_of(name) for name in expected} == expected


class TestPublishing:
    def test_page_of_the_documentation_shows_the_newest_stored_result(self) -> None:
        text = publish.PAGE.read_text()
        assert text == publish.page_with(text, publish.newest_report()), "run `python -m benchmarks.gpu_check.publish`"

    def test_parts_of_a_check_are_stored_as_one(self, tmp_path: Path) -> None:
        first, second = gpu_report(**{row_name(LONG, ANNEAL): 1.0}), gpu_report()
        first.stages, first.rows = {"facts": 1.0}, [Row("facts", "machine")]
        path = publish.store(first.merged_with(gpu_report(**{row_name(LONG, ANNEAL): 2.0})), tmp_path)
        assert path.name == "gpu-check-2026-12-01-nvidia-h100-80gb-hbm3.json"
        stored = publish.newest_report(tmp_path)
        assert stored is not None and list(stored.stages) == ["facts", "throughput"]
        assert stored.value("throughput", row_name(LONG, ANNEAL), "tokens_per_second") == 2.0
        second.commit = "def"
        with pytest.raises(ValueError, match="different commits"):
            first.merged_with(second)

    def test_result_of_a_cpu_is_not_stored(self, tmp_path: Path) -> None:
        report = gpu_report()
        report.kind = "cpu"
        with pytest.raises(ValueError, match="CPU"):
            publish.store(report, tmp_path)
        assert publish.newest_report(tmp_path) is None
        assert markdown.NOT_RUN in markdown.page_part(None)


@pytest.mark.full
class TestOnThisMachine:
    @pytest.mark.timeout(1500)
    def test_every_stage_measures_something(self, tmp_path: Path) -> None:
        report = self.run(tmp_path, *(stage.name for stage in STAGES if stage.name != "demo"))
        assert [(row.stage, row.name, row.text) for row in report.rows if row.status in ("failed", "timeout")] == []
        measured = {row.stage for row in report.rows if row.status == "ok"}
        assert measured >= {stage.name for stage in STAGES} - {"memory", "demo"}
        if report.kind == "cpu":
            assert [(row.status, row.text) for row in report.of_stage("memory")] == [("skipped", "needs a GPU")]
        assert len(report.of_stage("methods")) == 10
        assert {row.name for row in report.of_stage("parity")} == {"qlora", "lora", "packed", "dpo"}
        for participant in (ANNEAL, TRL):
            assert report.value("throughput", row_name(LONG, participant), "tokens_per_second") > 0
        assert report.value("profile", "matrix products", "milliseconds") > 0

    @pytest.mark.timeout(1500)
    def test_demo_runs_through_the_whole_service(self, tmp_path: Path) -> None:
        report = self.run(tmp_path, "demo")
        assert report.value("demo", "demo", "loss_after") < report.value("demo", "demo", "loss_before"), report.rows

    def run(self, folder: Path, *stages: str) -> Report:
        """Run the check as users do, without time limits that a busy machine would exceed."""
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--output", str(folder), "--tiny", "--seconds", "1400"]
        done = subprocess.run(
            [*command, *stages], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return Report.load(folder / "gpu-check.json")
