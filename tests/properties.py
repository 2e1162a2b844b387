"""Hypothesis settings of the property tests: the same examples in every suite, new ones with `make properties`."""

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings

TIMES = {"": 1, "long": 25}[os.environ.get("HYPOTHESIS_PROFILE", "")]
"""Factor on the number of examples in the suite."""

# A failure of the suite belongs to the change that is tested, not to the examples that one machine happened to draw.
SUITE_PROFILE = "suite"
settings.register_profile(SUITE_PROFILE, derandomize=TIMES == 1, deadline=None)


def examples(most: int, **more: Any) -> settings:
    """Return settings with a reproduction blob for failures."""
    return settings(
        max_examples=most * TIMES,
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
