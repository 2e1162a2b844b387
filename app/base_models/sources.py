"""Where a process looks for models, so that the API knows whether a worker finds one that it does not find itself."""

import hashlib
import json
import os

from app.config import Settings, model_source_environment
from app.infra.process.identity import boot_id, pid_namespace


def source_fingerprint(settings: Settings) -> str | None:
    """Return a digest of where training processes of this process look for models; None if that is not known here.

    Two processes with the same digest are of one user of one machine or container, with the same folders, the same
    cache of the hub and the same way to the hub: what one does not find, the other does not find either.
    """
    if settings.trainer_user is not None:
        return None  # another user has another home, with a cache of its own
    places = [
        boot_id(),
        pid_namespace(),
        os.getuid(),
        [str(root) for root in settings.model_roots],
        settings.allow_hub,
        model_source_environment(),
    ]
    return hashlib.sha256(json.dumps(places).encode()).hexdigest()
