"""Result of validating a request for a run."""

from dataclasses import dataclass, field

from anneal.contracts.errors import FieldError
from anneal.contracts.run_task import RunTask
from anneal.contracts.schemas.runs.placement import Resources
from anneal.contracts.schemas.runs.requests import RunCreate
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.stored_quantization import StoredQuantization
from app.api.errors import ApiError, invalid
from app.runs.creating.plan import RunPlan


@dataclass
class ValidationResult:
    """Result of validating a request; `config` is set if there are no errors."""

    errors: list[FieldError] = field(default_factory=list)
    warnings: list[FieldError] = field(default_factory=list)
    config: TrainingConfig | None = None
    user_set_fields: list[str] = field(default_factory=list)
    resources: Resources = field(default_factory=Resources)
    """Requested resources with a number of devices; set if there are no errors."""
    effective: TrainingConfig | None = None
    longest_sequence: int | None = None
    """Maximum sequence length of the base model; None if its files are not here or do not say."""
    stored_quantization: StoredQuantization | None = None
    """Quantization of the weights in the base model's files; None if there is none, or they are not here."""
    base_run_id: str | None = None
    reward_run_ids: list[str] = field(default_factory=list)

    def build_plan(self, request: RunCreate, task: RunTask = RunTask.train) -> RunPlan:
        """Return the plan of the run that a request without errors asks for; otherwise raise 422 with all errors."""
        if self.errors or self.config is None:
            raise validation_failed(self.errors)
        return RunPlan(
            backend=request.backend,
            config=self.config,
            user_set_fields=frozenset(self.user_set_fields),
            resources=self.resources,
            task=task,
            dataset_id=request.dataset_id,
            eval_dataset_id=request.eval_dataset_id,
            extra_eval_datasets=request.extra_eval_datasets,
            base_run_id=self.base_run_id,
            reward_run_ids=self.reward_run_ids,
        )

    def add_error(self, name: str, code: str, message: str) -> None:
        """Add an error."""
        self.errors.append(FieldError(field=name, code=code, message=message))


def validation_failed(errors: list[FieldError]) -> ApiError:
    """Build a 422 with all errors; its code is that of the errors if they all have the same."""
    codes = {error.code for error in errors}
    return invalid(errors, code=codes.pop() if len(codes) == 1 else "invalid_request")
