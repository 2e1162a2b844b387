"""Records of the other ranks of a run."""

import json
import time

from tests.worker.ingest.record_handler.lab import Lab


class TestOtherRanks:
    def test_their_lines_are_labeled_and_of_their_records_only_a_failure_counts(self, lab: Lab) -> None:
        lab.prints("of rank 0\n")
        metric = {"type": "metric", "ts": time.time(), "step": 1, "loss": 2.0}
        error = {"code": "out_of_memory", "message": "no memory"}
        failed = {"type": "result", "ts": time.time(), "outcome": "failed", "error": error}
        for source, data in (("stdout", b"of rank 1\n"), ("report", json.dumps(failed).encode())):
            lab.record_handler.handle_output([(source, data)], 1)  # type: ignore[list-item]
        lab.record_handler.handle_output([("report", json.dumps(metric).encode())], 1)
        assert lab.record_handler.state.result is None, "rank 0 may have another one to report"
        lab.record_handler.flush_output()
        lab.writer.drain()
        lines = [data["line"] for kind, data in lab.events() if kind == "log"]
        assert lines[:2] == ["of rank 0", "[rank 1] of rank 1"] and "unknown type 'metric'" in lines[2]
        error["message"] = "On rank 1: no memory"
        assert lab.record_handler.state.result == {"type": "result", "outcome": "failed", "error": error}
        assert lab.record_handler.state.failed_rank == 1

    def test_a_failure_that_another_rank_reports_is_that_of_the_rank_on_which_it_happened(self, lab: Lab) -> None:
        """The device of that rank is paused, not the one of the rank that reports it."""
        error = {"code": "device_error", "message": "On rank 3: the GPU failed"}
        failed = {"type": "result", "outcome": "failed", "error": error, "rank": 3}
        lab.record_handler.handle_output([("report", json.dumps(failed).encode())], 1)
        lab.record_handler.flush_output()
        assert (lab.record_handler.state.failed_rank, (lab.record_handler.state.result or {})["error"]) == (3, error)
        lab.says("result", outcome="failed", error=error, rank=2)
        assert lab.record_handler.state.failed_rank == 2

    def test_their_output_is_a_sign_of_life_only_until_training_starts(self, lab: Lab) -> None:
        """Before, they may work for long while rank 0 waits; in training they may go on while rank 0 hangs."""
        handler = lab.record_handler
        handler.state.last_output_at = 0.0
        handler.handle_output([("stdout", b"loading\n")], 1)
        assert handler.state.last_output_at > 0
        handler.state.training_started, handler.state.last_output_at = True, 0.0
        handler.handle_output([("stdout", b"loading\n")], 1)
        assert handler.state.last_output_at == 0.0

    def test_the_result_of_rank_0_comes_first(self, lab: Lab) -> None:
        failed = {"type": "result", "outcome": "failed", "error": {"code": "internal", "message": "it broke"}}
        lab.record_handler.handle_output([("report", json.dumps(failed).encode())], 1)
        lab.says("result", outcome="completed")
        lab.record_handler.flush_output()
        assert (lab.record_handler.state.result or {})["outcome"] == "completed"
