"""Processes that are killed at a moment of a save: the moment is a request, which the server holds until the kill."""

import contextlib
import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path

from tests.support import warm_python

#: Longer than a test looks for the kill.
HELD_S = 60.0


class Saver:
    """A process that runs a script, which forks one child for each line of orders: the child makes a save."""

    def __init__(self, bucket, script):
        self._process = warm_python.Process([script])
        self._config = pickle.dumps(bucket.config).hex()

    def begin(self, **orders):
        """Starts a save and returns the process that makes it."""
        self._process.stdin.write(json.dumps({"config": self._config, **orders}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())["pid"]

    def end(self):
        """Waits for the save's end, and returns the signal that ended it."""
        return json.loads(self._process.stdout.readline())["killed_by"]

    def close(self):
        with self._process as process:
            process.stdin.close()
            process.wait(30)


def serve(save):
    """The script's loop: a child for each line of orders, forked from the process that has done no more than import."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            orders = json.loads(line)
            save(orders | {"config": pickle.loads(bytes.fromhex(orders["config"]))})
            os._exit(0)
        print(json.dumps({"pid": child}), flush=True)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"killed_by": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None}), flush=True)


def state_of(pid):
    """The letter that the system has for what a process does; Z when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        # Its parent has waited for it, before or after the file was opened.
        return "Z"


def kill_at(control, pid):
    """Kills the process when the request is held; returns whether it was, before the process had ended."""
    deadline_s = time.monotonic() + HELD_S
    while time.monotonic() < deadline_s:
        if control.fault_report()[0]["fired"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
            return False
        if state_of(pid) == "Z":
            return False
        time.sleep(0.005)
    raise AssertionError("the save came neither to the request nor to its end")


def kill_now(pid):
    """Kills the process, unless it has ended and its parent has waited for it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
