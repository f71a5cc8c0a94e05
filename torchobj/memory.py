"""How much memory objects that are read ahead may take. Never imports torch."""

import os
from pathlib import Path

from torchobj.exceptions import ConfigError

__all__ = ["budget_bytes", "set_budget"]

#: The variable that says how many bytes objects read ahead may take, in each rank's process.
VARIABLE = "TORCHOBJ_BUDGET_BYTES"

_SHARE = 10
_MOST_BYTES = 2 << 30
_LEAST_BYTES = 1 << 20

_chosen: int | None = None


def set_budget(size: int) -> None:
    """Sets how many bytes objects that are read ahead may take in this process; its workers share them.

    To be called before the first dataset is used. Without it `TORCHOBJ_BUDGET_BYTES` counts, and without that a
    tenth of the machine's memory, or of the container's, shared by the ranks of the machine, and at most 2 GiB.

    Raises:
        ConfigError: Less than 1 MiB.
    """
    global _chosen  # noqa: PLW0603  one arena a process
    _chosen = _checked(size, "size")


def _checked(size: int, name: str) -> int:
    if size < _LEAST_BYTES:
        raise ConfigError(f"{name}={size!r}: must be at least {_LEAST_BYTES}")
    return size


def budget_bytes() -> int:
    """How many bytes objects that are read ahead may take in this process."""
    if _chosen is not None:
        return _chosen
    said = os.environ.get(VARIABLE)
    if said:
        try:
            return _checked(int(said), VARIABLE)
        except ValueError:
            raise ConfigError(f"{VARIABLE}={said!r}: must be a number of bytes") from None
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(_LEAST_BYTES, min(_MOST_BYTES, _memory_bytes() // _SHARE // ranks))


def _memory_bytes() -> int:
    """What this process may have of the machine's memory: of the container's, where one is limited."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_cgroup_limits()])


def _cgroup_limits() -> list[int]:
    # cgroups(7): version 2, and the files of version 1.
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            said = Path(path).read_text().strip()
        except OSError:
            continue
        if said.isdigit():
            limits.append(int(said))
    return limits
