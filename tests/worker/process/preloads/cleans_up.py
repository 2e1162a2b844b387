"""Makes temporary folders at import and removes them when its process exits, as W&B does."""

import atexit
import tempfile

finalized = tempfile.TemporaryDirectory()
registered = tempfile.TemporaryDirectory()
atexit.register(registered.cleanup)
