"""Imported by a forkserver at its start, which then outlives SIGTERM of a process group, as its DataLoader workers do.

The server ends with the process that started it. Its children block the signal until it is known which are workers.
"""

import multiprocessing
import signal
import sys
from multiprocessing import util

from torch.utils.data._utils.worker import _worker_loop


def _unblock(_: object) -> None:
    if getattr(multiprocessing.current_process(), "_target", None) is not _worker_loop:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
util.register_after_fork(sys.modules[__name__], _unblock)
