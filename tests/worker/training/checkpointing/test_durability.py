"""A checkpoint is on the disk before it has its name, and has its name before anybody is told of it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.worker.training.disk import Disk
from tests.worker.training.tiny import ENVIRONMENT, Forks, make_job, parse_records, write_job
from worker.checkpoint_files import manifest


def nested(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(1000))
    (folder / "sub" / "state").write_text("{}")
    return folder


def test_files_and_folders_are_on_the_disk_before_the_rename_and_the_name_after_it(tmp_path: Path) -> None:
    staging, final = nested(tmp_path / ".tmp"), tmp_path / "checkpoint-7"
    with Disk().watched() as disk:
        manifest.write_manifest(staging, 7, {})
        manifest.commit(staging, final)
    assert disk.problems == []
    assert disk.is_named(final), disk.calls
    renamed = disk.calls.index("rename .tmp checkpoint-7")
    assert disk.calls[renamed + 1 :] == [f"fsync {tmp_path.name}"]


def test_the_manifest_is_on_the_disk_after_all_that_it_describes(tmp_path: Path) -> None:
    with Disk().watched() as disk:
        manifest.write_manifest(nested(tmp_path), 7, {})
    assert disk.calls == ["fsync state", "fsync weights", "fsync manifest.json"]


def test_an_output_that_has_no_manifest_is_on_the_disk_too(tmp_path: Path) -> None:
    for _ in range(2):  # the second one takes the place of the first
        with Disk().watched() as disk:
            manifest.commit(nested(tmp_path / ".tmp"), tmp_path / "output")
        assert [problem for problem in disk.problems if ".tmp" in problem] == []
        assert disk.is_named(tmp_path / "output")


def test_the_watch_detects_a_name_that_appears_too_early(tmp_path: Path) -> None:
    with Disk().watched() as disk:
        nested(tmp_path / ".tmp").rename(tmp_path / "checkpoint-7")
    assert len(disk.problems) == 4 and not disk.is_named(tmp_path / "checkpoint-7")


class TestAWholeRun:
    """Nothing is told that a power cut in the next moment would take."""

    def test_checkpoints_of_the_fake_trainer_are_durable(self, tmp_path: Path) -> None:
        config = {"base_model": "none", "max_steps": 6, "save_steps": 2, "extra": {"step_seconds": 0}}
        job = {**make_job(tmp_path, "none", "none"), "backend": "fake"}
        job["dataset"]["rows"] = 8
        job |= {"config": config, "user_set_fields": list(config)}
        done = subprocess.run(
            [sys.executable, "-m", "tests.worker.training.disk", "worker.fake.trainer", str(write_job(job))],
            capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
        assert_kept(parse_records(done.stdout), ["checkpoint-2", "checkpoint-4", "checkpoint-6"])

    def test_checkpoints_of_the_real_trainer_are_durable(
        self, forks: Forks, tiny_model: Path, chats: Path, tmp_path: Path
    ) -> None:
        config = {"method": "lora", "max_steps": 3, "save_steps": 1, "max_seq_length": 64, "batch_size": 2}
        done = forks.run(make_job(tmp_path, tiny_model, chats, **config), watch_disk=True)
        assert done.code == 0, done.stderr[-2000:]
        assert_kept(done.records, ["checkpoint-1", "checkpoint-2", "checkpoint-3"])


def assert_kept(records: list[dict[str, Any]], checkpoints: list[str]) -> None:
    """Assert that a power cut would have taken none of these checkpoints once reported, nor the output."""
    (seen,) = (record for record in records if record["type"] == "disk")
    assert (seen["problems"], seen["too_early"], seen["has_output"]) == ([], [], True)
    assert seen["reported"] == checkpoints
