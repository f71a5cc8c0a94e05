"""Runs cells of the table of `faults.py` concurrently, each in its own process with a deadline and on its own server.
`fault_operations` has the work of a cell.
"""

import contextlib
import faulthandler
import json
import os
import selectors
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

_STDERR_SHOWN_BYTES = 3000
#: How long before its deadline a process dumps its tracebacks.
_SAYS_WHERE_S = 2.0


@dataclass(frozen=True)
class Cell:
    """An operation under faults."""

    row: str
    column: str
    work: Callable[[Any], dict[str, Any]] = field(compare=False)
    """Runs in the cell's process, with the server assigned to it."""


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    verdict: str
    """`ok`, `error` (one of torchobj's), `untyped`, `wrong`, `hang` or `died`."""
    name: str = ""
    """The class of the error."""
    text: str = ""
    took_s: float = 0.0

    @property
    def failed(self) -> bool:
        return self.verdict not in ("ok", "error")

    def word(self) -> str:
        """Returns the text in the table."""
        words = {"wrong": "WRONG BYTES", "hang": "HANG", "died": "DIED", "untyped": f"UNTYPED {self.name}"}
        word = self.name.removesuffix("Error") if self.verdict == "error" else words.get(self.verdict, "ok")
        return word if self.verdict == "hang" else f"{word} {self.took_s:.1f}"


class _Child:
    """The process of one cell."""

    def __init__(self, cell: Cell, server: Any, limit_s: float) -> None:
        self.cell, self.server = cell, server
        self.deadline_s = time.monotonic() + limit_s
        self.began_s = time.monotonic()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the child
        self.answers, write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self.answers)
            self._serve(write_end, limit_s)
        os.close(write_end)

    def _serve(self, write_end: int, limit_s: float) -> NoReturn:
        # Its own session: if the process hangs, it is killed with all processes that it started.
        os.setsid()
        for stream in (1, 2):
            os.dup2(self._stderr.fileno(), stream)
        faulthandler.dump_traceback_later(max(limit_s - _SAYS_WHERE_S, 0.1), file=self._stderr)
        try:
            answer = self.cell.work(self.server)
        except BaseException as error:
            answer = {"verdict": "died", "text": f"{type(error).__name__}: {error}"}
        with os.fdopen(write_end, "w") as pipe:
            print(json.dumps(answer), file=pipe)
        os._exit(0)

    def end(self, *, late: bool) -> Outcome:
        """Kills the process and all that it started; returns the outcome."""
        took_s = time.monotonic() - self.began_s
        answer = b""
        if not late:
            with os.fdopen(self.answers, "rb", closefd=False) as pipe:
                # Read up to the end of the line only: workers of the cell hold the pipe too, and may outlive it.
                answer = pipe.readline()
        os.close(self.answers)
        # Also by its own process ID: it may not have created its session yet.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        size = os.fstat(self._stderr.fileno()).st_size
        start = max(size - _STDERR_SHOWN_BYTES, 0)
        stderr = os.pread(self._stderr.fileno(), _STDERR_SHOWN_BYTES, start).decode(errors="replace")
        self._stderr.close()
        if answer:
            return Outcome(**{"took_s": took_s} | json.loads(answer))
        return Outcome("hang" if late else "died", text=stderr, took_s=took_s)


def run(cells: Sequence[Cell], servers: Sequence[Any], limit_s: float) -> Iterator[tuple[Cell, Outcome]]:
    """Runs all cells, one per server at a time; yields each with its outcome when it ends."""
    waiting, free = deque(cells), list(servers)
    with selectors.DefaultSelector() as selector:
        running: list[_Child] = []
        try:
            while waiting or running:
                while waiting and free:
                    child = _Child(waiting.popleft(), free.pop(), limit_s)
                    running.append(child)
                    selector.register(child.answers, selectors.EVENT_READ, child)
                next_s = min(child.deadline_s for child in running) - time.monotonic()
                ended = [key.data for key, _ in selector.select(max(next_s, 0.0))]
                late = [child for child in running if child not in ended and child.deadline_s <= time.monotonic()]
                for child in ended + late:
                    running.remove(child)
                    selector.unregister(child.answers)
                    free.append(child.server)
                    yield child.cell, child.end(late=child in late)
        finally:
            for child in running:
                child.end(late=True)
