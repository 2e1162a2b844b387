"""Hypothesis settings of the property tests; `HYPOTHESIS_PROFILE=long` runs more examples."""

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings

TIMES = {"": 1, "long": 25}[os.environ.get("HYPOTHESIS_PROFILE", "")]
"""Factor on the number of examples in the suite."""


def examples(most: int, **more: Any) -> settings:
    """Return settings with new examples in each session and a reproduction blob for failures."""
    return settings(
        max_examples=most * TIMES,
        deadline=None,
        derandomize=False,
        print_blob=True,
        # Shrinking may take longer than the time limit of a test, so the suite reports the first failing example.
        phases=[Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if TIMES > 1 else [])],
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.function_scoped_fixture,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
        **more,
    )
