"""structlog without rich and pygments, which it imports for colored tracebacks that are not used here.

Importing them took a third of the API's startup time.
"""

import sys

_is_loaded = "rich" in sys.modules
if not _is_loaded:
    sys.modules["rich"] = None  # type: ignore[assignment]
try:
    from structlog.contextvars import bind_contextvars, bound_contextvars, merge_contextvars
    from structlog.processors import TimeStamper, format_exc_info
    from structlog.stdlib import ExtraAdder, ProcessorFormatter, add_log_level, add_logger_name
finally:
    if not _is_loaded:
        del sys.modules["rich"]

__all__ = [
    "ExtraAdder",
    "ProcessorFormatter",
    "TimeStamper",
    "add_log_level",
    "add_logger_name",
    "bind_contextvars",
    "bound_contextvars",
    "format_exc_info",
    "merge_contextvars",
]
