"""Limit on failed authentications per address."""

from app.api.rate_limit import RateLimit

FAILURE_BURST = 20
FAILURE_INTERVAL_SECONDS = 3.0


class FailureLimit(RateLimit):
    """Rate limit on wrong keys per address."""

    def __init__(self) -> None:
        super().__init__(FAILURE_BURST, FAILURE_INTERVAL_SECONDS)
