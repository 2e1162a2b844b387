"""Errors that a user or operator can fix."""


class SetupError(Exception):
    """Problem with the home folder or the machine that the user can fix; the message says how."""


class PortInUse(SetupError):
    """Port of an embedded server that was free when chosen but that another program took."""
