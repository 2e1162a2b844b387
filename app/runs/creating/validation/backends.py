"""Backends of this service, and the requests that they can serve."""

from collections.abc import Iterator

from anneal.contracts.backends import BACKEND_RULES, BackendRules
from anneal.contracts.errors import FieldError
from anneal.contracts.schemas.runs.placement import ResourceRequest, Resources
from app.config import Settings


def shown_backends(settings: Settings) -> dict[str, BackendRules]:
    """Return the backends of this service by name, also those that lack a setting, but not those for tests."""
    return {
        name: rules
        for name, rules in BACKEND_RULES.items()
        if not rules.is_hidden or unavailable_reason(settings, rules) is None
    }


def unavailable_reason(settings: Settings, rules: BackendRules) -> str | None:
    """Return which setting a backend lacks; None if it is available."""
    if rules.setting is None or getattr(settings, rules.setting):
        return None
    variable = f"ANNEAL_{rules.setting.upper()}"
    return (
        f"backend `{rules.capabilities.name}` is not available: set {variable} in the environment of the API and "
        "restart it"
    )


def backend_problems(
    settings: Settings, rules: BackendRules, resources: Resources | ResourceRequest
) -> Iterator[FieldError]:
    """Yield why no run with these resources can be created for a backend now."""
    name = rules.capabilities.name
    if why := unavailable_reason(settings, rules):
        yield FieldError(field="backend", code="backend_not_configured", message=why)
    elif rules.starts_workers and resources.hosts > 1:
        message = f"must be 1: backend `{name}` starts one worker for a run; leave the field out"
        yield FieldError(field="resources.hosts", code="not_supported", message=message)
    elif rules.starts_workers and resources.gpu is not None:
        message = (
            "is not a resource of Ray: leave the field out, and ask for the label that Ray gives its nodes, as in "
            "`labels: [ray.io/accelerator-type=H100]`"
        )
        yield FieldError(field="resources.gpu", code="not_supported", message=message)
    elif rules.starts_workers:
        for label in resources.labels:
            if not all(label.partition("=")):
                message = f"`{label}` is not a label of Ray nodes: write `key=value`, as in `ray start --labels`"
                yield FieldError(field="resources.labels", code="not_a_ray_label", message=message)
