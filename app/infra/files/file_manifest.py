"""Manifest of a stored folder: the size and SHA-256 of each file in it."""

import json

from app.infra.files.untrusted_folder import refuse_outside

MANIFEST = "manifest.json"
"""Name of the manifest inside the folder of a checkpoint."""
MAX_BYTES = 16 * 2**20
"""Maximum size of a manifest."""


def parse_manifest(text: bytes) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of each file that a manifest names.

    Raises:
        ValueError: The manifest is invalid, or a name in it leads out of the folder (`OutsideStorage`).
    """
    try:
        files = {name: (int(facts["bytes"]), str(facts["sha256"])) for name, facts in json.loads(text)["files"].items()}
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is invalid ({type(error).__name__})") from error
    for name in files:
        refuse_outside(name)
    return files
