"""Error of the demo."""


class DemoError(Exception):
    """A step of the demo failed; the text says which, and where to look."""
