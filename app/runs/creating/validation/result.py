"""Result of validating a request for a run."""

from dataclasses import dataclass, field

from anneal.contracts.errors import FieldError
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.stored_quantization import StoredQuantization
from app.api.errors import ApiError, invalid
from app.runs.creating.plan import RunPlan


@dataclass
class ValidationResult:
    """Result of validating a request: its plan, or errors."""

    errors: list[FieldError] = field(default_factory=list)
    warnings: list[FieldError] = field(default_factory=list)
    plan: RunPlan | None = None
    """Plan of the run that the request asks for; set if there are no errors."""
    effective: TrainingConfig | None = None
    longest_sequence: int | None = None
    """Maximum sequence length of the base model; None if its files are not here or do not say."""
    stored_quantization: StoredQuantization | None = None
    """Quantization of the weights in the base model's files; None if there is none, or they are not here."""
    base_run_id: str | None = None
    reward_run_ids: list[str] = field(default_factory=list)

    def require_plan(self) -> RunPlan:
        """Return the plan; for a request with errors raise 422 with all of them."""
        if self.plan is None:
            raise validation_failed(self.errors)
        return self.plan

    def has_error(self, name: str) -> bool:
        """Return True if a field has an error."""
        return any(error.field == name for error in self.errors)

    def add_error(self, name: str, code: str, message: str) -> None:
        """Add an error."""
        self.errors.append(FieldError(field=name, code=code, message=message))


def validation_failed(errors: list[FieldError]) -> ApiError:
    """Build a 422 with all errors; its code is that of the errors if they all have the same."""
    codes = {error.code for error in errors}
    return invalid(errors, code=codes.pop() if len(codes) == 1 else "invalid_request")
