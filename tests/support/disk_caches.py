"""What tests of the disk cache share: objects, settings, and the size of a cache."""

import os
import random
import stat
import time

from torchobj import CacheOptions, _torchobj

COUNT = 60


def body(number):
    return random.Random(number).randbytes(1000 + 397 * number)


def written():
    """Waits until the files that were admitted are on the disk."""
    while _torchobj.request_stats()["cache_pending"]:
        time.sleep(0.001)


def new_gets(control):
    """Returns the number of reads of objects that the server received since the last call."""
    number = sum(request.method == "GET" and bool(request.key) for request in control.requests())
    control.clear_requests()
    return number


def options(folder, **settings):
    return CacheOptions(**{"folder": folder, "max_bytes": 1 << 30, "min_free_bytes": 0, **settings})


def disk_bytes(file):
    """Bytes on the disk of a file of a cache; 0 if it is none of an object."""
    try:
        found = os.lstat(file)
    except FileNotFoundError:
        return 0
    is_entry = stat.S_ISREG(found.st_mode) and file.name not in ("usage", "CACHEDIR.TAG")
    return found.st_blocks * 512 if is_entry else 0
