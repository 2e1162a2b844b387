"""`python -m app.datasets.tokens_process FILE BYTES`: how many tokens texts have, by a tokenizer.json of BYTES at most.

A tokenizer may make of a short text one of any length, and it comes from a stranger. Standard input has a JSON list
of texts a line; for each comes a line with the list of their counts. The first line of all says that it is ready.
"""

import json
import sys
from pathlib import Path
from typing import Any

from app.datasets.child import confined

MOST_MEMORY = 3 * 1024**3 // 2
"""To load a vocabulary of half a million words, larger than most, takes some 550 MB."""


def _count(path: str, most_bytes: int) -> None:
    tokenizer = _load(path, most_bytes)
    out = sys.stdout.buffer
    out.write(b"\n")
    out.flush()
    for line in sys.stdin.buffer:
        encoded = tokenizer.encode_batch_fast(json.loads(line), add_special_tokens=False)
        out.write(json.dumps([len(encoding) for encoding in encoded]).encode() + b"\n")
        out.flush()


def _load(path: str, most_bytes: int) -> Any:
    from tokenizers import Tokenizer

    if Path(path).stat().st_size > most_bytes:
        raise ValueError(f"its tokenizer.json has more than {most_bytes:,} bytes")
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(f"its tokenizer.json cannot be read ({str(error)[:200]})") from None
    # A tokenizer may have been saved with the cut and the padding of its last training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


if __name__ == "__main__":
    sys.exit(confined(lambda: _count(sys.argv[1], int(sys.argv[2])), MOST_MEMORY))
