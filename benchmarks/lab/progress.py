"""Reports on stderr what runs, which distinguishes a slow benchmark from one that hangs."""

import contextlib
import sys
import time
from collections.abc import Iterator


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Writes to stderr what runs, and how long it took."""
    print(what, file=sys.stderr, flush=True)
    began_s = time.perf_counter()
    try:
        yield
    finally:
        print(f"  {time.perf_counter() - began_s:.1f} s", file=sys.stderr, flush=True)
