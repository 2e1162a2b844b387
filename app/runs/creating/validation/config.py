"""Validation of a training configuration against a backend."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from anneal.contracts.backends import BackendRules
from anneal.contracts.errors import FieldError
from anneal.contracts.methods import DEFAULT_METHOD, METHODS
from anneal.contracts.training_config.fields import TrainingConfig
from anneal.contracts.training_config.rules import DeviceCapabilities
from anneal.contracts.training_config.usual_ranges import unusual_values
from anneal.contracts.training_config.validation import config_errors, ignored_defaults


def config_problems(
    rules: BackendRules | None,
    config: Mapping[str, Any],
    has_eval_dataset: bool = False,
    dataset_format: str | None = None,
    machines: Iterable[DeviceCapabilities] = (),
) -> tuple[list[FieldError], DeviceCapabilities | None]:
    """Return a backend's errors for a configuration, and the first machine that supports it."""

    def errors_on(machine: DeviceCapabilities | None) -> list[FieldError]:
        return config_errors(plain, has_eval_dataset=has_eval_dataset, dataset_format=dataset_format, machine=machine)

    options, plain = rules.options if rules else None, _without_options(rules, config)
    errors = errors_on(None)
    fitting = None
    refused: list[FieldError] = []
    for machine in machines:
        only_here = [problem for problem in errors_on(machine) if problem not in errors]
        if not only_here:
            fitting, refused = machine, []
            break
        refused = refused or only_here
    errors += refused
    if options is not None:
        errors += _option_problems(options, config.get("extra", {}))
    if rules is not None and all(problem.field != "method" for problem in errors):
        errors += _capability_problems(rules, config)
    return errors, fitting


def default_warnings(
    rules: BackendRules | None, config: Mapping[str, Any], has_eval_dataset: bool, dataset_format: str | None
) -> list[FieldError]:
    """Return a warning for each conflict of a valid configuration that is ignored because a value is the default."""
    plain = _without_options(rules, config)
    return ignored_defaults(plain, has_eval_dataset=has_eval_dataset, dataset_format=dataset_format)


def unusual_warnings(config: TrainingConfig) -> list[FieldError]:
    """Return a warning for each value that is far outside the usual range of the method."""
    return [about_config(problem) for problem in unusual_values(config)]


def about_config(problem: FieldError) -> FieldError:
    """Return a problem of a configuration by its field in the request."""
    name = "config" if problem.field == "config" else f"config.{problem.field}"
    return FieldError(field=name, code=problem.code, message=problem.message)


def _without_options(rules: BackendRules | None, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration without the options of a backend that has its own."""
    if rules is None or rules.options is None:
        return config
    return {name: value for name, value in config.items() if name != "extra"}


def _option_problems(options: Any, extra: Any) -> list[FieldError]:
    try:
        options.model_validate(extra)
    except ValidationError as error:
        known = ", ".join(options.model_fields)
        errors = []
        for item in error.errors(include_url=False, include_input=False):
            name = ".".join(["extra", *(str(part) for part in item["loc"])])[:200]
            unknown = item["type"] == "extra_forbidden"
            reason = f"is not an option of this backend; its options are {known}" if unknown else item["msg"]
            code = "unknown_field" if unknown else "invalid"
            errors.append(FieldError(field=name, code=code, message=f"`{name}`: {reason}."))
        return errors
    return []


def _capability_problems(rules: BackendRules, config: Mapping[str, Any]) -> list[FieldError]:
    errors = []
    can = rules.capabilities
    method = config.get("method", DEFAULT_METHOD)
    if method in list(METHODS) and method not in can.supported_methods:
        methods = ", ".join(f"`{name}`" for name in can.supported_methods)
        errors.append(
            FieldError(
                field="method",
                code="not_supported_by_backend",
                message=f"Backend `{can.name}` does not support method `{method}`; use one of {methods}.",
            )
        )
    return errors
