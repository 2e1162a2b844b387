"""Names in commands: ids, their beginnings, names and `last`, and what the shell offers."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROWS, Anneal, json_of
from tests.server import ApiServer


def test_things_are_found_by_the_beginning_of_an_id_by_name_and_as_the_last(anneal: Anneal, run_file: Path) -> None:
    def shown(noun: str, text: str) -> str:
        return str(json_of(anneal(noun, "show", text, "--json"))["id"])

    none = anneal("runs", "show", "last", code=1).stderr
    assert none == "anneal: There is no run yet; `anneal runs create` creates one.\n"
    group = anneal("experiments", "create", "by name").stdout.strip()
    create = ["runs", "create", "-f", str(run_file), "--set", f"experiment_id={group}", "--set"]
    first, second = (anneal(*create, f"name={name}").stdout.strip() for name in ("sought", "sought_too"))
    for text in (second, second[:-4], second.removeprefix("run_")[:-4], "sought_too", "last"):
        assert shown("runs", text) == second
    assert shown("experiments", "by name") == shown("experiments", "last") == group
    listed = json_of(anneal("runs", "list", "--experiment", "by name", "--json"))["data"]
    assert [run["id"] for run in listed] == [second, first]
    compared = json_of(anneal("runs", "compare", "sought", "last", "--json"))["runs"]
    assert [run["run_id"] for run in compared] == [first, second]
    Path("rows.jsonl").write_text(ROWS)
    dataset = anneal("datasets", "upload", "rows.jsonl", "--name", "five rows").stdout.strip()
    assert shown("datasets", dataset[:-4]) == shown("datasets", "last") == dataset
    anneal("runs", "edit", second, "--name", "sought")
    for text in ("sought", "run_", first[:8]):
        several = anneal("runs", "delete", text, code=1).stderr
        assert "is not unique" in several and f"  {second}  sought" in several
    missing = anneal("runs", "show", "not there", code=1).stderr
    assert missing == (
        "anneal: There is no run 'not there'. Use an id, the beginning of one, a name, or `last`; "
        "`anneal runs list` lists them.\n"
    )
    Path("not sent.jsonl").write_text(ROWS)
    missing = anneal("datasets", "show", "not sent.jsonl", code=1).stderr
    assert "Upload the file first: `anneal datasets upload 'not sent.jsonl'`." in missing
    for run_id in (first, second):
        anneal("runs", "stop", run_id)


def test_a_name_that_only_a_chain_of_resumes_shares_is_the_newest_run(anneal: Anneal, run_file: Path) -> None:
    def resumed(run_id: str) -> str:
        return anneal("runs", "resume", run_id, "--from-start").stdout.strip()

    def shown() -> str:
        return str(json_of(anneal("runs", "show", "a chain", "--json"))["id"])

    create = ("runs", "create", "-f", str(run_file), "--set", "name=a chain")
    newest = anneal(*create).stdout.strip()
    chain = [newest]
    for _ in range(6):
        anneal("runs", "stop", "a chain")
        newest = resumed(newest)
        chain.append(newest)
        assert shown() == newest
    anneal("runs", "stop", "a chain")
    assert "is not unique" in anneal("runs", "show", chain[0][:-22], code=1).stderr, "the beginning of an id is no name"
    branch = resumed(chain[2])
    listed = anneal("runs", "show", "a chain", code=1).stderr.splitlines()
    assert "is not unique" in listed[0] and len(listed) == 6 and listed[1] == f"  {branch}  a chain"
    anneal("runs", "stop", branch)


def test_the_shell_is_offered_ids_and_names(
    anneal: Anneal, shared_api: ApiServer, run_file: Path, tmp_path: Path
) -> None:
    run_id = anneal("runs", "create", "-f", str(run_file), "--set", "name=completed-by-tab").stdout.strip()
    anneal("runs", "stop", run_id)
    script = "import sys; sys.argv[0] = 'anneal'; from app.cli.main import main; main()"

    def offered(words: str, url: str) -> list[str]:
        variables = {"_ANNEAL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        there = {"ANNEAL_HOME": str(tmp_path), "ANNEAL_URL": url, "ANNEAL_API_KEY": shared_api.key}
        done = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **there, **variables}, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        assert done.stderr == "", done.stderr
        return done.stdout.split()

    assert run_id in offered(f"anneal runs show {run_id[:-3]}", shared_api.url)
    assert offered("anneal runs delete completed-by", shared_api.url) == ["completed-by-tab"]
    assert offered("anneal runs show run_", "http://127.0.0.1:1") == []
