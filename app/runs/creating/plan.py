"""Plans of runs: what a run is to do and with which devices, before it is stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from anneal.contracts.backends import BACKEND_RULES, BackendRules
from anneal.contracts.errors import FieldError
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.runs.placement import Resources
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
    requirements: Mapping[str, Any] = field(default_factory=dict)
    """Requirements on a device (`requirements.build_requirements`)."""

    @property
    def rules(self) -> BackendRules:
        """Rules of its backend."""
        return BACKEND_RULES[self.backend]

    @property
    def requires_sharding(self) -> bool:
        """True if its model is divided among its devices whatever its estimate is."""
        resources = self.resources
        return resources.devices > 1 and (resources.sharding == "full" or resources.expert_parallel > 1)

    @property
    def device_kind(self) -> str | None:
        """Kind of device that it needs; None: any, preferably a GPU."""
        rules, resources = self.rules, self.resources
        # A cluster has nodes of every kind, and may add some: without a request, a run would go to the CPUs of a GPU
        # node.
        is_gpu = rules.machine_matters and rules.starts_workers
        needs_gpu = is_gpu or resources.gpu is not None or self.gpu_fields
        return resources.kind or ("cuda" if needs_gpu else None)

    @property
    def gpu_fields(self) -> list[str]:
        """Fields of its configuration whose values need a GPU."""
        if not self.rules.machine_matters:
            return []
        conflicts = machine_conflicts(self.config, set(self.user_set_fields), DeviceCapabilities(kind="cpu"))
        return [conflict.field for conflict in conflicts]

    @classmethod
    def derived_from(
        cls,
        parent: Run,
        *,
        config: TrainingConfig,
        user_set_fields: frozenset[str],
        resources: Resources,
        requirements: Mapping[str, Any] | None = None,
        task: RunTask = RunTask.train,
        extra_eval_datasets: Mapping[str, str] | None = None,
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
            extra_eval_datasets=extra_eval_datasets or {},
            base_run_id=parent.base_run_id,
            reward_run_ids=reward_run_ids,
            requirements=requirements or {},
        )


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """Run to insert. The caller has locked what it refers to."""

    plan: RunPlan
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
        reason: str,
        checkpoint: Checkpoint | None,
        of_weights: str | None = None,
        name: str | None = None,
        warnings: Sequence[FieldError] = (),
    ) -> Self:
        """Return a run that continues or exports another one, from a checkpoint or from the start.

        From the start, a prediction with the weights of a checkpoint has the id of that (`of_weights`) instead.
        """
        return cls(
            plan=plan,
            experiment_id=parent.experiment_id,
            name=name or parent.name,
            tags=parent.tags,
            priority=parent.priority,
            max_restarts=parent.max_restarts,
            warnings=warnings,
            parent_run_id=parent.id,
            resume_checkpoint_id=checkpoint.id if checkpoint else of_weights,
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
            "requirements": dict(plan.requirements),
            "priority": self.priority,
            "max_restarts": self.max_restarts,
            "parent_run_id": self.parent_run_id,
            "resume_checkpoint_id": self.resume_checkpoint_id,
            "current_step": self.current_step,
            "current_epoch": self.current_epoch,
        }
