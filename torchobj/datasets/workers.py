"""DataLoader workers: whether this process is one, whether a pickle is for a process that is being spawned, which rank
of the job it works for, and that it ends with its trainer. What is pickled is the datasets' affair.
"""

import functools
import multiprocessing
import multiprocessing.context
import os
import signal
import threading
from typing import NamedTuple

import torch.utils.data


class Rank(NamedTuple):
    """A rank of a job, and how many there are."""

    number: int
    world_size: int


def in_worker() -> bool:
    """Whether this process is a DataLoader worker."""
    return torch.utils.data.get_worker_info() is not None


def is_for_a_new_process() -> bool:
    """Whether what is being pickled now goes to a process that is being spawned, as DataLoader workers are."""
    return multiprocessing.context.get_spawning_popen() is not None


def rank(noted: Rank | None) -> Rank:
    """The rank that this process is, or works for.

    A forked worker inherits torch.distributed's state. A spawned one has none: its rank is what its parent noted.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return Rank(distributed.get_rank(), distributed.get_world_size())
    return noted if noted is not None and in_worker() else Rank(0, 1)


@functools.cache
def end_with_the_trainer() -> None:
    """Ends this worker when its trainer has died, where torch does not see to it.

    Torch's workers look for their parent process. That of a forkserver's is the server, which lives as long as they do:
    they would hold the arena for ever. To be called in a DataLoader worker only; again changes nothing.
    """
    trainer = multiprocessing.parent_process()
    if trainer is None or trainer.pid == os.getppid():
        return

    def wait() -> None:
        trainer.join()
        # As the trainer itself ends a worker that does not listen.
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="torchobj-trainer", daemon=True).start()
