"""What an error of a second storage means, in a clause of our own: libraries name hosts, users and keys in theirs."""

import errno

_SILENT = {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ESTALE, errno.ENOTCONN}
_FULL = {errno.ENOSPC, errno.EDQUOT}
# By name: what raises these is installed only where somebody wants it.
_SILENT_TYPES = {"HTTPClientError", "ConnectionError", "ClientConnectionError", "gaierror"}
_NO_CREDENTIALS_TYPES = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}


def meaning(error: Exception) -> tuple[str, bool]:
    """What `error`, of whatever library, tells about a second storage; and whether nothing at all answers there."""
    names = {kind.__name__ for kind in type(error).__mro__}
    number = error.errno if isinstance(error, OSError) else None
    if names & _NO_CREDENTIALS_TYPES:
        return "this worker has no credentials for it", True
    if isinstance(error, PermissionError) or number == errno.EROFS:
        return "it refuses this worker: look at its credentials, or its permissions there", False
    if isinstance(error, TimeoutError) or names & _SILENT_TYPES or number in _SILENT:
        return "it does not answer", True
    if isinstance(error, FileNotFoundError):
        return "there is no such place", False
    if number in _FULL:
        return "it has no room left", False
    return f"it answers with an error ({type(error).__name__})", False
