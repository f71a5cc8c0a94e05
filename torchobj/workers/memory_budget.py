"""The memory of the prefetcher of this process: its budget, and its start, which the system may refuse. Does not import
torch.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Any

from torchobj import _torchobj
from torchobj.exceptions import ConfigError, StoreError

logger = logging.getLogger("torchobj")

#: Environment variable with the budget in bytes, for the process of each rank.
VARIABLE = "TORCHOBJ_BUDGET_BYTES"

#: Share of the budget for announced objects; workers and the trainer hold the rest.
AHEAD_SHARE = 0.75

_SHARE = 10
_MAX_BYTES = 2 << 30
_MIN_BYTES = 1 << 20

HAS_PREFETCHER = sys.platform == "linux"

#: Number of times the budget had been set when the system refused the shared memory, by number of the process. A
#: forked worker inherits the entry of its parent.
_refused: dict[int, int] = {}

_chosen: int | None = None
_times_set = 0


def set_memory_budget(budget_bytes: int) -> None:
    """Sets the memory budget of objects that are read ahead in this process. Its DataLoader workers share it.

    The batches that workers build take up to the same amount again, in blocks that are reused. Unused memory is kept
    while workers run and memory is not short; another call with the same budget releases it.

    Call it before the first dataset, or DataLoader with workers, is used, or after a warning that the system refused
    the memory; the next use then tries again. The default is the environment variable `TORCHOBJ_BUDGET_BYTES`,
    otherwise a tenth of the memory of the machine or container divided by the number of ranks on the machine, and at
    most 2 GiB.

    Args:
        budget_bytes: The budget in bytes; at least 1 MiB.

    Raises:
        ConfigError: Less than 1 MiB; or the memory is already in use with another size.

    Example:
        ```python
        torchobj.set_memory_budget(4 << 30)  # 4 GiB for this rank
        ```
    """
    global _chosen, _times_set
    _checked(budget_bytes, "budget_bytes")
    allocated = _torchobj.prefetch_stats().get("budget_bytes") if sys.platform == "linux" else None
    if allocated not in (None, budget_bytes):
        raise ConfigError(
            f"budget_bytes={budget_bytes}: the memory is already in use with {allocated} bytes; call set_memory_budget "
            "before the first dataset, or DataLoader with workers, is used"
        )
    if allocated is not None:
        _torchobj.release_free_memory()
    _chosen, _times_set = budget_bytes, _times_set + 1


def _checked(size: Any, name: str) -> int:
    if not isinstance(size, int) or size < _MIN_BYTES:
        raise ConfigError(f"{name}={size!r}: must be an int, a number of bytes of at least {_MIN_BYTES} (1 MiB)")
    return size


def budget_bytes() -> int:
    """The memory budget of objects that are read ahead in this process, in bytes."""
    if _chosen is not None:
        return _chosen
    value = os.environ.get(VARIABLE)
    if value:
        return _checked(int(value) if value.strip().isdecimal() else value, VARIABLE)
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(_MIN_BYTES, min(_MAX_BYTES, memory_bytes() // _SHARE // ranks))


def memory_bytes() -> int:
    """Memory of the machine in bytes, or of the container if that is limited."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_cgroup_limits()])


def _cgroup_limits() -> list[int]:
    # cgroups(7): version 2 including the parent groups, and version 1.
    limits = []
    for folder in _cgroup_folders():
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                limit = (folder / name).read_text().strip()
            except OSError:
                continue
            if limit.isdigit():
                limits.append(int(limit))
    return limits


def _cgroup_folders() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    folders = [root, root / "memory"]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = root / controllers
            own = base / path.lstrip("/")
            folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(base)]
    return folders


def prefetcher_is_refused() -> bool:
    """Whether the system refused the shared memory to this process, under the current budget."""
    return _refused.get(_torchobj.process_number()) == _times_set


def record_refusal(error: OSError) -> None:
    """Records that the system refused the shared memory. Logs it once for each budget."""
    if _times_set not in _refused.values():
        logger.warning(
            "%s; without it nothing is read ahead, and each DataLoader worker reads its own objects. Call "
            "torchobj.set_memory_budget(budget_bytes) to try again with a smaller budget",
            error,
        )
    _refused[_torchobj.process_number()] = _times_set


def start_prefetcher() -> bool:
    """Starts the prefetcher of this process if necessary. Returns whether there is one."""
    if not HAS_PREFETCHER or prefetcher_is_refused():
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
