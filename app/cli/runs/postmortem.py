"""Command `anneal runs why`."""

import json
import shlex
from typing import TYPE_CHECKING

from app.cli.console import AsJson, open_client, print_details, print_json, print_table, print_text, value_text
from app.cli.names import RunId
from app.cli.runs.state_text import status_text

if TYPE_CHECKING:
    from anneal.contracts.schemas.postmortem import CorrectedRequest

_LINES_SHOWN = 12


def why(run_id: RunId, as_json: AsJson = False) -> None:
    """Explain why a run failed, or its last failed attempt, and what to change.

    Example: `anneal runs why run_01k3x9m6q2v8s4t0w7y5z1a3b6`
    """
    with open_client() as client:
        postmortem = client.runs.postmortem(run_id)
    if as_json:
        print_json(postmortem)
        return
    peaks = ", ".join(f"{name.removesuffix('_mb')} {value:,} MB" for name, value in postmortem.peaks.items())
    print_details(
        {
            "status": status_text(postmortem.status), "error": postmortem.code,
            "probable cause": postmortem.probable_cause, "advice": postmortem.advice, "attempt": postmortem.attempt,
            "phase": postmortem.phase, "step": postmortem.step,
            "exit code": postmortem.exit_code, "exit signal": postmortem.exit_signal, "peak memory": peaks or None,
        }
    )  # fmt: skip
    if len(postmortem.attempts) > 1:
        rows = [
            (one.attempt, one.outcome, one.phase, one.step, (one.repair or {}).get("reason"))
            for one in postmortem.attempts
        ]
        print_table(
            ["ATTEMPT", "OUTCOME", "PHASE", "STEP", "REPAIRED"],
            [[value_text(value) for value in row] for row in rows],
        )
    if postmortem.last_lines:
        print_text("\n  ".join(["Last log lines:", *postmortem.last_lines[-_LINES_SHOWN:]]))
    if postmortem.correction:
        request = postmortem.correction.request
        body = json.dumps(request.body, ensure_ascii=False)
        print_text(
            f"This request may help: {request.method} {request.path} with\n  {body}\n"
            f"As a command:\n{shell_command(run_id, request)}"
        )


def shell_command(run_id: str, request: "CorrectedRequest") -> str:
    """Return the shell command that sends the corrected request."""
    if request.path.endswith("/resume"):
        changes = request.body["config"].items()
        sets = (shlex.quote(f"config.{name}={json.dumps(value, ensure_ascii=False)}") for name, value in changes)
        return " ".join([f"anneal runs resume {run_id}", *(f"--set {one}" for one in sets)])
    return f"anneal runs create -f - <<'EOF'\n{json.dumps(request.body, ensure_ascii=False)}\nEOF"
