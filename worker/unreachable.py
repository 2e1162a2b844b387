"""What an error of a second storage means, in a clause of our own: libraries name hosts, users and keys in theirs."""

import errno

_SILENT = {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ESTALE, errno.ENOTCONN}
_FULL = {errno.ENOSPC, errno.EDQUOT}
# By name: what raises these is installed only where somebody wants it.
_SILENT_TYPES = {"HTTPClientError", "ConnectionError", "ClientConnectionError", "gaierror"}
_NO_CREDENTIALS_TYPES = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}


class Unreachable(Exception):
    """The second storage does not answer, or not to us; what is there may be as good as ever.

    Its text is a clause that anybody may read.
    """

    def __init__(self, clause: str, is_silent: bool = False) -> None:
        super().__init__(clause)
        self.is_silent = is_silent
        """Whether nothing at all answers, so that the next request need not be tried."""


def of(error: Exception) -> Unreachable:
    """What `error`, of whatever library, tells about a second storage."""
    names = {kind.__name__ for kind in type(error).__mro__}
    number = error.errno if isinstance(error, OSError) else None
    if names & _NO_CREDENTIALS_TYPES:
        return Unreachable("this worker has no credentials for it", is_silent=True)
    if isinstance(error, PermissionError) or number == errno.EROFS:
        return Unreachable("it refuses this worker: look at its credentials, or its permissions there")
    if isinstance(error, TimeoutError) or names & _SILENT_TYPES or number in _SILENT:
        return Unreachable("it does not answer", is_silent=True)
    if isinstance(error, FileNotFoundError):
        return Unreachable("there is no such place")
    if number in _FULL:
        return Unreachable("it has no room left")
    return Unreachable(f"it answers with an error ({type(error).__name__})")
