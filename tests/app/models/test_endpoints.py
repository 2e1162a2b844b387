"""Base models on the server, over the API and the command line."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from app.config import Settings
from app.infra.storage import Storage
from app.models.catalog import list_models
from tests.factories import make_dataset, make_model
from tests.server import ApiServer

QWEN = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "head_dim": 128, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "max_position_embeddings": 40960, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def settings(emptied_api: ApiServer) -> Settings:
    return emptied_api.settings


@pytest.fixture
def api(emptied_api: ApiServer) -> ApiServer:
    return emptied_api


def names(settings: Settings) -> list[str]:
    return [model.id for model in list_models(settings, Storage(settings))]


def test_models_are_listed_with_facts_from_their_files(api: ApiServer, anneal: Any) -> None:
    assert "ANNEAL_MODELS_ROOT" in anneal("models", "list").stderr
    folder = make_model(api.settings, "Qwen/Qwen3-0.6B")
    (folder / "config.json").write_text(json.dumps(QWEN))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    make_model(api.settings, "adapter", "adapter_config.json")
    (make_model(api.settings, "broken") / "config.json").write_text("[")
    page = api.client.get("/v1/models").raise_for_status().json()
    qwen, adapter, broken = page["data"]
    assert qwen == {
        "id": "Qwen/Qwen3-0.6B", "is_adapter": False, "architecture": "Qwen3ForCausalLM", "parameters": 596_049_920,
        "dtype": "bfloat16", "bytes": 7, "has_chat_template": True, "max_seq_length": 40960,
    }  # fmt: skip
    assert (adapter["id"], adapter["is_adapter"], adapter["parameters"]) == ("adapter", True, None)
    assert (broken["id"], broken["architecture"], broken["has_chat_template"]) == ("broken", None, False)
    shown = anneal("models", "list")
    assert "Qwen/Qwen3-0.6B" in shown.stdout and "596 M" in shown.stdout


def test_folders_with_letters_of_any_script_are_listed_and_accepted_by_the_same_name(
    api: ApiServer, engine: Engine
) -> None:
    usable = ["modèle-é", "mode\u0300le", "модель/малая", "模型"]
    for name in usable:
        make_model(api.settings, name)
    for name in ("with (brackets)", "line\u2028break", "turned\u202e", os.fsdecode(b"mod\xe8le")):
        make_model(api.settings, name)
    assert {model["id"] for model in api.client.get("/v1/models").json()["data"]} == set(usable)
    for name in usable:
        body = {"dataset_id": make_dataset(engine), "config": {"base_model": name, "method": "lora"}}
        assert api.client.post("/v1/runs/validate", json=body).json()["errors"] == []


def test_the_list_has_exactly_what_base_model_accepts(tmp_path: Path) -> None:
    extra = tmp_path / "shared"
    settings = Settings(
        home=tmp_path / "home", extra_model_roots=str(extra), allowed_models=f"open/*, linked, {extra}/*"
    )
    for name in ("open/a", "closed/b", "deep/er/est/c"):
        make_model(settings, name)
    for folder in (extra / "m", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (settings.models_folder / "linked").symlink_to(extra / "m")
    (settings.models_folder / "open" / "out").symlink_to(tmp_path / "elsewhere")
    (settings.models_folder / "open" / "loop").symlink_to(settings.models_folder)
    os.mkfifo(settings.models_folder / "open" / "fifo")
    assert names(settings) == sorted(["linked", "open/a", f"{extra}/m"])
    assert names(Settings(home=tmp_path / "nowhere")) == []
