"""A service that is backed up in the middle of a run and restored elsewhere continues the run as if undisturbed."""

import json
import shutil
import subprocess
from pathlib import Path

from app.config import Settings
from tests import programs
from tests.e2e.conftest import STEPS, TrainingStack


def anneal(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = programs.anneal(*arguments, **settings.child_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_run_in_training_is_backed_up_and_continues_in_the_restored_service_with_the_same_losses(
    stack: TrainingStack, undisturbed: str, tmp_path: Path
) -> None:
    with stack.pace.slow_from(25):
        run_id = stack.train()
        stack.until_step(run_id, 25, timeout=120)
        backup = json.loads(anneal(stack.settings, "backup", str(tmp_path / "backups"), "--json").stdout)
    assert backup["problems"] == [] and backup["files"] > 10
    stack.until(run_id, "completed", timeout=120)

    home = tmp_path / "restored"
    embedded = Settings(home=home)
    restored = anneal(embedded, "restore", str(tmp_path / "backups"))
    assert "Every dataset, checkpoint and output is as it was stored." in restored.stderr
    shutil.copytree(stack.settings.models_folder, home / "models")
    service = TrainingStack(home)
    try:
        service.add_worker()
        shown = service.until(run_id, "completed", "failed", timeout=240)
        # A busy machine may lose the lease of the second attempt.
        assert shown["status"] == "completed" and shown["attempt"] >= 2, shown["error_message"]
        events = service.events(run_id)
        assert [event["type"] for event in events].count("end") == 1
        restored_steps = [line for line in service.journal(run_id) if line["event"] == "step" and line["attempt"] > 1]
        assert 20 < restored_steps[0]["step"] < STEPS and restored_steps[-1]["step"] == STEPS
        assert service.steps(run_id) == stack.steps(undisturbed), "losses as hex floats and sample ids"
        assert service.run(undisturbed)["status"] == "completed"
    finally:
        service.close()
