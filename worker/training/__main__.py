"""The training process: `python -m worker.training run.json`, or a fork of the zygote with the same arguments.

All heavy imports are at the top of this module, and importing it computes nothing: the zygote imports it once and
forks from there, and an OpenMP thread or a CUDA context in the zygote would break its children.
"""

import contextlib
import os
import pkgutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from importlib.metadata import version

import datasets
import transformers
from pydantic import ValidationError

from anneal.contracts.attempt.job import JobSpec
from anneal.contracts.attempt.messages import ErrorInfo, TrainingResult
from anneal.contracts.methods import METHODS, TrainingMethod
from anneal.contracts.run_task import RunTask
from anneal.contracts.training_config.expert_parallel import expert_parallel_obstacles
from anneal.contracts.training_config.fields import TrainerOptions, TrainingConfig
from anneal.contracts.training_config.raw_config import drop_unknown_fields
from anneal.contracts.training_config.resolution import Replacement, resolve_config
from anneal.contracts.training_config.rules import sharding_obstacles
from anneal.contracts.training_config.sequence_parallel import division_obstacle, sequence_parallel_obstacles
from anneal.contracts.training_config.validation import config_errors
from worker.training.context import TrainingContext
from worker.training.failures import Stopped, TrainingFailure, classify_error, one_line
from worker.training.measurement import memory
from worker.training.methods.checkpoint_export import export_checkpoint
from worker.training.model import loader
from worker.training.output import gguf, hub_push
from worker.training.plugins import hooks, metric_functions
from worker.training.prediction.predict import predict_rows
from worker.training.ranks import Ranks, RankZeroUnreachableError, is_peer_lost
from worker.training.serving.serve import serve_questions
from worker.training.tracking import trackers
from worker.wire.arguments import parse_args
from worker.wire.control import Control
from worker.wire.journal import Journal
from worker.wire.rank_place import EXIT_PEER_LOST, EXIT_RANK_ZERO_UNREACHABLE, RankPlace
from worker.wire.reporter import RankReporter, Reporter

_TRAIN: dict[TrainingMethod, Callable[[TrainingContext, list[Replacement]], TrainingResult]] = {
    method.name: pkgutil.resolve_name(method.trainer) for method in METHODS.values()
}
# Before trainers are forked: a package that replaces the finder of the standard library imports modules when it first
# reads a version, and the user of a trainer may be unable to read the files of the Python installation.
version("anneal")


def main(argv: list[str]) -> int:
    """Run one job and return the exit code: 0 if it completed or stopped, 1 if it failed.

    As another rank than 0, train along: rank 0 reports the result, and receives the requests.
    """
    job, report_fd, control_fd, place = parse_args(argv)
    if place is not None and place.rank > 0:
        return _follow_rank_zero(job, place, report_fd, control_fd)
    report = Reporter(report_fd)
    control = Control.start(control_fd)
    control.stop_on_sigterm()
    journal: Journal | None = None
    result: TrainingResult
    try:
        journal = Journal(job.journal, job.attempt)
        journal.record_start()
        _quiet_libraries()
        result = _train_job(job, report, control, journal, place)
    except Exception as error:
        if place is not None and is_peer_lost(error):
            return _report_lost_connection(error)
        result = _ended_by(error, control)
        error_info = result.get("error")
        if error_info and error_info["code"] == "internal":
            traceback.print_exc()
    # The result is the last record: a late SIGTERM must not end the process before it is sent.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if journal is not None:
        with contextlib.suppress(OSError):  # a full disk, which the result reports
            journal.record_stop(result["outcome"])
    report.send({"type": "result", **result})
    return 1 if result["outcome"] == "failed" else 0


def _follow_rank_zero(job: JobSpec, place: RankPlace, report_fd: int | None, control_fd: int | None) -> int:
    """Train as another rank than 0, without a journal; return the exit code."""
    report = RankReporter(report_fd)
    control = Control.start(control_fd)
    # A service manager signals every process; rank 0 saves, and shares that the run ends.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        _quiet_libraries()
        _train_job(job, report, control, Journal(None, job.attempt), place)
    except Stopped:
        return 0
    except RankZeroUnreachableError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_RANK_ZERO_UNREACHABLE
    except (Exception, SystemExit) as error:  # code 0 would mean that it has trained to the end
        if is_peer_lost(error):
            return _report_lost_connection(error)
        result = _ended_by(error, control)
        traceback.print_exc()
        report.send({"type": "result", **result})
        return 1
    return 0


def _report_lost_connection(error: BaseException) -> int:
    """Leave the text of a lost connection in the log, for the case that no process turns out to be its cause."""
    sys.stderr.write(f"the connection to another process of the run was lost: {one_line(error)}\n")
    return EXIT_PEER_LOST


def _train_job(
    job: JobSpec, report: Reporter, control: Control, journal: Journal, place: RankPlace | None
) -> TrainingResult:
    ranks = Ranks.join(place, job.device.kind if job.device else "cpu", report.report_waiting)
    ranks.check_same(
        {f"versions of {name}": number for name, number in _code_versions().items()},
        "Install the same versions on every worker, and resume the run.",
    )
    machine = loader.machine_of(job.device)
    user_set_fields = set(job.user_set_fields)
    config = drop_unknown_fields(job.config, user_set_fields)
    try:
        requested = TrainingConfig.model_validate(config)
        TrainerOptions.model_validate(requested.extra)
    except ValidationError as error:
        errors = config_errors(config, has_eval_dataset=job.eval_dataset is not None)
        text = " ".join(problem.message for problem in errors) or str(error)
        raise TrainingFailure("config_error", text) from error
    is_sharded = job.sharded and ranks.size > 1
    data_format = None if job.dataset is None else job.dataset.format
    effective = resolve_config(requested, user_set_fields, machine, sharded=is_sharded, dataset_format=data_format)
    problems = [problem.message for problem in effective.problems]
    if job.sequence_parallel > 1:
        if (obstacle := division_obstacle(job.sequence_parallel, ranks.size, None)) is not None:
            problems.append(f"`resources.sequence_parallel` is {job.sequence_parallel}, which {obstacle}.")
        if obstacles := sequence_parallel_obstacles(requested):
            problems.append(
                f"The sequences of the run cannot be divided: {'; '.join(obstacles)}. Change that, or set "
                "`resources.sequence_parallel` to 1."
            )
    if job.expert_parallel > 1:
        if not is_sharded:
            problems.append("Experts can be divided only in a sharded run: set `resources.sharding` to `full`.")
        if obstacles := expert_parallel_obstacles(requested):
            problems.append(f"The experts of the run cannot be divided: {'; '.join(obstacles)}.")
    if is_sharded and (obstacles := sharding_obstacles(requested, user_set_fields)):
        problems.append(
            f"The run cannot be sharded: {'; '.join(obstacles)}. Change that, or set `resources.sharding` to `none`."
        )
    if problems:
        raise TrainingFailure("config_error", " ".join(problems))
    ranks.per_sequence = job.sequence_parallel
    run = TrainingContext(job, effective.config, user_set_fields, machine, report, control, journal, ranks)
    run.state.run_id = job.run_id
    hooks.load_plugins(run.config)
    run.metric_factories = metric_functions.load_factories(run.config.trainer_options.metrics, run.method)
    if ranks.is_first:
        hub_push.check_access(run)
        gguf.check_programs(run)
        run.trackers = trackers.open_trackers(job, run.config, report)
    try:
        memory.record_allocations(run)
        if job.task is RunTask.export:
            result = export_checkpoint(run)
        elif job.task is RunTask.predict:
            result = predict_rows(run, list(effective.replaced))
        elif job.task is RunTask.serve:
            result = serve_questions(run, list(effective.replaced))
        else:
            result = _TRAIN[requested.method](run, list(effective.replaced))
    except Exception as error:
        run.trackers.close(trackers.status_after(_ended_by(error, control)))
        raise
    run.trackers.close(trackers.status_after(result))
    return result


def _code_versions() -> dict[str, str]:
    """Return the versions of all code that decides what the ranks exchange, and what they compute."""
    return {
        "anneal": version("anneal"),
        **{name: one for name, one in loader.library_versions().items() if name != "python"},
    }


def _ended_by(error: BaseException, control: Control) -> TrainingResult:
    """Build the result of an attempt that ended with an exception."""
    if isinstance(error, Stopped):
        request = control.stop_requested
        return {"outcome": "stopped", "why": request.why if request else "stop"}
    failure = classify_error(error)
    error_info: ErrorInfo = {"code": failure.code, "message": failure.message}
    if failure.details is not None:
        error_info["details"] = failure.details
    result: TrainingResult = {"outcome": "failed", "error": error_info, "repair": failure.repair}
    if failure.rank is not None:
        result["rank"] = failure.rank
    return result


def _quiet_libraries() -> None:
    """Turn off progress bars: records report progress, and bars on standard error would only be log lines."""
    os.environ["TQDM_DISABLE"] = "1"  # read by TRL's own progress bars
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_warning()
    warnings.filterwarnings("ignore", category=FutureWarning)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
