"""Descriptions of errors of the remote store, in our own words: libraries name hosts, users and keys in theirs."""

import errno

_SILENT = {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ESTALE, errno.ENOTCONN}
_FULL = {errno.ENOSPC, errno.EDQUOT}
# By name, because the packages that raise these are optional.
_SILENT_TYPES = {"HTTPClientError", "ConnectionError", "ClientConnectionError", "gaierror"}
_NO_CREDENTIALS_TYPES = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}


def meaning(error: Exception) -> tuple[str, bool]:
    """Describe an error of the remote store in a clause, and return True with it if nothing answers there at all."""
    names = {kind.__name__ for kind in type(error).__mro__}
    number = error.errno if isinstance(error, OSError) else None
    if names & _NO_CREDENTIALS_TYPES:
        return "this worker has no credentials for it", True
    if isinstance(error, PermissionError) or number == errno.EROFS:
        return "it refuses this worker: check its credentials and its permissions there", False
    if isinstance(error, TimeoutError) or names & _SILENT_TYPES or number in _SILENT:
        return "it does not answer", True
    if isinstance(error, FileNotFoundError):
        return "the location does not exist", False
    if number in _FULL:
        return "it has no space left", False
    return f"it answers with an error ({type(error).__name__})", False
