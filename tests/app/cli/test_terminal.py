"""Commands on a terminal: tables, plots, Ctrl-C, and text that others wrote."""

import json
import os
import re
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, update

from app.cli.console import print_listing
from app.tables.runs import Run
from tests.conftest import Anneal, json_of
from tests.factories import Trainer
from tests.rows import add_run, add_worker, claim
from tests.waiting import eventually


def test_no_name_and_no_line_of_others_controls_it(
    start: Any, trainer: Trainer, anneal: Anneal, run_file: Path
) -> None:
    """Names come from anyone who may write, messages from code that trains."""
    hostile = "\x1b]0;owned\x07\x1b[2Jname\u202e\x9b2J\x7f"
    anneal("runs", "create", "-f", str(run_file), "--set", f"name={json.dumps(hostile)}")
    with trainer.engine.begin() as connection:
        connection.execute(update(Run).where(Run.id == trainer.run_id).values(name=hostile))
    trainer.log(hostile)
    trainer.events("progress", {"phase": hostile, "done": None, "total": None, "message": hostile})
    trainer.fail(message=hostile)
    run_id = trainer.run_id
    commands = [["show", run_id], ["logs", run_id], ["why", run_id], ["list"], ["show", run_id, "--json"]]
    printed = [anneal("runs", *command).stdout for command in commands]
    assert json.loads(printed[-1])["name"] == hostile, "as JSON it has the same value"
    assert all("name" in text and not set(text) & set("\x1b\x07\x7f\x9b\u202e") for text in printed)
    for command in (["watch", run_id], ["list"]):
        process, terminal = start("runs", *command)
        seen = bytearray()
        with suppress(OSError):  # the process has ended
            while piece := os.read(terminal, 65536):
                seen += piece
        assert b"name" in seen and b"owned" not in seen and "\u202e".encode() not in seen
        process.wait(30)


def test_watch_draws_the_loss_on_a_narrow_terminal_and_ctrl_c_leaves_the_run_alone(
    start: Any, trainer: Trainer, anneal: Anneal
) -> None:
    with trainer.engine.begin() as connection:
        connection.execute(update(Run).where(Run.id == trainer.run_id).values(name="a name of many words " * 4))
    for step in range(1, 30):
        trainer.metric(step, loss=3 / step)
    process, terminal = start("runs", "watch", trainer.run_id, columns=70)
    seen = bytearray()

    def shows(text: str) -> bool:
        if select.select([terminal], [], [], 0)[0]:
            with suppress(OSError):  # the other end is closed
                seen.extend(os.read(terminal, 65536))
        return text in seen.decode(errors="replace")

    eventually(lambda: shows("loss 0.1034"))
    trainer.metric(30, loss=0.05)
    eventually(lambda: shows("30/100"))
    assert "┤" in seen.decode(errors="replace"), "a plot"
    assert "━━━━━" in seen.decode(errors="replace"), "a bar beside the counter, however long the name is"
    process.send_signal(signal.SIGINT)
    eventually(lambda: shows("the run continues"))
    assert process.wait(60) == 130
    assert b"Traceback" not in seen
    assert json_of(anneal("runs", "show", trainer.run_id, "--json"))["status"] == "running"


def test_a_list_is_a_table(start: Any, trainer: Trainer) -> None:
    process, terminal = start("runs", "list", "--limit", "1")
    shown = b""
    while b"counting" not in shown:
        shown += os.read(terminal, 65536)
    assert trainer.run_id.encode() in shown and process.wait(60) == 0


def test_the_runs_of_workers_are_shown_on_a_narrow_terminal(start: Any, engine: Engine) -> None:
    worker_id = add_worker(engine, 2, host="gpu-1.rack-7.example.org", labels=["site-b", "zone=a"])
    run_id = add_run(engine).id
    assert claim(engine, worker_id).id == run_id
    process, terminal = start("workers", "list", columns=80)
    shown = b""
    while run_id[:11].encode() not in shown:
        shown += os.read(terminal, 65536)
    assert b"RUNS" in shown and process.wait(60) == 0


@pytest.mark.parametrize("columns", [80, 200])
def test_each_row_of_a_list_takes_one_line(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    row = [
        "run_" + "0" * 26,
        "starting",
        "120/1000",
        "0.1234",
        "a name of many words " * 3,
        "soon",
        "2026-01-02",
    ]
    names = ("id", "status", "step", "best loss", "name", "eta", "created")
    print_listing([], False, False, names, [row, row])
    header, *lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert len(lines) == 2 and all(len(line) <= columns and row[0] in line for line in lines)
    assert header.split()[:2] == ["ID", "STATUS"] and "a name of" in lines[0]
    assert ("CREATED" in header) is (columns == 200)
