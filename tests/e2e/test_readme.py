"""The README tells the truth: its curl lines run as printed, its tree names every file."""

import os
import re
import subprocess
from pathlib import Path

from tests.e2e.conftest import TrainingStack
from tests.worker.training.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_curl_lines_run_as_printed(stack: TrainingStack, tmp_path: Path) -> None:
    blocks = re.findall(r"<!-- tested -->\n```bash\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 5
    # A folder below the models root goes before the hub; so the name in the README needs no network here.
    make_tiny_model(stack.settings.models_folder / "Qwen" / "Qwen3-0.6B", hidden=64)
    done = subprocess.run(
        ["bash", "-eu", "-c", "\n".join(blocks)],
        env={**os.environ, "ANNEAL_URL": stack.api.url, "ANNEAL_API_KEY": stack.api.key},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert '"valid":true' in done.stdout
    ends = re.findall(r'"status" ?: ?"(cancelled|completed)"', done.stdout)
    # As the streams tell, and as the comparison does.
    assert ends == ["cancelled", "completed"] * 2, done.stdout[-3000:]
    (adapter,) = tmp_path.glob("run_*/adapter_model.safetensors")
    assert adapter.stat().st_size > 1000


def test_the_tree_names_every_file_of_the_code() -> None:
    tree = README[README.index("## The code") :]
    missing = [
        str(path.relative_to(ROOT))
        for folder in ("app", "worker", "migrations", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py" and path.name not in tree
    ]
    assert not missing, f"add a line with a caption for {missing} to the README's tree"


def test_the_transcript_is_a_real_one() -> None:
    transcript = README.split("<!-- transcript -->")[1].split("```")[1]
    assert "$ make demo" in transcript and "stopped with a checkpoint" in transcript and "held-out" in transcript


def test_every_setting_is_in_the_readme() -> None:
    from app.config import ClientSettings, Settings

    names = {*Settings.model_fields, *ClientSettings.model_fields}
    missing = [name for name in names if f"ANNEAL_{name.upper()}" not in README]
    assert not missing
