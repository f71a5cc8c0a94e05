"""Runs jobs in fresh processes without import costs. The benchmarks define the jobs.

A fork server is a process that has imported what one client needs and created no client. It forks a child for each job,
since torch alone takes three seconds to import. Jobs and results are pickled, on its stdin and stdout.
"""

import contextlib
import gc
import importlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.lab import packages

_REPOSITORY = Path(__file__).resolve().parents[2]
# OpenSSL sometimes crashes under boto3: its threads share an SSLContext that urllib3 changes for each connection.
_LIVES = 5


def _imported(module: str, client: str) -> list[Any]:
    """The arguments of each job: the client's class, with every import done that its first use would do; or none."""
    found = importlib.import_module(module)
    if not client:
        return []
    made = found.CLIENTS[client]
    if hasattr(made, "packages"):
        packages.enter()
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
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            job = pickle.load(sys.stdin.buffer)
            result, write_end = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(result)
                # Output of a client must not mix with results.
                os.dup2(2, 1)
                _end_with(_answer(job, arguments), write_end)
            os.close(write_end)
            with os.fdopen(result, "rb") as pipe:
                answer = pipe.read()
            _, status = os.waitpid(child, 0)
            sys.stdout.buffer.write(answer or pickle.dumps(("died", os.waitstatus_to_exitcode(status))))
            sys.stdout.flush()


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


class _ForkServer:
    """The process of one client."""

    def __init__(self, module: str, client: str) -> None:
        self._command = [sys.executable, "-m", "benchmarks.harness", module, client]
        self._start()

    def _start(self) -> None:
        pipe = subprocess.PIPE
        # Its own session: a job that hangs is killed with all processes that it started.
        self._process = subprocess.Popen(
            self._command, cwd=_REPOSITORY, stdin=pipe, stdout=pipe, start_new_session=True
        )

    def ask(self, job: bytes, limit_s: float) -> tuple[str, Any]:
        """Returns "done" with the result, "error" with its text, or "died" with the exit status."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "stdin=PIPE was passed at the start"
        assert stdout is not None, "stdout=PIPE was passed at the start"
        try:
            pickle.dump(job, stdin)
            stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(stdout, selectors.EVENT_READ)
                late = not selector.select(limit_s)
            if not late:
                answer: tuple[str, Any] = pickle.load(stdout)
                return answer
        except (BrokenPipeError, EOFError):
            return "error", "the fork server ended"
        os.killpg(self._process.pid, signal.SIGKILL)
        self.close()
        self._start()
        return "error", f"did not end within {limit_s:g} s"

    def close(self) -> None:
        """Stops the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                # A server that has ended leaves what it did not read.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()


class Clients(contextlib.AbstractContextManager["Clients"]):
    """Runs jobs on a fork server per client, which its first job starts.

    Args:
        module: Its `CLIENTS` are the classes that jobs are called with. The client "" stands for the module alone.
        limit_s: Maximum duration of a job.
    """

    def __init__(self, module: str, limit_s: float = 600.0) -> None:
        self._module, self._limit_s = f"benchmarks.{module}", limit_s
        self._servers: dict[str, _ForkServer] = {}

    def run(self, client: str, job: Callable[..., Any]) -> Any:
        """Calls a job, which can be pickled, with the client's class in a child; repeats it if the child dies.

        Raises:
            RuntimeError: The job failed, with its traceback; or died repeatedly; or did not end in time.
        """
        if client not in self._servers:
            self._servers[client] = _ForkServer(self._module, client)
        name = client or self._module
        for _ in range(_LIVES):
            kind, value = self._servers[client].ask(pickle.dumps(job), self._limit_s)
            if kind == "done":
                return value
            if kind == "error":
                raise RuntimeError(f"{name}: {value}")
            print(f"{name} died with {value}: once more", file=sys.stderr, flush=True)
        raise RuntimeError(f"{name}: died {_LIVES} times")

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.close()
