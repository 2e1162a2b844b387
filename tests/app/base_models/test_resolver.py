"""What a base model's name means, for the API that checks it and for the worker that loads it."""

import subprocess
import sys
from pathlib import Path

import pytest

from app.base_models.resolver import BaseModelError, locate_model
from app.config import Settings
from app.infra.ids import new_id
from app.infra.storage import Storage
from tests.factories import make_model


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


@pytest.fixture
def storage(settings: Settings) -> Storage:
    return Storage(settings)


def code_of(settings: Settings, storage: Storage, name: str, output_attempt: int | None = None) -> str:
    with pytest.raises(BaseModelError) as raised:
        locate_model(settings, storage, name, output_attempt)
    assert raised.value.message.rstrip().endswith((".", "name.")), raised.value.message
    return raised.value.code


class TestLocate:
    def test_folder_below_the_models_root_is_located(self, settings: Settings, storage: Storage) -> None:
        for name, file in (
            ("tiny", "config.json"),
            ("org/adapter", "adapter_config.json"),
            ("my model", "config.json"),
        ):
            folder = make_model(settings, name, file)
            assert locate_model(settings, storage, name, None) == {
                "name": name,
                "path": str(folder),
                "hub": None,
                "revision": None,
            }

    def test_a_folder_wins_over_a_hub_model_of_the_same_name(self, settings: Settings, storage: Storage) -> None:
        assert locate_model(settings, storage, "org/model", None, "v1")["hub"] == "org/model"
        folder = make_model(settings, "org/model")
        assert locate_model(settings, storage, "org/model", None, "v1") == {
            "name": "org/model",
            "path": str(folder),
            "hub": None,
            "revision": None,
        }

    def test_a_hub_name_keeps_its_revision(self, settings: Settings, storage: Storage) -> None:
        assert locate_model(settings, storage, "org/model", None, "v1") == {
            "name": "org/model",
            "path": None,
            "hub": "org/model",
            "revision": "v1",
        }

    def test_the_output_of_a_run(self, settings: Settings, storage: Storage) -> None:
        run_id = new_id("run")
        assert code_of(settings, storage, run_id) == "base_run_without_output"
        assert code_of(settings, storage, run_id, 2) == "model_not_found"
        folder = storage.output_dir(run_id, 2)
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
        assert locate_model(settings, storage, run_id, 2)["path"] == str(folder)

    def test_folder_without_a_model_is_refused(self, settings: Settings, storage: Storage) -> None:
        make_model(settings, "org/empty", "notes.txt")
        assert code_of(settings, storage, "org/empty") == "not_a_model"
        for name in ("nowhere", "a/b/c", "run_short"):
            assert code_of(settings, storage, name) == "model_not_found"

    @pytest.mark.parametrize("name", ["..", "../x", "a/../../x", "/etc", "a//b", "a\0b", "a\\b", "", "./a", "a/."])
    def test_path_outside_the_models_root_is_refused(self, settings: Settings, storage: Storage, name: str) -> None:
        assert code_of(settings, storage, name) == "outside_models_root"

    def test_a_link_out_of_the_models_root_is_refused(
        self, settings: Settings, storage: Storage, tmp_path: Path
    ) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "config.json").write_text("{}")
        settings.models_folder.mkdir(parents=True)
        (settings.models_folder / "link").symlink_to(outside)
        assert code_of(settings, storage, "link") == "outside_models_root"

    def test_an_absolute_path_and_a_link_lead_below_an_extra_root(self, tmp_path: Path, storage: Storage) -> None:
        shared = Settings(home=tmp_path, extra_model_roots=f"{tmp_path}/shared, {tmp_path}/more")
        folder = tmp_path / "shared" / "llama"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        shared.models_folder.mkdir(parents=True)
        (shared.models_folder / "link").symlink_to(folder)
        (shared.models_folder / "org").symlink_to(tmp_path / "shared")
        for name, shown in ((str(folder), "llama"), ("llama", "llama"), ("link", "link"), ("org/llama", "org/llama")):
            located = locate_model(shared, storage, name, None)
            assert (located["name"], located["path"], located["hub"]) == (shown, str(folder), None)
        own = make_model(shared, "tiny")
        assert locate_model(shared, storage, str(own), None)["path"] == str(own)

    def test_links_and_paths_leave_no_root(self, tmp_path: Path, storage: Storage) -> None:
        shared = Settings(home=tmp_path, extra_model_roots=str(tmp_path / "shared"))
        for name in ("shared/m", "shared-not/m", "elsewhere/m"):
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "config.json").write_text("{}")
        shared.models_folder.mkdir(parents=True)
        (tmp_path / "shared" / "out").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "shared" / "loop").symlink_to("loop")
        (shared.models_folder / "chain").symlink_to(tmp_path / "shared" / "out" / "m")
        (shared.models_folder / "above").symlink_to(tmp_path)
        root = f"{tmp_path}/shared"
        for name in (
            f"{tmp_path}/elsewhere/m", f"{tmp_path}/shared-not/m", f"{root}/../elsewhere/m", f"{root}/out/m", root,
            f"{root}/", "chain", "above/elsewhere/m", "above", "/etc/passwd",
        ):  # fmt: skip
            assert code_of(shared, storage, name) == "outside_models_root", name
        with pytest.raises(BaseModelError):
            locate_model(shared, storage, f"{root}/loop", None)

    @pytest.mark.parametrize("roots", ["relative", "/", "{home}/storage", "{home}/storage/runs", "{home}"])
    def test_an_extra_root_is_absolute_and_apart_from_the_storage(self, tmp_path: Path, roots: str) -> None:
        with pytest.raises(ValueError, match=r"extra_model_roots|EXTRA_MODEL_ROOTS"):
            Settings(home=tmp_path, extra_model_roots=roots.format(home=tmp_path))

    def test_hub_model_is_refused_if_the_hub_is_not_allowed(self, tmp_path: Path, storage: Storage) -> None:
        closed = Settings(home=tmp_path, allow_hub=False)
        assert code_of(closed, storage, "org/model") == "hub_not_allowed"
        folder = make_model(closed, "org/model")
        assert locate_model(closed, storage, "org/model", None)["path"] == str(folder)

    def test_the_worker_needs_no_web_framework_for_it(self) -> None:
        check = "import sys, app.base_models.resolver; sys.exit('fastapi' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


class TestAllowed:
    """ANNEAL_ALLOWED_MODELS: the operator's list of names."""

    @pytest.mark.parametrize(
        ("patterns", "name", "allowed"),
        [
            ("", "any/model", True), (" , ", "any/model", True), ("tiny", "tiny", True), ("tiny", "tiny2", False),
            ("qwen-*, meta/*", "meta/llama", True), ("qwen-*, meta/*", "meta-evil/llama", False),
            ("meta/*", "META/llama", False), ("meta/llama-?b", "meta/llama-8b", True), ("*", "any/model", True),
            ("meta/llama-[78]b", "meta/llama-9b", False), ("meta", "meta/llama", False), ("meta/*", "tiny", False),
        ],
    )  # fmt: skip
    def test_a_name_is_held_against_the_patterns(
        self, settings: Settings, storage: Storage, patterns: str, name: str, allowed: bool
    ) -> None:
        make_model(settings, "tiny")
        limited = settings.model_copy(update={"allowed_models": patterns})
        if allowed:
            assert locate_model(limited, storage, name, None)["name"] == name
        else:
            assert code_of(limited, storage, name) == "model_not_allowed"

    def test_what_is_outside_the_models_root_stays_so(self, settings: Settings, storage: Storage) -> None:
        limited = settings.model_copy(update={"allowed_models": "*"})
        assert code_of(limited, storage, "../x") == "outside_models_root"

    def test_the_output_of_a_run_was_asked_for_when_that_run_was_made(
        self, settings: Settings, storage: Storage
    ) -> None:
        run_id = new_id("run")
        folder = storage.output_dir(run_id, 1)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        limited = settings.model_copy(update={"allowed_models": "meta/*"})
        assert locate_model(limited, storage, run_id, 1)["path"] == str(folder)
