"""Which ranks run on one machine, and share its memory and disks. Names of hosts, which may be equal, do not tell."""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

__all__ = ["machine"]

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
