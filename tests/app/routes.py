"""Every call that an application answers, read from its routes: included routers and mounts too."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from starlette.routing import Mount

SAFE = {"GET", "HEAD", "OPTIONS"}
UNSAFE = ("POST", "PUT", "PATCH", "DELETE")
_AN_ID = "run_" + "0" * 26


def calls(routes: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Methods and paths, with an id in place of each parameter; below a mount a path that may be anything."""
    for route in routes:
        if isinstance(route, Mount):
            below = list(calls(route.routes, prefix + route.path))
            yield from below or [("GET", f"{prefix}{route.path}/index.html")]
        elif hasattr(route, "effective_route_contexts"):
            yield from calls(route.effective_route_contexts(), prefix)
        else:
            path = re.sub(r"\{[^}]+\}", _AN_ID, prefix + route.path)
            for method in sorted(route.methods or {"GET"}):
                yield method, path


def paths(routes: Iterable[Any]) -> list[str]:
    """The paths of these calls, each once."""
    return sorted({path for _, path in calls(routes)})
