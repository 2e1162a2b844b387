"""`python -m tests.mutants [NAME …]`: test all or the named mutants; exit code 1 unless all are caught."""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.catalogue import MUTANTS
from tests.mutants.copies import ROOT, Copy, Outcome
from tests.mutants.mutant import Mutant, MutantError

_SECONDS_FOR_A_MUTANT = 180.0
_SECONDS_FOR_A_TEST = 60.0


def main(names: Sequence[str]) -> int:
    """Test mutants and return the exit code."""
    known = {mutant.name: mutant for mutant in MUTANTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"unknown mutants: {', '.join(unknown)}. Known mutants: {', '.join(known)}", file=sys.stderr)
        return 1
    selected = [known[name] for name in names] if names else list(MUTANTS)
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        try:
            pristine = Copy.of_the_tree(Path(folder) / "m")
        except MutantError as error:
            print(error, file=sys.stderr)
            return 1
        tests = list(dict.fromkeys(mutant.test for mutant in selected))
        print(f"{len(tests)} tests without a mutant …", end=" ", flush=True)
        began = time.monotonic()
        unmutated = pristine.run(tests, _SECONDS_FOR_A_MUTANT + _SECONDS_FOR_A_TEST * len(tests))
        if all(outcome.state == "broken" for outcome in unmutated.values()):
            # A single missing test keeps pytest from running any of them.
            unmutated = {test: pristine.run([test], _SECONDS_FOR_A_MUTANT)[test] for test in tests}
        passed = sum(outcome.state == "passed" for outcome in unmutated.values())
        print(f"{passed} pass ({time.monotonic() - began:.0f} s)\n", flush=True)
        print(_row("mutant", "promise", "test", "", "seconds"))
        caught = [_try(mutant, pristine, unmutated[mutant.test]) for mutant in selected]
    print(f"\n{sum(caught)} of {len(selected)} mutants caught")
    return 0 if all(caught) else 1


def _try(mutant: Mutant, pristine: Copy, unmutated: Outcome) -> bool:
    began = time.monotonic()
    verdict, why = _verdict(mutant, pristine, unmutated)
    promises = ", ".join(str(number) for number in mutant.promises)
    took = f"{time.monotonic() - began:.1f}"
    print(_row(mutant.name, promises, mutant.test.removeprefix("tests/"), verdict, took), flush=True)
    if verdict != "caught":
        print(f"    {why}", flush=True)
    return verdict == "caught"


def _verdict(mutant: Mutant, pristine: Copy, unmutated: Outcome) -> tuple[str, str]:
    problem = next(filter(None, (change.problem(ROOT) for change in mutant.changes)), None)
    if problem:
        return "STALE", problem
    if unmutated.state != "passed":
        return "BROKEN", f"its test fails without the mutant: {unmutated.why}"
    copy = pristine.again(pristine.place.with_name("x"))
    try:
        for change in mutant.changes:
            change.make(copy.place)
        outcome = copy.run([mutant.test], _SECONDS_FOR_A_MUTANT)[mutant.test]
    except MutantError as error:
        return "STALE", str(error)
    finally:
        copy.remove()
    if outcome.state == "failed":
        return "caught", ""
    if outcome.state == "passed":
        return "SURVIVED", f"{mutant.about} {mutant.test} still passes."
    return "BROKEN", f"its test failed, but not by its own assertion: {outcome.why}"


def _row(name: str, promises: str, test: str, verdict: str, seconds: str) -> str:
    shown = test if len(test) <= 100 else "…" + test[-99:]
    return f"{name:<32} {promises:<9} {shown:<101} {verdict:<9} {seconds:>7}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
