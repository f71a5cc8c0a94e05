"""Runs parts of a test in forked children."""

import os
import signal


def in_child(work):
    """Runs `work` in a forked child; returns its result or its exception's text, within 30 s."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            answer = repr(work())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with {status}: {answer}"
    return answer
