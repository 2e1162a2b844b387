"""Takes its process down at import, as a library built for another processor does."""

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
