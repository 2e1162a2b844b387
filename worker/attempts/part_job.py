"""Job of a part of a run on several hosts that share no folder: the lead's, with what is fetched to this worker."""

from pathlib import Path

from anneal.contracts.attempt.job import JobSpec
from worker.attempts.checkpoint_source import CheckpointSource
from worker.attempts.job_builder import find_reward_hosts, worker_fields, write_job
from worker.attempts.job_inputs import JobInputs
from worker.checkpoint_store.restore import RestoreControl
from worker.claimed_run import ClaimedRun
from worker.context import WorkerContext


def prepare_part(context: WorkerContext, run: ClaimedRun, lead: JobSpec, control: RestoreControl) -> Path:
    """Fetch what the job of the lead names, and write the job of this worker; return its file.

    Raises:
        JobError: Something cannot be fetched, or this worker does not allow a host that rewards call.
        TransferCancelled: The attempt is to end.
        OSError: The storage of this worker cannot be read or written.
    """
    assert context.working_copy is not None  # noqa: S101
    inputs = JobInputs(context, run, control)
    source = CheckpointSource(context, run, control, marks_corrupt=False)
    lead_root = lead.attempt_dir.parents[2]

    def local_path(path: Path) -> Path:
        """Return the place here of a file in the storage of the lead, whose layout is the same."""
        return context.storage.root / path.relative_to(lead_root)

    context.working_copy.use_entry(run.id, inputs.folder, control.raise_if_ended)
    inputs.folder.parent.mkdir(parents=True, exist_ok=True)
    extra_eval_ids = {name: dataset.id for name, dataset in lead.extra_eval_datasets.items()}
    eval_id = None if lead.eval_dataset is None else lead.eval_dataset.id
    datasets = inputs.fetch_datasets(None if lead.dataset is None else lead.dataset.id, eval_id, extra_eval_ids)
    resume, weights = lead.resume_from, lead.weights
    if resume is not None:
        resume = resume.model_copy(update={"path": local_path(resume.path)})
        source.obtain_from_lead(resume.path)
    if weights is not None:
        weights = weights.model_copy(update={"path": local_path(weights.path)})
        if run.resume_checkpoint_id is None:
            inputs.fetch_output(weights.path.parents[1].name)
        else:
            source.obtain_from_lead(weights.path)
    own = {
        **datasets,
        **inputs.fetch_models(),
        **worker_fields(context, inputs),
        "reward_hosts": find_reward_hosts(context, lead.config),
        "resume_from": resume,
        "weights": weights,
    }
    return write_job(context, lead.model_copy(update=own))
