"""Errors that a user or operator can fix."""


class SetupError(Exception):
    """Problem with the home folder or the machine that the user can fix; the message says how."""
