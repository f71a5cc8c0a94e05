"""How much memory objects that are read ahead may take. Never imports torch."""

import os
import sys
from pathlib import Path
from typing import Any

from torchobj import _torchobj
from torchobj.exceptions import ConfigError

__all__ = ["AHEAD_SHARE", "budget_bytes", "set_budget", "times_set"]

#: The variable that says how many bytes objects read ahead may take, in each rank's process.
VARIABLE = "TORCHOBJ_BUDGET_BYTES"

#: Of the budget, what is announced of one pass over a dataset: the rest is what workers and the trainer hold.
AHEAD_SHARE = 0.75

_SHARE = 10
_MOST_BYTES = 2 << 30
_LEAST_BYTES = 1 << 20

_chosen: int | None = None
_times_set = 0


def set_budget(size: int) -> None:
    """Sets how many bytes objects that are read ahead may take in this process; its workers share them.

    To be called before the first dataset is used, or after a warning that the system refused the memory: the next use
    of a dataset asks for it again. Without it `TORCHOBJ_BUDGET_BYTES` counts, and without that a
    tenth of the machine's memory, or of the container's, shared by the ranks of the machine, and at most 2 GiB.

    Raises:
        ConfigError: Less than 1 MiB, or too late: the memory is set up with another size.
    """
    global _chosen, _times_set
    _checked(size, "size")
    made = _torchobj.prefetch_stats().get("budget_bytes") if sys.platform == "linux" else None
    if made not in (None, size):
        raise ConfigError(f"size={size}: the memory is set up already, with {made}; call this before a dataset is used")
    _chosen, _times_set = size, _times_set + 1


def times_set() -> int:
    """How many times `set_budget` succeeded in this process, and in its parent before the fork."""
    return _times_set


def _checked(size: Any, name: str) -> int:
    if not isinstance(size, int) or size < _LEAST_BYTES:
        raise ConfigError(f"{name}={size!r}: must be a number of bytes, at least {_LEAST_BYTES}")
    return size


def budget_bytes() -> int:
    """How many bytes objects that are read ahead may take in this process."""
    if _chosen is not None:
        return _chosen
    said = os.environ.get(VARIABLE)
    if said:
        return _checked(int(said) if said.strip().isdecimal() else said, VARIABLE)
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(_LEAST_BYTES, min(_MOST_BYTES, _memory_bytes() // _SHARE // ranks))


def _memory_bytes() -> int:
    """What this process may have of the machine's memory: of the container's, where one is limited."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_cgroup_limits()])


def _cgroup_limits() -> list[int]:
    # cgroups(7): version 2, with the groups above this process's own, and the files of version 1.
    limits = []
    for folder in _cgroup_folders():
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                said = (folder / name).read_text().strip()
            except OSError:
                continue
            if said.isdigit():
                limits.append(int(said))
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
