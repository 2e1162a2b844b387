"""A training process reports, hears its supervisor and keeps its own journal."""

import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from anneal.contracts.attempt.messages import MAX_RECORD_BYTES, ControlMessage
from anneal.contracts.stop import StopRequest
from app.infra.clock import since_boot
from app.infra.process.identity import boot_id
from tests.jobs import make_spec
from worker.wire.arguments import parse_args
from worker.wire.control import Control
from worker.wire.journal import Journal, read_journal
from worker.wire.rank_place import RankPlace
from worker.wire.reporter import Reporter


class Number:
    """As numpy's and torch's scalars do."""

    def item(self) -> float:
        return 1.5


@pytest.fixture
def pair() -> Any:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        yield Reporter(theirs.fileno()), lambda: json.loads(ours.recv(1 << 20))


class TestReport:
    def test_a_record_carries_type_time_and_fields(self, pair: Any) -> None:
        report, received = pair
        report.send({"type": "phase", "name": "training", "start_step": 3, "total_steps": 9})
        record = received()
        assert record.pop("ts") == pytest.approx(time.time(), abs=5)
        assert record == {"type": "phase", "name": "training", "start_step": 3, "total_steps": 9}

    def test_scalars_of_array_libraries_become_numbers(self, pair: Any) -> None:
        report, received = pair
        report.send({"type": "eval", "step": 1, "epoch": Number(), "metrics": {"folder": Path("/x")}})
        record = received()
        assert (record["epoch"], record["metrics"]) == (1.5, {"folder": "/x"})

    def test_non_finite_numbers_reach_the_supervisor_which_cleans_them(self, pair: Any) -> None:
        report, received = pair
        report.send({"type": "eval", "step": 1, "epoch": math.nan, "metrics": {}})
        assert math.isnan(received()["epoch"])

    @pytest.mark.parametrize(
        "fields",
        [
            {"line": "x" * 1_000_000},
            {"rows": [["y" * 100] * 1000] * 100},
            {"map": {str(n): n for n in range(100_000)}},
            {"line": "\ud800" * 100_000},
        ],
    )
    def test_an_oversized_record_is_cut_and_says_so(self, pair: Any, fields: dict[str, Any]) -> None:
        report, received = pair
        report.send({"type": "message", **fields})
        record = received()
        assert record["type"] == "message"
        assert record["truncated"] is True
        assert len(json.dumps(record)) <= MAX_RECORD_BYTES

    def test_by_hand_records_are_lines_on_standard_output(self) -> None:
        code = (
            "from worker.wire.reporter import Reporter\n"
            "Reporter(None).send({'type': 'result', 'outcome': 'completed', 'step': 2})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["outcome"] == "completed"

    def test_a_process_whose_supervisor_is_gone_ends_at_its_next_record(self) -> None:
        code = (
            "import socket; from worker.wire.reporter import Reporter\n"
            "ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); ours.close()\n"
            "Reporter(theirs.fileno()).message('x'); print('still here')"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "")

    def test_it_imports_nothing_heavy(self) -> None:
        code = "import sys, worker.wire.reporter; print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert not {"torch", "numpy", "pydantic", "sqlalchemy"} & set(done.stdout.split())


class TestArguments:
    def test_a_launched_process_gets_job_and_descriptors(self, tmp_path: Path) -> None:
        job = make_spec(tmp_path, attempt=2)
        (tmp_path / "job.json").write_text(job.to_json())
        arguments = [str(tmp_path / "job.json"), "--report-fd", "5", "--control-fd", "6"]
        assert parse_args(arguments) == (job, 5, 6, None)
        place = RankPlace.on_one_host(1, 4, tmp_path / "ranks")
        assert parse_args([*arguments, *place.arguments()]).place == place

    def test_by_hand_there_are_no_descriptors(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text(make_spec(tmp_path).to_json())
        assert parse_args([str(tmp_path / "run.json")])[1:] == (None, None, None)

    @pytest.mark.parametrize("text", ["[]", "{}", "{torn", None])
    def test_a_job_that_cannot_be_read_is_reported_as_a_failed_result(
        self, text: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        if text is not None:
            (tmp_path / "run.json").write_text(text)
        with pytest.raises(SystemExit) as ended:
            parse_args([str(tmp_path / "run.json")])
        assert ended.value.code == 1
        result = json.loads(capfd.readouterr().out)
        assert (result["type"], result["outcome"], result["error"]["code"]) == ("result", "failed", "internal")
        assert "run.json" in result["error"]["message"]


class TestControl:
    def test_without_a_supervisor_nothing_is_asked_for(self) -> None:
        assert Control.start(None).stop_requested is None

    def test_a_stop_reaches_flag_and_callback(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control = Control.start(theirs.detach())
        heard = threading.Event()
        control.on_stop(lambda _request: heard.set())
        ours.send(ControlMessage(stop=StopRequest("checkpoint")).to_json())
        assert heard.wait(10)
        assert control.stop_requested == StopRequest("checkpoint")
        _keep_open.append(ours)

    def test_a_callback_that_comes_late_is_reported_at_once(self) -> None:
        control = Control.start(None)
        control.request_stop(StopRequest("discard", "drain"))
        heard: list[StopRequest] = []
        control.on_stop(heard.append)
        assert heard == [StopRequest("discard", "drain")]

    @pytest.mark.parametrize("requests", [("drain", "stop"), ("stop", "drain")])
    def test_a_users_stop_outranks_a_drain_in_any_order(self, requests: tuple[Any, Any]) -> None:
        control = Control.start(None)
        for why in requests:
            control.request_stop(StopRequest("checkpoint", why))
        assert control.stop_requested == StopRequest("checkpoint")

    @pytest.mark.parametrize("order", [1, -1])
    def test_stop_that_keeps_less_outranks_one_that_keeps_more(self, order: int) -> None:
        save, best, discard = StopRequest("checkpoint"), StopRequest("best"), StopRequest("discard")
        for requests, expected in (([save, best], best), ([best, discard], discard)):
            control = Control.start(None)
            for request in requests[::order]:
                control.request_stop(request)
            assert control.stop_requested == expected

    def test_a_stop_at_the_end_of_the_epoch_is_no_immediate_one(self) -> None:
        control = Control.start(None)
        control.request_stop(StopRequest("epoch_end"))
        assert control.stop_at_epoch_end and control.stop_requested is None

    def test_a_stop_without_saving_outranks_one_with(self) -> None:
        control = Control.start(None)
        control.request_stop(StopRequest("discard"))
        control.request_stop(StopRequest("checkpoint"))
        assert control.stop_requested == StopRequest("discard")

    def test_a_process_whose_supervisor_is_gone_ends_though_it_never_looks(self) -> None:
        child, ours = _child_with_control("signal.pause()")
        ours.close()
        assert child.wait(10) == 1

    def test_a_process_that_is_not_renewed_is_ended_by_the_kernel(self) -> None:
        # Once a first renewal is in force, it holds the interpreter lock for ever, as a stuck C call does.
        child, ours = _child_with_control(_ARMED + "ctypes.PyDLL(None).pause()")
        ours.send(json.dumps({"renew_until": since_boot() + 0.5}).encode())
        assert child.wait(10) == -signal.SIGALRM
        ours.close()

    @pytest.mark.needs("root")
    def test_the_deadline_counts_the_seconds_that_the_machine_sleeps(self) -> None:
        # The interval timer stands still meanwhile; here a thousand seconds of sleep lie between the two clocks.
        program = """
import signal, time
from app.infra.clock import since_boot
from worker.wire.deadline import arm_deadline
assert since_boot() - time.monotonic() > 900
arm_deadline(since_boot() + 3600)
arm_deadline(since_boot() + 0.5)
signal.setitimer(signal.ITIMER_REAL, 0)
signal.pause()
"""
        slept = ["unshare", "--time", "--fork", "--boottime", "1000"]
        child = subprocess.run([*slept, sys.executable, "-c", program], capture_output=True, timeout=30, check=False)
        assert (child.returncode, child.stderr) == (-signal.SIGALRM, b"")

    def test_a_renewal_moves_the_deadline(self) -> None:
        child, ours = _child_with_control("signal.pause()")
        now = since_boot()
        ours.send(json.dumps({"renew_until": now + 0.5}).encode())
        ours.send(json.dumps({"renew_until": now + 3600}).encode())
        pidfd = os.pidfd_open(child.pid)
        ended, _, _ = select.select([pidfd], [], [], 1.0)
        os.close(pidfd)
        assert not ended
        ours.close()
        assert child.wait(10) == 1

    def test_sigterm_means_save_and_hand_back(self) -> None:
        child, ours = _child_with_control(
            "control.stop_on_sigterm(); os.kill(os.getpid(), 15); print(control.stop_requested)"
        )
        assert child.stdout is not None
        assert child.stdout.read() == b"StopRequest(mode='checkpoint', why='drain', grace_seconds=None)\n"
        ours.close()

    def test_children_still_die_of_sigterm(self) -> None:
        child, ours = _child_with_control(
            "control.stop_on_sigterm(); pid = os.fork() or signal.pause(); os.kill(pid, 15); "
            "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
        )
        assert child.stdout is not None
        assert child.stdout.read() == b"-15\n"
        ours.close()


_ARMED = "list(iter(lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0, True)); "
_keep_open: list[socket.socket] = []  # the end of a control socket ends the process that listens


def _child_with_control(code: str) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = (
        "import ctypes, os, signal; from worker.wire.control import Control\n"
        f"control = Control.start({theirs.fileno()}); print('ready', flush=True); {code}"
    )
    with theirs:
        child = subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child, ours


class TestJournal:
    def test_what_was_written_is_read_back_in_order(self, tmp_path: Path) -> None:
        journal = Journal(tmp_path / "journal.jsonl", attempt=3)
        journal.record_start()
        journal.record_step(1, (0.1).hex(), [4, 5])
        journal.record_save(1)
        journal.record_stop("completed")
        events = read_journal(tmp_path / "journal.jsonl")
        assert [event["event"] for event in events] == ["start", "step", "save", "stop"]
        assert events[1]["loss_hex"] == (0.1).hex()
        assert events[1]["samples"] == [4, 5]
        assert {(event["attempt"], event["pid"], event["boot_id"]) for event in events} == {(3, os.getpid(), boot_id())}
        assert [event["t"] for event in events] == sorted(event["t"] for event in events)

    def test_lines_of_several_threads_are_in_the_order_of_their_times(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "fsync", lambda _: None)  # a disk would leave little time for others
        journal = Journal(tmp_path / "j", 1)
        often = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(journal.record_save, range(4000)))
        finally:
            sys.setswitchinterval(often)
        times = [event["t"] for event in read_journal(tmp_path / "j")]
        assert len(times) == 4000 and times == sorted(times)

    def test_attempts_share_one_file(self, tmp_path: Path) -> None:
        for attempt in (1, 2):
            Journal(tmp_path / "j", attempt).record_start()
        assert [event["attempt"] for event in read_journal(tmp_path / "j")] == [1, 2]

    def test_a_line_torn_by_a_power_cut_hides_nothing_else(self, tmp_path: Path) -> None:
        Journal(tmp_path / "j", 1).record_start()
        with (tmp_path / "j").open("ab") as file:
            file.write(b'{"event": "st')
        Journal(tmp_path / "j", 2).record_start()
        assert [event["attempt"] for event in read_journal(tmp_path / "j")] == [1, 2]

    def test_a_journal_that_was_never_written_is_empty(self, tmp_path: Path) -> None:
        assert read_journal(tmp_path / "none") == []
