"""`/openai/v1/fine_tuning/alpha/graders`: graders are validated here; only processes that train run them."""

from fastapi import APIRouter

from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.openai.graders import JUDGE_URL, GraderValidate, GraderValidated, to_rewards
from app.api.errors import ApiError, invalid
from app.runs.creating.validation.rewards import reward_errors

router = APIRouter(prefix="/fine_tuning/alpha/graders")


@router.post("/validate")
async def validate_grader(body: GraderValidate) -> GraderValidated:
    """Validate a grader as the creation of a job does, apart from its host and the columns of the data."""
    rewards, errors = to_rewards(body.grader, JUDGE_URL, "grader")
    errors += [FieldError(field="grader", code=code, message=message) for code, message in reward_errors(rewards)]
    if errors:
        raise invalid(errors)
    return GraderValidated(grader=body.grader)


@router.post("/run", include_in_schema=False)
async def run_grader() -> None:
    """Refuse to run a grader: the libraries that compute scores are with the workers."""
    raise ApiError(
        422,
        "not_supported",
        "Graders do not run here, because only workers have what computes their scores; validate it, and score the "
        "answers of a model by the same rewards with POST /v1/runs/predict.",
    )
