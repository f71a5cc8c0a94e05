"""The prefetcher of this process: whether the system has one, and starts it."""

import logging
import os
import sys

from torchobj import _torchobj
from torchobj.datasets.memory_budget import budget_bytes, times_set
from torchobj.exceptions import StoreError

logger = logging.getLogger("torchobj")

SUPPORTED = sys.platform == "linux"

#: Number of times the budget had been set when the system refused the shared memory, by process. A forked worker
#: inherits the entry of its parent.
_refused: dict[int, int] = {}


def is_refused() -> bool:
    """Whether the system refused the shared memory to this process, under the current budget."""
    return _refused.get(os.getpid()) == times_set()


def record_refusal(error: OSError) -> None:
    """Records that the system refused the shared memory. Logs it once for each budget."""
    if times_set() not in _refused.values():
        logger.warning(
            "%s; without it nothing is read ahead, and each DataLoader worker reads its own objects. Call "
            "torchobj.set_memory_budget(budget_bytes) to try again with a smaller budget",
            error,
        )
    _refused[os.getpid()] = times_set()


def start() -> bool:
    """Starts the prefetcher of this process if necessary. Returns whether there is one."""
    if not SUPPORTED or is_refused():
        return False
    try:
        _torchobj.start_prefetcher(budget_bytes())
    except StoreError:
        # The system also refused the resources of ordinary reads.
        raise
    except OSError as error:
        record_refusal(error)
        return False
    return True
