"""A worker offers what its machine has."""

from pathlib import Path

import pytest

from app.config import Settings
from worker.presence.registration import find_gguf_programs


@pytest.fixture
def converter(tmp_path: Path) -> Path:
    path = tmp_path / "llama.cpp" / "convert_hf_to_gguf.py"
    path.parent.mkdir()
    path.touch()
    return path


def quantizer(path: Path, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    path.chmod(mode)
    return path


class TestGgufPrograms:
    def test_without_a_setting_there_are_none(self, tmp_path: Path) -> None:
        assert find_gguf_programs(Settings(home=tmp_path)) == {"gguf": False, "gguf_quantizer": False}

    def test_a_quantizer_that_is_built_beside_the_converter_is_found(self, tmp_path: Path, converter: Path) -> None:
        quantizer(converter.parent / "build" / "bin" / "llama-quantize")
        settings = Settings(home=tmp_path, gguf_converter=converter)
        assert find_gguf_programs(settings) == {"gguf": True, "gguf_quantizer": True}

    def test_a_quantizer_may_be_elsewhere(self, tmp_path: Path, converter: Path) -> None:
        settings = Settings(home=tmp_path, gguf_converter=converter, gguf_quantizer=quantizer(tmp_path / "quantize"))
        assert find_gguf_programs(settings) == {"gguf": True, "gguf_quantizer": True}

    def test_a_quantizer_that_cannot_be_executed_leaves_the_other_types_and_the_log_says_what_to_do(
        self, tmp_path: Path, converter: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "quantize"
        settings = Settings(home=tmp_path, gguf_converter=converter, gguf_quantizer=file)
        assert find_gguf_programs(settings) == {"gguf": True, "gguf_quantizer": False}
        quantizer(file, mode=0o644)
        assert find_gguf_programs(settings) == {"gguf": True, "gguf_quantizer": False}
        assert f"{file} is no program" in caplog.text and "--target llama-quantize" in caplog.text

    def test_a_quantizer_without_a_converter_writes_nothing(self, tmp_path: Path, converter: Path) -> None:
        file = quantizer(converter.parent / "build" / "bin" / "llama-quantize")
        converter.unlink()
        settings = Settings(home=tmp_path, gguf_converter=converter, gguf_quantizer=file)
        assert find_gguf_programs(settings) == {"gguf": False, "gguf_quantizer": False}
