"""Plans of runs: what a run is to do and with which devices, before it is stored."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from anneal.contracts.backends import BACKEND_RULES, BackendRules
from anneal.contracts.errors import FieldError
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.runs.placement import ResourceRequest, Resources
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import DeviceCapabilities, machine_conflicts
from app.infra.ids import new_id
from app.tables.checkpoints import Checkpoint
from app.tables.runs import Run


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Validated configuration of a run, with its data and its devices."""

    backend: str
    config: TrainingConfig
    user_set_fields: frozenset[str]
    """Fields of the configuration that a user has set; the others may be replaced by what a machine supports."""
    resources: Resources
    task: RunTask = RunTask.train
    dataset_id: str | None = None
    eval_dataset_id: str | None = None
    extra_eval_datasets: Mapping[str, str] = field(default_factory=dict)
    """Ids of datasets by name."""
    base_run_id: str | None = None
    """Run whose output is the base model."""
    reward_run_ids: Sequence[str] = ()
    """Other runs whose outputs are its reward models."""

    @property
    def rules(self) -> BackendRules:
        """Rules of its backend."""
        return BACKEND_RULES[self.backend]

    @property
    def device_kind(self) -> str | None:
        """Kind of device that it needs; None: any, preferably a GPU."""
        return device_kind(self.rules, self.config, self.user_set_fields, self.resources)

    @classmethod
    def derived_from(
        cls,
        parent: Run,
        *,
        config: TrainingConfig,
        user_set_fields: frozenset[str],
        resources: Resources,
        task: RunTask = RunTask.train,
        extra_eval_datasets: Mapping[str, str],
        reward_run_ids: Sequence[str] = (),
    ) -> Self:
        """Return a plan with the data and the base model of a stored run."""
        return cls(
            backend=parent.backend,
            config=config,
            user_set_fields=user_set_fields,
            resources=resources,
            task=task,
            dataset_id=parent.dataset_id,
            eval_dataset_id=parent.eval_dataset_id,
            extra_eval_datasets=extra_eval_datasets,
            base_run_id=parent.base_run_id,
            reward_run_ids=reward_run_ids,
        )


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """Run to insert. The caller has locked what it refers to."""

    plan: RunPlan
    requirements: Mapping[str, Any]
    """Requirements on a device (`validation.resources.requirements`)."""
    experiment_id: str
    name: str
    id: str = field(default_factory=lambda: new_id("run"))
    tags: Sequence[str] = ()
    priority: int = 0
    max_restarts: int = 3
    warnings: Sequence[FieldError] = ()
    parent_run_id: str | None = None
    resume_checkpoint_id: str | None = None
    current_step: int = 0
    current_epoch: float = 0.0
    reason: str = "created"
    """Reason of its first event."""

    @classmethod
    def derived_from(
        cls,
        parent: Run,
        plan: RunPlan,
        *,
        requirements: Mapping[str, Any],
        reason: str,
        checkpoint: Checkpoint | None,
        name: str | None = None,
        warnings: Sequence[FieldError] = (),
    ) -> Self:
        """Return a run that continues or exports another one, from a checkpoint or from the start."""
        return cls(
            plan=plan,
            requirements=requirements,
            experiment_id=parent.experiment_id,
            name=name or parent.name,
            tags=parent.tags,
            priority=parent.priority,
            max_restarts=parent.max_restarts,
            warnings=warnings,
            parent_run_id=parent.id,
            resume_checkpoint_id=checkpoint.id if checkpoint else None,
            current_step=checkpoint.step if checkpoint else 0,
            current_epoch=checkpoint.epoch if checkpoint else 0.0,
            reason=reason,
        )

    def column_values(self) -> dict[str, Any]:
        """Return the values of the columns of its row."""
        plan = self.plan
        return {
            "id": self.id,
            "task": plan.task,
            "experiment_id": self.experiment_id,
            "name": self.name,
            "tags": list(self.tags),
            "backend": plan.backend,
            "dataset_id": plan.dataset_id,
            "eval_dataset_id": plan.eval_dataset_id,
            "config": plan.config.model_dump(mode="json"),
            "user_set_fields": sorted(plan.user_set_fields),
            "warnings": [warning.model_dump() for warning in self.warnings],
            "base_run_id": plan.base_run_id,
            "devices_needed": plan.resources.devices,
            "hosts_needed": plan.resources.hosts,
            "resources": plan.resources.model_dump(),
            "requirements": dict(self.requirements),
            "priority": self.priority,
            "max_restarts": self.max_restarts,
            "parent_run_id": self.parent_run_id,
            "resume_checkpoint_id": self.resume_checkpoint_id,
            "current_step": self.current_step,
            "current_epoch": self.current_epoch,
        }


def device_kind(
    rules: BackendRules, config: TrainingConfig, user_set_fields: Iterable[str], resources: Resources | ResourceRequest
) -> str | None:
    """Return the kind of device that a run needs; None: any, preferably a GPU."""
    # A cluster has nodes of every kind, and may add some: without a request, a run would go to the CPUs of a GPU node.
    is_gpu = rules.machine_matters and rules.starts_workers
    needs_gpu = is_gpu or resources.gpu is not None or gpu_fields(rules, config, set(user_set_fields))
    return resources.kind or ("cuda" if needs_gpu else None)


def gpu_fields(rules: BackendRules, config: TrainingConfig, user_set_fields: set[str]) -> list[str]:
    """Return the fields of the configuration whose values need a GPU."""
    if not rules.machine_matters:
        return []
    return [problem.field for problem in machine_conflicts(config, user_set_fields, DeviceCapabilities(kind="cpu"))]
