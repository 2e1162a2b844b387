"""What the demo stops at."""


class DemoError(Exception):
    """Something did not hold; the text says what, and where to look."""
