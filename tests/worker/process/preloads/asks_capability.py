"""Asks for the compute capability at import, as bitsandbytes does."""

import torch

seen = torch.cuda.get_device_capability()
