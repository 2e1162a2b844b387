"""How many examples the property tests try; `HYPOTHESIS_PROFILE=long` tries many more."""

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings

TIMES = {"": 1, "long": 25}[os.environ.get("HYPOTHESIS_PROFILE", "")]
"""How many times as many as in the suite."""


def examples(most: int, **more: Any) -> settings:
    """Settings of one property: new examples in each session, and what reproduces a failing one in its report."""
    return settings(
        max_examples=most * TIMES,
        deadline=None,
        derandomize=False,
        print_blob=True,
        # In the suite a failing example is told as it was found: making it small may take longer than a test may.
        phases=[Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if TIMES > 1 else [])],
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.function_scoped_fixture,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
        **more,
    )
