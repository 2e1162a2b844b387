"""Key file and encryption of secrets: AES-256-GCM with the name as associated data."""

import base64
import binascii
import hashlib
import os
import secrets
from pathlib import Path

from app.config import Settings
from app.infra.errors import SetupError
from app.infra.private_files import make_private_folder

_KEY_BYTES = 32
_NONCE_BYTES = 12
_FORBIDDEN_MODES = 0o027
"""Forbidden mode bits of a key file: group write, and all access for others."""


class KeyringError(Exception):
    """Raised if a secret cannot be encrypted or decrypted; the message says what to do and omits the value."""


class Keyring:
    """Keys of a key file, one per line in base64: the first key encrypts, all keys decrypt.

    To introduce a new key, insert it as the first line, copy the file to every machine, run `anneal secrets rotate`,
    then remove the old line.
    """

    def __init__(self, keys: list[bytes]) -> None:
        self._keys = {_id_of(key): key for key in keys}
        self.sealing_id = _id_of(keys[0])
        """Id of the encryption key."""

    @classmethod
    def from_settings(cls, settings: Settings, make: bool = False) -> "Keyring":
        """Load the keys of this machine; with `make`, create the file if it is missing. Raises KeyringError."""
        path = settings.secret_key_path
        try:
            if make and not path.exists():
                _make_key_file(path)
            return cls(_read_keys(path))
        except FileNotFoundError:
            raise KeyringError(
                f"There is no key file {path}: copy the key file that encrypted the secrets to this path, or set "
                "ANNEAL_SECRET_KEY_FILE to its path."
            ) from None
        except (OSError, SetupError) as error:
            raise KeyringError(f"The key file {path} cannot be used: {error}.") from None

    def seal_value(self, name: str, value: str) -> bytes:
        """Encrypt a value; it can be decrypted only with the same name and key."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = secrets.token_bytes(_NONCE_BYTES)
        box = AESGCM(self._keys[self.sealing_id])
        return nonce + box.encrypt(nonce, value.encode(), _bound_to(name, self.sealing_id))

    def open_sealed(self, name: str, key_id: str, sealed: bytes) -> str:
        """Decrypt a value. Raises KeyringError."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key = self._keys.get(key_id)
        if key is None:
            raise KeyringError(
                f"The secret `{name}` was encrypted with the key {key_id}, which is not in this machine's key file: "
                "add the key to the file, or set the secret again."
            )
        try:
            return AESGCM(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], _bound_to(name, key_id)).decode()
        except (InvalidTag, ValueError):
            raise KeyringError(f"The secret `{name}` was modified in the database: set it again.") from None


def _bound_to(name: str, key_id: str) -> bytes:
    return f"anneal secret v1\0{key_id}\0{name}".encode()


def _id_of(key: bytes) -> str:
    return hashlib.sha256(b"anneal key id\0" + key).hexdigest()[:12]


def _read_keys(path: Path) -> list[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(file.fileno()).st_mode & _FORBIDDEN_MODES:
            raise KeyringError(
                f"The key file {path} is accessible to others or writable by its group: run chmod 600 {path}"
            )
        lines = file.read(64 * 1024).split()
    try:
        keys = [base64.b64decode(line, validate=True) for line in lines]
    except binascii.Error:
        keys = []
    if not keys or any(len(key) != _KEY_BYTES for key in keys):
        raise KeyringError(
            f"The key file {path} must have one key per line, {_KEY_BYTES} bytes in base64; "
            f"generate a key with `openssl rand -base64 {_KEY_BYTES}`."
        )
    return keys


def _make_key_file(path: Path) -> None:
    """Create a key file with one key atomically; if another process was first, its file is kept."""
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
