"""Runs jobs in fresh processes without import costs. The benchmarks define the jobs.

A fork server is a process that has imported what one client needs and created no client. It forks a child for each job,
since torch alone takes three seconds to import. Jobs and results are lines of JSON on its stdin and stdout.
"""

import contextlib
import gc
import json
import os
import selectors
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_REPOSITORY = Path(__file__).resolve().parent.parent
# OpenSSL sometimes crashes under boto3: its threads share an SSLContext that urllib3 changes for each connection.
_LIVES = 5


def serve(work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Forks a child for each job on stdin, and writes the child's result to stdout."""
    gc.collect()
    # Garbage collections in the children do not traverse the imports.
    gc.freeze()
    for line in sys.stdin:
        result, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(result)
            # Output of a client must not mix with results.
            os.dup2(2, 1)
            _end_with(_answer(work, line), write_end)
        os.close(write_end)
        with os.fdopen(result) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        print(answer or json.dumps({"died": os.waitstatus_to_exitcode(status)}), flush=True)


def _answer(work: Callable[[dict[str, Any]], dict[str, Any]], line: str) -> dict[str, Any]:
    try:
        return work(json.loads(line))
    except Exception:
        return {"error": traceback.format_exc()}


def _end_with(result: dict[str, Any], write_end: int) -> NoReturn:
    """Writes the result and exits the child, even if a client left threads."""
    with os.fdopen(write_end, "w") as pipe:
        pipe.write(json.dumps(result))
    os._exit(0)


class ForkServer:
    """A process, `python -m MODULE NAME`, that runs jobs of the client NAME."""

    def __init__(self, module: str, name: str) -> None:
        self._command = [sys.executable, "-m", module, name]
        self.name = name
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        pipe = subprocess.PIPE
        # Its own session: a job that hangs is killed with all processes that it started.
        return subprocess.Popen(self._command, cwd=_REPOSITORY, stdin=pipe, stdout=pipe, start_new_session=True)

    def run(self, job: dict[str, Any], limit_s: float = 600.0) -> dict[str, Any]:
        """Runs a job in a child; repeats it with a message if the child dies.

        Raises:
            RuntimeError: The client failed, with its traceback; or died repeatedly; or did not end in `limit_s`.
        """
        for _ in range(_LIVES):
            answer = self._ask(job, limit_s)
            if "died" not in answer:
                break
            print(f"{self.name} died with {answer['died']}: once more", file=sys.stderr, flush=True)
        else:
            raise RuntimeError(f"{self.name}: died {_LIVES} times")
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def _ask(self, job: dict[str, Any], limit_s: float) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "stdin=PIPE was passed at the start"
        assert stdout is not None, "stdout=PIPE was passed at the start"
        try:
            stdin.write(json.dumps(job).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            return {"error": "the fork server ended"}
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            # A line is written at once, so that it is complete when its first byte is readable.
            late = not selector.select(limit_s)
        if late:
            self._kill()
            self._process = self._start()
            return {"error": f"did not end within {limit_s:g} s"}
        line = stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the fork server ended"}
        return answer

    def _kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                # A server that has ended leaves what it did not read.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()

    def close(self) -> None:
        """Stops the process."""
        self._close_pipes()
