"""`runs create -f`: what people write is what they mean, and what cannot be meant is refused by name."""

from pathlib import Path

import pytest

from tests.conftest import Anneal, json_of


class TestRunFile:
    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("config:\n  lora_r: 1\n  lora_r: 2\n", "the key 'lora_r' is repeated in line 3"),
            ("a: 1\na: 2\n", "the key 'a' is repeated in line 2"),
            ("config: [\n", "in line 2"),
            ("- 1\n", "it is not a mapping"),
            ("", "it is not a mapping"),
            ("config: {learning_rate: !!float .inf}\n", "JSON cannot represent"),
        ],
    )
    def test_a_file_that_cannot_be_meant_is_refused(self, anneal: Anneal, text: str, sentence: str) -> None:
        Path("bad.yaml").write_text(text)
        assert sentence in anneal("runs", "create", "-f", "bad.yaml", code=1).stderr

    @pytest.mark.parametrize("value", ["!!int x", "!!float x", "!!timestamp x", "!!binary ="])
    def test_a_tag_that_does_not_fit_is_reported(self, anneal: Anneal, run_file: Path, value: str) -> None:
        done = anneal("runs", "create", "-f", str(run_file), "--set", f"name={value}", code=2)
        assert "is invalid" in done.stderr and "Traceback" not in done.stderr
        assert "double quotes" in " ".join(done.stderr.split())

    def test_a_duplicate_key_of_json_is_refused_by_name(self, anneal: Anneal) -> None:
        Path("bad.json").write_text('{"dataset_id": "a", "dataset_id": "b"}')
        assert "the key 'dataset_id' occurs twice" in anneal("runs", "create", "-f", "bad.json", code=1).stderr

    def test_values_are_what_people_mean(self, anneal: Anneal, run_file: Path) -> None:
        changes = ["--set", "config.epochs=2", "--set", "config.extra.steps=7", "--set", "name=null"]
        changes += ["--set", "config.save_steps=1_000", "--set", "config.eval_steps=1e4"]
        changes += ["--set", "config.time_limit_seconds=2h", "--set", "config.eval_split=0.5"]
        run = json_of(anneal("runs", "create", "-f", "-", *changes, "--json", input=run_file.read_text()))
        assert run["tags"] == ["2026-01-02", "no"]
        assert (run["config"]["learning_rate"], run["config"]["epochs"]) == (1e-4, 2)
        limits = ("save_steps", "eval_steps", "time_limit_seconds")
        assert [run["config"][name] for name in limits] == [1000, 10_000, 7200]
        assert run["config"]["extra"] == {"steps": 7} and run["name"] == "sft of any"
        assert json_of(anneal("runs", "validate", "-f", str(run_file), "--json"))["valid"] is True

    def test_the_number_of_devices_may_be_all(self, anneal: Anneal, run_file: Path) -> None:
        """No worker is online here, so the number is not known."""
        done = anneal("runs", "create", "-f", str(run_file), "--set", "resources.devices=all", code=1)
        assert "cannot be `all`, because their number is not known." in " ".join(done.stderr.split())

    def test_a_merge_may_bring_a_key_again(self, anneal: Anneal, run_file: Path) -> None:
        text = "x: &x {lora_r: 4, epochs: 1}\ny: &y {<<: *x, lora_r: 8}\nconfig: {<<: *y, epochs: 5}\n"
        Path("merged.yaml").write_text(text)
        from app.cli.runs.run_file import read_body

        assert read_body(Path("merged.yaml"))["config"] == {"lora_r": 8, "epochs": 5}

    @pytest.mark.parametrize("change", ["config", "config.=1", "name.first=1", "config.a=[1"])
    def test_a_change_that_cannot_be_meant_is_refused(self, anneal: Anneal, run_file: Path, change: str) -> None:
        assert f"--set {change}" in anneal("runs", "create", "-f", str(run_file), "--set", change, code=2).stderr
