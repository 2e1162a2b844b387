"""Reward of type `http`: a service scores rows that are posted to it, several in a request.

Does not import torch.
"""

from collections.abc import Sequence
from typing import Any

from anneal.contracts.rewards import HttpReward
from worker.training.reward_services.service_client import BadResponse, CallContext, Post
from worker.training.reward_services.service_scorer import Row, ServiceScorer, read_score


class ScoringService(ServiceScorer):
    """Scorer that posts `{"rows": […]}` and reads `{"scores": […]}`, with null for a row that has no score."""

    def __init__(self, reward: HttpReward, name: str, context: CallContext) -> None:
        super().__init__(reward, name, context, url=reward.url, rows_per_call=reward.rows_per_request)

    async def score_rows(self, post: Post, rows: Sequence[Row]) -> list[float | None]:
        body = {
            "rows": [{"prompt": row.prompt, "completion": row.completion, "reference": row.reference} for row in rows]
        }
        try:
            return _read_scores(await post(body), len(rows))
        except BadResponse:
            return _read_scores(await post(body), len(rows))


def _read_scores(response: Any, count: int) -> list[float | None]:
    scores = response.get("scores") if isinstance(response, dict) else None
    if not isinstance(scores, list) or len(scores) != count:
        raise BadResponse(f'the service did not answer with {{"scores": […]}} for {count} rows')
    read = [read_score(score) for score in scores]
    if any(number is None and score is not None for number, score in zip(read, scores, strict=True)):
        raise BadResponse("the service gave scores that are neither a finite number nor null")
    return read
