"""`push_to_hub`: upload of a run's output to the Hugging Face hub, as one commit.

The run already has its output when the upload starts, so an error here never fails the run: it is reported, and the
output can still be pushed by hand.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import psutil
from huggingface_hub import CommitInfo, HfApi, constants, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError

from anneal.contracts.attempt.messages import HubPush
from app.infra.files.tree import files_below
from worker.training.context import TrainingContext
from worker.training.failures import Stopped, TrainingFailure

_TRIES = 5
_FIRST_PAUSE = 1.0
_TIMEOUT_SECONDS = 120.0
"""Time without a byte from the hub after which a request fails; the client repeats some requests, up to five times."""
_POLL_SECONDS = 0.1
_CHECK_TIMEOUT_SECONDS = 10.0
_MOST_OWNERS = 5


def check_access(run: TrainingContext) -> None:
    """Check before training that the output can be pushed.

    A run that has already trained is not failed here: it reports at its end why the output was not pushed.

    Raises:
        TrainingFailure: `config_error`.
    """
    name = run.config.push_to_hub
    if name is not None and run.resume_from is None:
        refusal = _refusal_reason(run) or _denial_reason(run, name)
        if refusal:
            raise TrainingFailure("config_error", refusal)


def push_output(run: TrainingContext, output: Path) -> HubPush | None:
    """Upload every file of `output` if the run asks for it, and return the outcome for the result record.

    Raises:
        Stopped: the worker is draining; the run's next attempt pushes the output.
    """
    name = run.config.push_to_hub
    if name is None:
        return None
    run.report.send({"type": "phase", "name": "pushing"})
    try:
        refusal = _refusal_reason(run)
        if refusal:
            raise TrainingFailure("config_error", refusal)
        commit = _upload_output(run, output, name)
    except Stopped:
        request = run.stop_requested
        if request is not None and request.why == "drain":
            raise
        return _report_failure(run, name, "a stop was requested")
    except Exception as error:
        return _report_failure(run, name, _root_cause(error))
    run.report.message(f"Pushed to the hub: {commit.commit_url}")
    return {"repo": name, "commit": commit.oid, "url": commit.commit_url}


def _upload_output(run: TrainingContext, output: Path, name: str) -> CommitInfo:
    """Upload in another thread, so that a run can be stopped while the hub does not respond.

    Raises:
        Stopped: a stop was requested.
        Exception: the hub refused the upload, or failed in every try.
    """
    outcome: Future[CommitInfo] = Future()
    abandoned = threading.Event()

    def run_upload() -> None:
        try:
            outcome.set_result(_commit_files(run, output, name, abandoned))
        except Exception as error:
            outcome.set_exception(error)

    total = sum(entry.stat().st_size for entry in files_below(output))
    # The client reports no progress to its caller. Nearly all bytes that this process reads meanwhile are the output's.
    read_before = _read_bytes()
    threading.Thread(target=run_upload, name="push", daemon=True).start()
    try:
        while not wait([outcome], _POLL_SECONDS).done:
            run.report_progress("pushing", min(_read_bytes() - read_before, total - 1), total)
    finally:
        abandoned.set()
    commit = outcome.result()
    run.report.send({"type": "progress", "phase": "pushing", "done": total, "total": total, "message": None})
    return commit


def _commit_files(run: TrainingContext, output: Path, name: str, abandoned: threading.Event) -> CommitInfo:
    api = HfApi(endpoint=constants.ENDPOINT, token=get_token())
    get_session().timeout = _TIMEOUT_SECONDS  # by default it waits forever
    for pause in _retry_pauses():
        try:
            # An existing repository keeps its visibility.
            api.create_repo(name, private=True, exist_ok=True)
            return api.upload_folder(
                repo_id=name,
                folder_path=output,
                commit_message=f"Run {run.job.run_id} of Anneal, attempt {run.job.attempt}",
            )
        except Exception as error:
            if pause is None or not _is_transient(error) or abandoned.is_set():
                raise
            run.report.message(f"The hub did not accept the output ({_root_cause(error)}); retrying.", "warning")
            if abandoned.wait(pause):
                raise
    raise AssertionError("the last attempt returns or raises")


def _read_bytes() -> int:
    """Return the bytes that this process has read from files, also in native code."""
    return int(psutil.Process().io_counters().read_chars)


def _retry_pauses() -> Iterator[float | None]:
    """Yield the pause in seconds before each retry, and None after the last one."""
    yield from (_FIRST_PAUSE * 2**number for number in range(_TRIES - 1))
    yield None


def _refusal_reason(run: TrainingContext) -> str | None:
    if not run.job.hub_allowed:
        return "`push_to_hub` needs the hub, which the operator has disabled on this worker (ANNEAL_ALLOW_HUB)."
    if get_token() is None:
        return "`push_to_hub` needs a token: an admin sets it with `anneal secrets set hf_token`."
    return None


def _denial_reason(run: TrainingContext, name: str) -> str | None:
    """Return why the token may not write to a repository; None if it may, or if the hub cannot be asked now."""
    remedy = "an admin sets another one with `anneal secrets set hf_token`"
    get_session().timeout = _CHECK_TIMEOUT_SECONDS
    try:
        account = HfApi(endpoint=constants.ENDPOINT, token=get_token()).whoami()
        role = account["auth"]["accessToken"]["role"]
        owners = {account["name"], *(organization["name"] for organization in account["orgs"])}
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            return f"`push_to_hub` needs a token that the hub accepts, and it refuses this one: {remedy}."
        unknown: Exception = error
    except Exception as error:  # the hub is away, or describes accounts in another way
        unknown = error
    else:
        if role == "read":
            return f"`push_to_hub` needs a token that may write, and this one may only read: {remedy}."
        owner = name.partition("/")[0]
        if role == "write" and owner not in owners:
            mine = ", ".join(f"`{one}`" for one in sorted(owners)[:_MOST_OWNERS])
            return f"`push_to_hub` is `{name}`, and the token may write only for {mine}: change the name, or {remedy}."
        return None
    run.report.message(
        f"Whether the output can be pushed to {name} is not known before the end: {_root_cause(unknown)}.",
        level="warning",
    )
    return None


def _report_failure(run: TrainingContext, name: str, why: str) -> HubPush:
    run.report.message(
        f"The output was not pushed to {name}: {why}. The run is complete and keeps its output: download it "
        f"(GET /v1/runs/{run.job.run_id}/artifacts.tar) and push it with `hf upload {name} <folder>`.",
        level="error",
    )
    return {"repo": name, "error": why}


def _root_cause(error: BaseException) -> str:
    """Return the root cause in one line; huggingface_hub wraps it in a message about a file."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__


def _is_transient(error: BaseException | None) -> bool:
    """Return True if a retry may succeed: the hub is unreachable, overloaded or failing, not silent or refusing.

    Classes are compared by name, since huggingface_hub has its own HTTP client.
    """
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return status in (408, 429) or status >= 500
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "TimeoutException" in kinds:
            return False
        if isinstance(error, OSError) or "TransportError" in kinds:
            return True
        error = error.__cause__
    return False
