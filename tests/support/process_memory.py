"""The memory of a process."""

from pathlib import Path

__all__ = ["pss_bytes"]


def pss_bytes(pid: int | str = "self") -> int:
    """Without mapped files, whose share depends on what else runs; shared memory counts in parts."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    # proc(5): kilobytes.
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
