"""Jobs for tests that call a trainer's code without a supervisor."""

from pathlib import Path
from typing import Any

from anneal.contracts.attempt.job import JobSpec


def make_spec(folder: Path, **fields: Any) -> JobSpec:
    """Return a valid job whose attempt writes to `folder`; `fields` replace its defaults."""
    defaults = {
        "run_id": "run_x", "attempt": 1, "backend": "fake", "config": {"base_model": "none"}, "user_set_fields": [],
        "dataset": {"id": "ds_x", "path": "rows.jsonl", "format": "text", "rows": None, "sha256": None},
        "base_model": {"name": "none", "path": None, "hub": None, "revision": None},
        "attempt_dir": folder, "journal": folder / "journal.jsonl",
        "device": {"kind": "cpu", "index": 0, "id": "cpu-0"},
    }  # fmt: skip
    return JobSpec.model_validate(defaults | fields)
