"""`python -m tests.code_program CODE ARGUMENTS…`: run code as `python -c` does, in a process that tests can fork."""

import sys

if __name__ == "__main__":
    del sys.argv[0]
    exec(compile(sys.argv[0], "<code>", "exec"), {"__name__": "__main__"})
