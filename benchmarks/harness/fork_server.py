"""Runs jobs in fresh processes without import costs. The benchmarks define the jobs.

A fork server is a process that has imported what one client needs and created no client. It forks a child for each job,
since torch alone takes three seconds to import. Jobs and results are pickled, on its stdin and stdout.
"""

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_REPOSITORY = Path(__file__).resolve().parents[2]
# OpenSSL sometimes crashes under boto3: its threads share an SSLContext that urllib3 changes for each connection.
_LIVES = 5
_IMPORTS_LIMIT_S = 120.0
#: For the tracebacks of a job that does not end.
_TRACEBACKS_S = 1.0


class JobError(RuntimeError):
    """A job has no result. `kind` is "error", "died" or "late"."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def _imported(module: str, client: str) -> list[Any]:
    """The arguments of each job: the client's class, with every import done that its first use would do; or none."""
    found = importlib.import_module(module)
    if not client:
        return []
    made = found.CLIENTS[client]
    for name in made.modules:
        importlib.import_module(name)
    return [made]


def serve(module: str, client: str) -> None:
    """Imports `module` and what `module.CLIENTS[client]` needs. Forks a child for each job on stdin, and writes the
    child's result to stdout.
    """
    arguments = _imported(module, client)
    gc.collect()
    # Garbage collections in the children do not traverse the imports.
    gc.freeze()
    faulthandler.register(signal.SIGUSR1)
    # The benchmark has ended, maybe while it wrote.
    with contextlib.suppress(EOFError, BrokenPipeError, pickle.UnpicklingError):
        while True:
            job, limit_s = pickle.load(sys.stdin.buffer)
            sys.stdout.buffer.write(_answered(job, arguments, limit_s))
            sys.stdout.flush()


def _answered(job: bytes, arguments: list[Any], limit_s: float) -> bytes:
    """Runs a job in a child, and kills all that it leaves; returns a pickle of the kind of its end and a value."""
    # What the job imports is imported once. If it cannot be, its own child says why.
    with contextlib.suppress(Exception):
        pickle.loads(job)
    result, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        # Its own session: it is killed with all processes that it started, some of which hold the pipe, too.
        os.setsid()
        os.close(result)
        # Output of a client must not mix with results.
        os.dup2(2, 1)
        _end_with(_answer(job, arguments), write_end)
    os.close(write_end)
    answer = None
    with os.fdopen(result, "rb") as pipe, selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        # It ends if the benchmark does.
        selector.register(sys.stdin, selectors.EVENT_READ)
        ready = [key.fileobj for key, _ in selector.select(limit_s)]
        if pipe in ready:
            with contextlib.suppress(EOFError):
                answer = pickle.load(pipe)
        elif not ready:
            os.kill(child, signal.SIGUSR1)
            time.sleep(_TRACEBACKS_S)
            answer = "late", f"did not end within {limit_s:g} s"
    # Also by its own process ID: it may not have created its session yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return pickle.dumps(answer or ("died", f"died with {os.waitstatus_to_exitcode(status)}"))


def _answer(job: bytes, arguments: list[Any]) -> bytes:
    try:
        return pickle.dumps(("done", pickle.loads(job)(*arguments)))
    except Exception:
        return pickle.dumps(("error", traceback.format_exc()))


def _end_with(result: bytes, write_end: int) -> NoReturn:
    """Writes the result and exits the child, even if a client left threads."""
    with os.fdopen(write_end, "wb") as pipe:
        pipe.write(result)
    os._exit(0)


class Clients(contextlib.AbstractContextManager["Clients"]):
    """Runs jobs on a fork server per client, which its first job starts.

    Args:
        module: Its `CLIENTS` are the classes that jobs are called with. The client "" stands for the module alone.
        limit_s: Maximum duration of a job.
        lives: How often a job is run whose process dies.
    """

    def __init__(self, module: str, limit_s: float = 600.0, lives: int = _LIVES) -> None:
        self._module, self._limit_s, self._lives = f"benchmarks.{module}", limit_s, lives
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, client: str, job: Callable[..., Any], limit_s: float | None = None) -> Any:
        """Calls a job, which can be pickled, with the client's class in a child; repeats it if the child dies.

        Raises:
            JobError: The job failed, with its traceback; or died repeatedly; or did not end in time.
        """
        name = client or self._module
        for life in range(self._lives):
            kind, value = self._ask(client, pickle.dumps(job), limit_s or self._limit_s)
            if kind == "done":
                return value
            if kind != "died":
                break
            print(f"{name} {value} ({life + 1} of {self._lives} times)", file=sys.stderr, flush=True)
        raise JobError(kind, f"{name}: {value}")

    def _ask(self, client: str, job: bytes, limit_s: float) -> tuple[str, Any]:
        """Returns the kind of the job's end, "done" or that of an error, and its result or what happened."""
        if client not in self._servers:
            self._servers[client] = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.harness", self._module, client],
                cwd=_REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # An interrupt is for the benchmark.
                start_new_session=True,
            )
        stdin, stdout = self._servers[client].stdin, self._servers[client].stdout
        assert stdin is not None, "stdin=PIPE was passed at the start"
        assert stdout is not None, "stdout=PIPE was passed at the start"
        with contextlib.suppress(BrokenPipeError, EOFError), selectors.DefaultSelector() as selector:
            pickle.dump((job, limit_s), stdin)
            stdin.flush()
            selector.register(stdout, selectors.EVENT_READ)
            if selector.select(limit_s + _IMPORTS_LIMIT_S):
                answer: tuple[str, Any] = pickle.load(stdout)
                return answer
        _stop(self._servers.pop(client))
        return "error", "the fork server has ended, or hangs in its imports"

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            _stop(server)


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Ends a fork server: at the end of its stdin, with its job."""
    for pipe in (server.stdin, server.stdout):
        if pipe is not None:
            # A server that has ended leaves what it did not read.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    try:
        server.wait(10.0)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
