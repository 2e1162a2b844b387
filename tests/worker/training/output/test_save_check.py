"""What a checkpoint or the output needs is tried before the first step, and fails there."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.worker.training.output.test_export import QUICK
from tests.worker.training.output.test_gguf import converter, quantizer
from tests.worker.training.tiny import Forks, Outcome, make_job, make_tiny_model

CONTRADICTION = {"eos_token_id": 0, "temperature": 0.6, "top_p": 0.9}
"""A sampling temperature for a model that does not sample."""


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny model, to be changed."""
    return shutil.copytree(tiny_model, tmp_path / "model")


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))


def messages(outcome: Outcome, level: str) -> list[str]:
    return [record["line"] for record in outcome.of("message") if record["level"] == level]


@pytest.fixture
def failed_before_a_step(forks: Forks, model: Path, chats: Path, tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Run a configuration that must fail before its first step; return the code and the sentence."""

    def run(job: dict[str, Any] | None = None, **config: Any) -> tuple[str, str]:
        outcome = forks.run(make_job(tmp_path / "run", model, chats, **QUICK, **config) | (job or {}))
        assert outcome.steps == {} and outcome.of("checkpoint") == []
        assert [path.name for path in outcome.folder.iterdir() if "check" in path.name] == []
        error = outcome.result["error"]
        return error["code"], error["message"]

    return run


class TestGenerationConfiguration:
    @pytest.mark.parametrize(
        "config", [{"method": "full", "save_steps": 2}, {"method": "lora", "output": "merged"}], ids=["full", "merged"]
    )
    def test_contradictory_one_is_saved_as_published_with_a_warning(
        self, config: dict[str, Any], forks: Forks, model: Path, chats: Path, tmp_path: Path
    ) -> None:
        (model / "generation_config.json").write_text(json.dumps(CONTRADICTION))
        outcome = forks.run(make_job(tmp_path / "run", model, chats, **QUICK, **config))
        assert outcome.result["outcome"] == "completed", outcome.result
        saved = json.loads((outcome.output / "generation_config.json").read_text())
        assert CONTRADICTION.items() <= saved.items() and "do_sample" not in saved
        (warning,) = (line for line in messages(outcome, "warning") if "generation_config.json" in line)
        assert "`temperature`" in warning
        AutoModelForCausalLM.from_pretrained(outcome.output)
        assert not (outcome.folder / ".save_check").exists()

    def test_generation_config_that_cannot_be_loaded_fails_before_the_first_step(
        self, model: Path, failed_before_a_step: Callable[..., tuple[str, str]]
    ) -> None:
        edit_json(model / "generation_config.json", max_new_tokens=0)
        code, sentence = failed_before_a_step(method="full")
        assert code == "config_error" and "`max_new_tokens`" in sentence


class TestTokenizer:
    @pytest.mark.parametrize("method", ["full", "lora"])
    def test_chat_template_whose_name_is_no_file_name_fails_before_the_first_step(
        self, method: str, model: Path, failed_before_a_step: Callable[..., tuple[str, str]]
    ) -> None:
        template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        named = [{"name": "default", "template": template}, {"name": "tool/use", "template": template}]
        edit_json(model / "tokenizer_config.json", chat_template=named)
        (model / "chat_template.jinja").unlink(missing_ok=True)
        code, sentence = failed_before_a_step(method=method)
        assert code == "config_error" and "tokenizer cannot be saved" in sentence and "'tool/use'" in sentence


class TestCustomCode:
    @pytest.mark.parametrize("config", [{"method": "full"}, {"method": "lora", "output": "merged"}])
    def test_files_of_it_are_in_the_output(
        self, config: dict[str, Any], forks: Forks, model: Path, chats: Path, tmp_path: Path
    ) -> None:
        (model / "own_sizes.py").write_text("WIDTH = 32\n")
        (model / "own_configuration.py").write_text(
            "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        )
        (model / "own_model.py").write_text(
            "from transformers import LlamaForCausalLM\nfrom .own_configuration import OwnConfig\n"
            "from .own_sizes import WIDTH\nclass OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
        )
        classes = {"AutoConfig": "own_configuration.OwnConfig", "AutoModelForCausalLM": "own_model.OwnModel"}
        edit_json(model / "config.json", model_type="own", architectures=["OwnModel"], auto_map=classes)
        job = make_job(tmp_path / "run", model, chats, **QUICK, **config) | {"trust_remote_code": True}
        outcome = forks.run(job)
        assert outcome.result["outcome"] == "completed", outcome.result
        copied = {path.name for path in outcome.output.glob("*.py")}
        assert copied == {"own_sizes.py", "own_configuration.py", "own_model.py"}


class TestDisk:
    @pytest.mark.parametrize("config", [{"method": "full"}, {"method": "lora", "output": "merged"}])
    def test_too_small_for_checkpoint_and_output_fails_before_the_first_step(
        self, config: dict[str, Any], failed_before_a_step: Callable[..., tuple[str, str]]
    ) -> None:
        code, sentence = failed_before_a_step({"disk_reserve_bytes": 2**60}, **config)
        assert code == "disk_full" and "ANNEAL_DISK_RESERVE_BYTES" in sentence

    def test_room_for_a_quantized_gguf_file_and_the_one_it_is_made_of_is_needed_too(
        self, forks: Forks, chats: Path, tmp_path: Path
    ) -> None:
        base = make_tiny_model(tmp_path / "base", hidden=256, layers=4)  # of 2.8 million weights
        sizes = []
        for number, config in enumerate([{}, {"gguf": "Q4_K_M"}]):
            job = make_job(tmp_path / str(number), base, chats, method="full", **QUICK, **config)
            programs = {"gguf_converter": converter(tmp_path), "gguf_quantizer": quantizer(tmp_path)}
            done = forks.run({**job, **programs, "disk_reserve_bytes": 2**60})
            assert (done.result["error"]["code"], done.steps) == ("disk_full", {})
            (size,) = re.findall(r"needs (\d+) MiB", done.result["error"]["message"])
            sizes.append(int(size))
        assert sizes[1] - sizes[0] in (13, 14), sizes  # 4 bytes and about 1 of each weight
