"""`anneal models create`: a small model with random weights, made without the hub."""

import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from typer.testing import CliRunner, Result

from app.base_models import tiny_model
from app.cli.main import cli
from app.config import get_settings


def create(home: Path, name: str) -> Result:
    get_settings.cache_clear()  # a process reads the environment once
    result = CliRunner().invoke(cli, ["models", "create", name], env={"ANNEAL_HOME": str(home)})
    get_settings.cache_clear()
    return result


def test_model_is_written_whole_and_only_once(tmp_path: Path) -> None:
    created = create(tmp_path, "mine/tiny")
    assert (created.exit_code, created.stdout) == (0, "mine/tiny\n") and "base_model: mine/tiny" in created.stderr
    folder = tmp_path / "models" / "mine" / "tiny"
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    assert weights["lm_head.weight"].shape == weights["model.embed_tokens.weight"].shape == (vocabulary, hidden)
    assert 0.019 < float(weights["lm_head.weight"].std()) < 0.021 and numpy.all(weights["model.norm.weight"] == 1)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocabulary
    text = "def count(to): return 'größer 日本'"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text and len(tokenizer.encode(text).ids) < len(text)
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"], "nothing unfinished is left"
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "a trainer with a user of its own reads all"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    again = create(tmp_path, "mine/tiny")
    assert (again.exit_code, again.stdout) == (0, "mine/tiny\n") and "There is a folder" in again.stderr
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize("name", ["../tiny", "/tmp/tiny", ".tiny", "a//b", ""])
def test_name_that_no_run_can_use_is_refused(tmp_path: Path, name: str) -> None:
    refused = create(tmp_path, name)
    assert refused.exit_code == 1 and refused.stderr.startswith("anneal: ") and not (tmp_path / "models").exists()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer trained on a few texts."""
    return tiny_model.train_tokenizer(["def f(x):", "    return x"] * 20, 300)


@pytest.mark.parametrize("text", ["def f(x):\n    return x", "  zwei  Leerzeichen\t", "Grüße, 世界 🌍", ""])
def test_the_tokenizer_writes_any_text_and_reads_it_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_model_folder_loads_with_its_template_marks_and_has_no_weights(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoTokenizer

    tiny_model.write_model(tmp_path, tokenizer)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "x = 1"}, {"role": "assistant", "content": "Set x."}]
    encoded = loaded.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)

    learnt = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert loaded.decode(learnt) == "Set x.<|end|>"
    assert loaded.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True).endswith(
        "<|assistant|>"
    )
    assert AutoConfig.from_pretrained(tmp_path).vocab_size == tokenizer.get_vocab_size()
    assert not list(tmp_path.glob("*.safetensors"))
