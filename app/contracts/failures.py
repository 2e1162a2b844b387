"""Details of failures: facts that the trainer sends with an error, so that nothing is read out of its message."""

from pydantic import BaseModel, Field


class AnomalyDetails(BaseModel):
    """Details of the errors `non_finite_loss` and `loss_spike`."""

    summary: str = Field(description="What happened, in sentences without advice.")
    in_evaluation: bool = Field(default=False, description="True if an evaluation was non-finite, not a step.")
    singled_out: list[int] = Field(
        default_factory=list, description="Rows of the dataset that fail alone, counted from 0; empty if none does."
    )
