"""The training process: the only code that imports torch."""

import logging

# At its import bitsandbytes advises to install a package that downloads kernels; to users that reads as a failure.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
