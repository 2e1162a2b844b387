"""Identifiers of the OpenAI-compatible API, which map to those of the service one to one."""

from app.infra.ids import is_id

_PREFIXES = {"ds": "file", "run": "ftjob", "ckpt": "ftckpt"}
_RESULTS = "file-results-"


def to_openai_id(id: str) -> str:
    """Return the id of the file, job or checkpoint that is the view of a dataset, run or checkpoint."""
    prefix, _, characters = id.partition("_")
    return f"{_PREFIXES[prefix]}-{characters}"


def to_native_id(id: str, prefix: str) -> str | None:
    """Return the id with this prefix (`ds`, `run`, `ckpt`) that an id of the OpenAI-compatible API stands for.

    None for an id of another form.
    """
    start, _, characters = id.partition("-")
    native_id = f"{prefix}_{characters}"
    return native_id if start == _PREFIXES[prefix] and is_id(native_id, prefix) else None


def to_result_file_id(job_id: str) -> str:
    """Return the id of the file with the metrics of a job (`ftjob-…`)."""
    return f"{_RESULTS}{job_id.partition('-')[2]}"


def job_of_result_file(file_id: str) -> str | None:
    """Return the id of the job whose metrics a file has; None for the id of another file."""
    return f"ftjob-{file_id.removeprefix(_RESULTS)}" if file_id.startswith(_RESULTS) else None
