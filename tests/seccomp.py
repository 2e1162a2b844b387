"""System calls that the kernel refuses to this process and to what it starts, as in a sandbox."""

import ctypes
import os
import sys
from collections.abc import Sequence

PIDFD_CALLS = (424, 434)
"""`pidfd_send_signal` and `pidfd_open`, of the same numbers on every architecture."""
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_LOAD_CALL_NUMBER, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def refuse(calls: Sequence[int], number: int) -> None:
    """From now on and for ever, these system calls fail with error `number`."""
    jumps = [_Instruction(_JUMP_IF_EQUAL, len(calls) - at, 0, call) for at, call in enumerate(calls)]
    ends = [_Instruction(_RETURN, 0, 0, _ALLOW), _Instruction(_RETURN, 0, 0, _ERRNO | number)]
    instructions = [_Instruction(_LOAD_CALL_NUMBER, 0, 0, 0), *jumps, *ends]
    program = _Program(len(instructions), (_Instruction * len(instructions))(*instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    refuse(PIDFD_CALLS, int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
