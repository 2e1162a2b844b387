"""Report of a check: rows that the stages recorded, as JSON."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "failed", "skipped", "timeout"]


@dataclass(frozen=True)
class Row:
    """Result of one part of a stage."""

    stage: str
    name: str
    status: Status = "ok"
    text: str = ""
    """Reason of a failure or of a skipped part; else a remark."""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """All results of a check, and the machine on which it ran."""

    date: str
    commit: str
    device: str
    """Name of the GPU, or of the processor if there is none."""
    kind: Literal["cpu", "cuda"]
    tiny: bool
    """True if the stages that measure Qwen3-8B's shape used a tiny model."""
    command: str
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds that each stage took, in order."""
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> "Report":
        """Read a report."""
        fields = json.loads(path.read_text())
        return cls(**{**fields, "rows": [Row(**row) for row in fields["rows"]]})

    def save(self, path: Path) -> None:
        """Write the report; a reader sees the previous one or this one, never a part."""
        unfinished = path.with_suffix(".part")
        with unfinished.open("w") as file:
            file.write(json.dumps(asdict(self), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)

    def merged_with(self, other: "Report") -> "Report":
        """Return a report with the rows of both; a stage that both have is that of `other`."""
        if (self.commit, self.device) != (other.commit, other.device):
            raise ValueError(f"reports of different commits or devices: {self.commit} on {self.device}, "
                             f"{other.commit} on {other.device}")  # fmt: skip
        rows = [row for row in self.rows if row.stage not in other.stages]
        merged = {**vars(other), "tiny": self.tiny or other.tiny, "command": f"{self.command}; {other.command}"}
        return Report(**{**merged, "stages": {**self.stages, **other.stages}, "rows": [*rows, *other.rows]})

    def of_stage(self, stage: str) -> list[Row]:
        """Return the rows of one stage, in order."""
        return [row for row in self.rows if row.stage == stage]

    def value(self, stage: str, name: str, key: str) -> Any:
        """Return one value of a row that succeeded; None if there is none."""
        rows = [row for row in self.of_stage(stage) if row.name == name and row.status == "ok"]
        return rows[-1].values.get(key) if rows else None


def append_row(path: Path, row: Row) -> None:
    """Append a row to a file of rows, on disk when this returns."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(row), default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file; one whose writing was interrupted is skipped."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return list(_parsed(line for line in lines if line.endswith("\n")))


def _parsed(lines: Iterable[str]) -> Iterable[Row]:
    return (Row(**json.loads(line)) for line in lines)
