"""Which ranks run on one machine, and share its memory and disks. Names of hosts, which may be equal, do not tell.
`machine` tells it from the system, and `host_count` from the launcher, without communication.
"""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from torchobj.exceptions import ConfigError

__all__ = ["host_count", "machine"]

#: For tests: returns the host of a rank, in place of the machine.
_host_of: Callable[[], str] | None = None


def machine() -> str:
    """Returns what ranks of one machine have in common: kernel, network namespace and user.

    Another value in each call if the system does not show these, as in some sandboxes: then each rank is alone.
    """
    if _host_of is not None:
        return _host_of()
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino} {os.geteuid()}"
    return secrets.token_hex(16)


def host_count(ranks: int) -> int:
    """Returns the number of hosts of `ranks` ranks that divide the samples, by the variables that torchrun sets.

    Raises:
        ConfigError: `LOCAL_WORLD_SIZE` is not set, or hosts have different numbers of ranks.
    """
    given = {name: os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE")}
    for name, value in given.items():
        if value is not None and not (value.isdecimal() and int(value) > 0):
            raise ConfigError(f"{name}={value!r}: must be a number of ranks, 1 or more")
    if ranks == 1 and given["WORLD_SIZE"] in (None, "1"):
        return 1
    if given["LOCAL_WORLD_SIZE"] is None:
        raise ConfigError(
            f"which of the {ranks} ranks are on one host is not known; set LOCAL_WORLD_SIZE to the "
            "number of ranks of each host, as torchrun does"
        )
    local, world = int(given["LOCAL_WORLD_SIZE"]), int(given["WORLD_SIZE"] or ranks)
    hosts = world // local
    if world % local or ranks % hosts:
        raise ConfigError(
            f"{ranks} ranks cannot be divided among the hosts of WORLD_SIZE={world} and "
            f"LOCAL_WORLD_SIZE={local}; all hosts must have the same number of ranks that get samples"
        )
    return hosts
