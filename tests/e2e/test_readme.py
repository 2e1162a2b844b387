"""Commands in the README and the quickstart run as printed."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.e2e.conftest import TrainingStack
from tests.nodes import ROOT
from tests.worker.training.tiny import make_tiny_model

README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()
_BLOCK = re.compile(r"(<!-- tested -->\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PATIENCE_SECONDS = 600
_NOT_RUN = re.compile(r"make (up|demo)|export ANNEAL_URL=|cp \.env\.example|docker compose ")
"""Commands that start the service itself; other tests run them."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def stack(stack: TrainingStack) -> Iterator[TrainingStack]:
    """The stack of all tests, without the webhooks that the lines create."""
    yield stack
    for webhook in stack.client.get("/v1/webhooks").json()["data"]:
        stack.client.delete(f"/v1/webhooks/{webhook['id']}").raise_for_status()


def _script(text: str) -> str:
    """Return the tested blocks as one bash program; `anneal` is the command line of this tree."""
    return "\n".join([f'anneal() {{ {programs.shell_command("app.cli.main")} "$@"; }}', *_blocks(text)])


def _blocks(text: str) -> list[str]:
    """Return the tested blocks as lines for a shell."""
    python = f"PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)}"
    return [
        f"{python} - <<'PYTHON'\n{code}PYTHON\n" if language == "python" else code
        for is_tested, language, code in _BLOCK.findall(text)
        if is_tested
    ]


def _paste(blocks: list[str], stack: TrainingStack, folder: Path) -> list[str]:
    """Paste blocks one after the other into an interactive shell; return what the shell shows of each."""
    mark = "----- end of block -----"
    program = "\n".join(f"{block}\necho '{mark}'" for block in [_script(""), "PS1= PS2=", *blocks])
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "--noediting", "-i"], input=program + "\n", cwd=folder, text=True,
        timeout=_PATIENCE_SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={
            **os.environ, "ANNEAL_URL": stack.api.url, "ANNEAL_API_KEY": stack.api.key,
            "ANNEAL_MODELS_ROOT": str(stack.settings.models_folder), "ANNEAL_HOME": str(stack.settings.home),
        },
    )  # fmt: skip
    return done.stdout.split(mark)[2:]


def _bash(text: str, stack: TrainingStack, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-eu", "-c", _script(text)],
        env={**os.environ, "ANNEAL_URL": stack.api.url, "ANNEAL_API_KEY": stack.api.key},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_SECONDS,
    )


def _run(text: str, stack: TrainingStack, folder: Path) -> str:
    # A folder below the models root takes precedence over the hub, so this name needs no network here.
    model = stack.settings.models_folder / "Qwen/Qwen3-0.6B"
    if not model.exists():
        make_tiny_model(model)
    done = _bash(text, stack, folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_readme_runs(stack: TrainingStack, tmp_path: Path) -> None:
    output = _run(README, stack, tmp_path)
    assert re.findall(r'"status" ?: ?"(cancelled|completed)"', output)[:1] == ["cancelled"]
    assert re.search(r"^completed$", output, re.MULTILINE), "what the Python program prints"
    for folder in (next(tmp_path.glob("run_*")), tmp_path / "my-adapter", tmp_path / "my-lora"):
        assert (folder / "adapter_model.safetensors").stat().st_size > 1000
    assert re.search(r'"finish_reason" ?: ?"(stop|length)"', output), "the answer"
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 40
    assert [hook["name"] for hook in stack.client.get("/v1/webhooks").json()["data"]] == ["hooks.example.com"]


def test_what_starts_a_run_can_be_pasted_twice_and_shows_an_error_of_the_service(
    stack: TrainingStack, tmp_path: Path
) -> None:
    start = README[: README.index("Watch it, stop it")]
    stop = '```bash\napi --json \'{"mode": "discard"}\' "$ANNEAL_URL/v1/runs/$RUN/stop" | field id\n```\n'
    twice = (start + "<!-- tested -->\n" + stop) * 2
    assert len(set(re.findall(r"run_\w{26}", _run(twice, stack, tmp_path)))) == 2
    wrong = start.replace('"method"', '"mehtod"') + "<!-- tested -->\n" + stop
    done = _bash(wrong, stack, tmp_path)
    assert done.returncode != 0 and "mehtod" in done.stderr and "Traceback" not in done.stderr


def test_pasted_lines_end_in_a_sentence_without_the_hub_and_work_with_a_model_made_here(
    stack: TrainingStack, tmp_path: Path
) -> None:
    for page in (README, QUICKSTART):
        text = page.replace("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B-Base")  # nowhere below the models root
        blocks = _blocks(text)
        start = next(block for block in blocks if "MODEL=" in block)
        corrected = start.replace("MODEL=Qwen/Qwen3-0.6B-Base", "MODEL=tiny") + "echo id=$RUN\n"
        shown = _paste([*blocks, "anneal models create tiny", corrected], stack, tmp_path)
        for block, output in zip(blocks, shown, strict=False):
            odd = re.search(r"Traceback(?!(.|\n)*AnnealError: )|tar: |curl: |JSONDecode|syntax error", output)
            assert odd is None, output
            if "MODEL=" in block or "import Anneal" in block:
                assert "hub cannot be reached" in output and "anneal models create tiny" in output, output
            if "anneal runs validate" in block:
                assert output.count("hub cannot be reached") >= 2, output
            for name, sentence in (("RUN", "start a run first"), ("CHILD", "resume a run first")):
                lines = [line for line in block.splitlines() if f"${{{name}:?" in line]
                assert not lines or sentence in output, output
        assert re.search(r"id=run_\w{26}", shown[len(blocks) + 1]), shown[-3:]
        run_id = re.findall(r"run_\w{26}", shown[len(blocks) + 1])[-1]
        stack.client.post(f"/v1/runs/{run_id}/stop", json={"mode": "discard"})


@pytest.mark.parametrize("page", [README, QUICKSTART])
def test_line_for_the_first_metric_passes_over_the_cursor_of_a_run_that_starts_slowly(page: str) -> None:
    (filtering,) = re.findall(r"types=metric,error,end\" \| (grep .*)", page)
    stream = (
        'retry: 2000\n\nid: 8\nevent: cursor\ndata: {"seq":8}\n\nid: 9\nevent: metric\ndata: {"seq":9,"loss":2.5}\n\n'
    )
    done = subprocess.run(["bash", "-c", filtering], input=stream, text=True, capture_output=True, check=True)
    assert done.stdout.splitlines() == ["event: metric", 'data: {"seq":9,"loss":2.5}']


@pytest.mark.full
def test_quickstart_runs(stack: TrainingStack, tmp_path: Path) -> None:
    output = _run(QUICKSTART, stack, tmp_path)
    assert '"valid":true' in output
    # The event streams first, then the comparison.
    ends = re.findall(r'"status" ?: ?"(cancelled|completed)"', output)
    assert ends == ["cancelled", "completed"] * 2, output[-3000:]
    (adapter,) = tmp_path.glob("run_*/adapter_model.safetensors")
    assert adapter.stat().st_size > 1000


def test_every_block_is_tested_or_starts_the_service() -> None:
    for text in (README, QUICKSTART):
        for is_tested, _, code in _BLOCK.findall(text):
            lines = [line for line in code.splitlines() if line.strip()]
            assert is_tested or all(_NOT_RUN.match(line) for line in lines), code


@pytest.mark.parametrize(
    "path",
    ["README.md", "docs/quickstart.md", "docs/tutorial.md", "docs/guides/cli.md", "app/web/static/js/pages/runs.js"],
)
def test_wherever_one_starts_the_command_for_a_model_without_the_hub_is_named(path: str) -> None:
    assert "anneal models create tiny" in (ROOT / path).read_text()


def test_readme_is_short_and_has_no_file_tree() -> None:
    assert len(README.split()) <= 1000
    assert not re.search(r"^\s*(app|worker|migrations)/$|[├└]──", README, re.MULTILINE)
    assert len(re.findall(r"\b\w+\.py\b", README)) < 3
