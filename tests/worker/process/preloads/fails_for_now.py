"""Dies or hangs at import, as the file that an environment variable names says, until there is no such file."""

import os
import select
import signal
from pathlib import Path

failure = Path(os.environ["HF_XET_TEST_FAILURE"])  # one of the variables that reach the zygote
how = failure.read_text() if failure.exists() else ""
if how == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "hangs":
    select.select([], [], [], 600)
