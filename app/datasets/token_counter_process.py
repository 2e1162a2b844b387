"""`python -m app.datasets.token_counter_process FILE BYTES`: count tokens with a tokenizer.json of at most BYTES bytes.

The tokenizer is untrusted and may expand a short text to any length. Each line of standard input is a JSON list of
texts; for each line the process prints a list of their token counts. The first line of output is empty and means
that the process is ready.
"""

import json
import sys
from pathlib import Path
from typing import Any

from app.infra.process.sandbox import run_confined

MOST_MEMORY = 3 * 1024**3 // 2
"""Memory limit in bytes; loading a vocabulary of half a million tokens, larger than most, takes about 550 MB."""


def _count_batches(path: str, most_bytes: int) -> None:
    tokenizer = _load_tokenizer(path, most_bytes)
    out = sys.stdout.buffer
    out.write(b"\n")
    out.flush()
    for line in sys.stdin.buffer:
        encoded = tokenizer.encode_batch_fast(json.loads(line), add_special_tokens=False)
        out.write(json.dumps([len(encoding) for encoding in encoded]).encode() + b"\n")
        out.flush()


def _load_tokenizer(path: str, most_bytes: int) -> Any:
    from tokenizers import Tokenizer

    if Path(path).stat().st_size > most_bytes:
        raise ValueError(f"its tokenizer.json has more than {most_bytes:,} bytes")
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(f"its tokenizer.json cannot be read ({str(error)[:200]})") from None
    # A tokenizer may have been saved with truncation and padding enabled.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


if __name__ == "__main__":
    sys.exit(run_confined(lambda: _count_batches(sys.argv[1], int(sys.argv[2])), MOST_MEMORY))
