"""Sends Ctrl-C while a server delays its response."""

import contextlib
import os
import signal
import threading
import time

#: How long the server delays its response; an interrupted call ends long before.
HELD_BACK_S = 100


@contextlib.contextmanager
def interrupted(control, held_back_s=HELD_BACK_S, **rule):
    """Delays the requests that `rule` selects and interrupts this process as soon as one is delayed."""
    control.faults({**rule, "action": {"delay_first_byte_s": held_back_s}})

    over = threading.Event()

    def interrupt():
        while not over.wait(0.01):
            if control.fault_report()[0]["fired"]:
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=interrupt, daemon=True)
    began = time.monotonic()
    try:
        thread.start()
        yield
    finally:
        over.set()
        thread.join()
        control.clear_faults()
    assert time.monotonic() - began < HELD_BACK_S / 2
