"""The training process: the only code that imports torch."""

import logging

# On import, bitsandbytes suggests installing a package that downloads kernels, which users take for a failure.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
