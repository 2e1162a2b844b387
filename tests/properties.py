"""How many examples the property tests try; `HYPOTHESIS_PROFILE=long` tries many more."""

import os
from typing import Any

from hypothesis import HealthCheck, settings

_TIMES = {"": 1, "long": 25}[os.environ.get("HYPOTHESIS_PROFILE", "")]


def examples(most: int, **more: Any) -> settings:
    """Settings of one property: new examples in each session, and what reproduces a failing one in its report."""
    return settings(
        max_examples=most * _TIMES,
        deadline=None,
        derandomize=False,
        print_blob=True,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.function_scoped_fixture,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
        **more,
    )
