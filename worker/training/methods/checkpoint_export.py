"""Export of a checkpoint as a run of its own: its weights become the output, and nothing is trained."""

from functools import partial

from transformers import AutoTokenizer

from anneal.contracts.attempt.messages import TrainingResult
from worker.training.checkpointing import saver
from worker.training.context import TrainingContext
from worker.training.failures import TrainingFailure
from worker.training.methods import preparation
from worker.training.model import base_model
from worker.training.output.export import OUTPUT, ExportedWeights, copy_weights, write_output
from worker.training.plugins.checkpoint_engines import restore_replica
from worker.training.run_state import RunState


def export_checkpoint(run: TrainingContext) -> TrainingResult:
    """Write the output of a run from its checkpoint, and return the fields of its result record.

    Raises:
        TrainingFailure: with a stable code.
        Stopped: a stop was requested.
    """
    restore_replica(run)
    source = run.resume_from
    if source is None:
        raise TrainingFailure("config_error", "The checkpoint to export no longer exists; export another one.")
    saver.verify_checkpoint(source.path, source.manifest_sha256, run.report.alive)
    run.report.send({"type": "phase", "name": "loading"})
    base = base_model.find_base(run.job, run.config)
    tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=run.job.trust_remote_code)
    run.raise_if_stopped()
    run.state = RunState.load(source.path, run.job.run_id, source.step)
    for history in run.histories:
        history.start_from(source.path)
    chosen = ExportedWeights("checkpoint", source.step, "as requested", partial(copy_weights, source.path))
    with preparation.base_weights(run, base) as start:
        exported = write_output(run, chosen, tokenizer, start, {"base_revision": base.revision})
    return {
        "outcome": "completed",
        "why": "export",
        "output": OUTPUT,
        "exported": exported,
        "step": source.step,
        "metrics": {},
    }
