"""Errors that a user or operator can fix."""


class SetupError(Exception):
    """Problem with the home folder or the machine that the user can fix; the message says how."""


class TryLater(SetupError):
    """Problem that may end without a change, such as a database that is unavailable; the message says which."""


EXIT_TRY_LATER = 75
"""Exit code of a program that ended with `TryLater`, as in `sysexits.h`."""
