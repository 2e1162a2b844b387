"""The key file, and what is sealed with it: AES-256-GCM with the name as associated data."""

import base64
import binascii
import hashlib
import os
import secrets
from pathlib import Path

from app.config import Settings
from app.home import HomeError, make_private_folder

_KEY_BYTES = 32
_NONCE_BYTES = 12
_OTHERS = 0o027
"""Modes that a key file may not have: writable by its group, or anything for everybody."""


class KeyringError(Exception):
    """A secret cannot be sealed or opened; the text says what to do, and nothing of the value."""


class Keyring:
    """The keys of a key file, one a line in base64: the first one seals, each of them opens.

    To take a new key into use: put it into the first line, bring the file to every machine, run `anneal secrets
    rotate`, then take the old line out.
    """

    def __init__(self, keys: list[bytes]) -> None:
        self._keys = {_id_of(key): key for key in keys}
        self.sealing_id = _id_of(keys[0])
        """Id of the key that seals."""

    @classmethod
    def of(cls, settings: Settings, make: bool = False) -> "Keyring":
        """The keys of this machine; with `make` a first one, where there is no file yet. Raises KeyringError."""
        path = settings.secret_key_path
        try:
            if make and not path.exists():
                _make(path)
            return cls(_read(path))
        except FileNotFoundError:
            raise KeyringError(
                f"There is no key file {path}: bring the one with which the secrets were sealed, or set "
                "ANNEAL_SECRET_KEY_FILE to where it is."
            ) from None
        except (OSError, HomeError) as error:
            raise KeyringError(f"The key file {path} cannot be used: {error}.") from None

    def seal(self, name: str, value: str) -> bytes:
        """What to keep of a value; it opens under this name and key alone."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = secrets.token_bytes(_NONCE_BYTES)
        box = AESGCM(self._keys[self.sealing_id])
        return nonce + box.encrypt(nonce, value.encode(), _bound_to(name, self.sealing_id))

    def open(self, name: str, key_id: str, sealed: bytes) -> str:
        """The value again. Raises KeyringError."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key = self._keys.get(key_id)
        if key is None:
            raise KeyringError(
                f"The secret `{name}` was sealed with the key {key_id}, which this machine's key file does not have: "
                "bring it there, or set the secret again."
            )
        try:
            return AESGCM(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], _bound_to(name, key_id)).decode()
        except (InvalidTag, ValueError):
            raise KeyringError(f"The secret `{name}` was changed in the database: set it again.") from None


def _bound_to(name: str, key_id: str) -> bytes:
    return f"anneal secret v1\0{key_id}\0{name}".encode()


def _id_of(key: bytes) -> str:
    return hashlib.sha256(b"anneal key id\0" + key).hexdigest()[:12]


def _read(path: Path) -> list[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(file.fileno()).st_mode & _OTHERS:
            raise KeyringError(f"Others may read the key file {path}, or its group write it: chmod 600 {path}")
        lines = file.read(64 * 1024).split()
    try:
        keys = [base64.b64decode(line, validate=True) for line in lines]
    except binascii.Error:
        keys = []
    if not keys or any(len(key) != _KEY_BYTES for key in keys):
        raise KeyringError(
            f"The key file {path} must have one key a line, {_KEY_BYTES} bytes in base64: "
            f"`openssl rand -base64 {_KEY_BYTES}` makes one."
        )
    return keys


def _make(path: Path) -> None:
    """A key file with one key, whole or not at all; whoever is second takes that of the first."""
    make_private_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(base64.b64encode(secrets.token_bytes(_KEY_BYTES)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            pass
    finally:
        temporary.unlink()
