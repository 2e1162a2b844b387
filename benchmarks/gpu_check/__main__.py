"""`python -m benchmarks.gpu_check --output DIR [stage …]`: run the check, print its tables, write its results."""

import argparse
import sys
from pathlib import Path

from benchmarks.gpu_check import markdown
from benchmarks.gpu_check.runner import ROOT, SECONDS, STAGES, Runner


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"out of {', '.join(s.name for s in STAGES)}")
    parser.add_argument("--output", type=Path, default=ROOT / "build/gpu-check", help="folder of the results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of the whole check on a GPU")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in the stages of Qwen3-8B's shape")
    parser.add_argument("--commit", help="commit of the source, where it is not a repository")
    parsed = parser.parse_args()
    unknown = set(parsed.stages) - {stage.name for stage in STAGES}
    if unknown:
        parser.error(f"unknown stage {', '.join(sorted(unknown))}")
    stages = [stage for stage in STAGES if not parsed.stages or stage.name in parsed.stages]
    report = Runner(parsed.output, parsed.seconds, parsed.tiny, parsed.commit).run(stages)
    print(markdown.goals_table(report))
    print(f"Results: {parsed.output}")
    return 1 if any(row.status in ("failed", "timeout") for row in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
