"""Names and content of the benchmarks' objects, so that every client's bytes can be verified, and their upload."""

import io
import mmap
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lab.location import Location

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# Three bytes less than a MiB: a part received at the position of another differs from the content expected there.
_PERIOD_BYTES = MIB - 3
_THREADS = 8


@dataclass(frozen=True)
class Family:
    """`count` objects of one size; object `i` is `name` and `i`."""

    size: int
    count: int

    @property
    def name(self) -> str:
        """The prefix of the keys."""
        return f"{size_text(self.size).replace(' ', '')}/"

    def names(self) -> list[str]:
        """Keys, without the prefix of a location."""
        return [f"{self.name}{index}" for index in range(self.count)]

    def pieces(self, index: int) -> Iterator[bytes | memoryview]:
        """Yields the content of object `index`."""
        return pieces(index, self.size)

    def is_stored(self, path: Path) -> bool:
        """Returns whether a file is an object of the family: it has the size."""
        return path.exists() and path.stat().st_size == self.size


def size_text(size: int) -> str:
    """Returns `110 KiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


@cache
def _pattern() -> bytes:
    return random.Random(0).randbytes(_PERIOD_BYTES) * 2


def pieces(index: int, size: int) -> Iterator[memoryview]:
    """Yields the content of object `index`, at most a MiB at a time: a random pattern, shifted per object."""
    pattern = memoryview(_pattern())
    at = 0
    while at < size:
        start = (at + index * 4099) % _PERIOD_BYTES
        length = min(_PERIOD_BYTES, size - at)
        yield pattern[start : start + length]
        at += length


def check(name: str, size: int, content: Any) -> None:
    """Raises AssertionError unless `content`, any buffer, is that of the object `name`, byte for byte."""
    index = int(name.rsplit("/", 1)[1])
    # numpy compares about ten times faster than memoryview.
    found = np.frombuffer(content, np.uint8)
    if len(found) != size:
        raise AssertionError(f"{name}: {len(found)} bytes instead of {size}")
    at = 0
    for piece in pieces(index, size):
        if not np.array_equal(found[at : at + len(piece)], np.frombuffer(piece, np.uint8)):
            raise AssertionError(f"{name}: wrong bytes between {at} and {at + len(piece)}")
        at += len(piece)


def check_file(name: str, path: str | Path) -> None:
    """Raises AssertionError unless a file is the object `name`."""
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        check(name, len(content), content)


def upload(location: Location, families: Sequence[Family]) -> int:
    """Writes missing objects to a bucket by boto3 and returns their number."""
    client = location.boto3(max_pool_connections=_THREADS)
    found = {
        entry["Key"]: entry["Size"]
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=location.bucket, Prefix=location.prefix)
        for entry in page.get("Contents", ())
    }
    missing = [
        (location.key(name), family, index)
        for family in families
        for index, name in enumerate(family.names())
        if found.get(location.key(name)) != family.size
    ]

    def write(item: tuple[str, Family, int]) -> None:
        key, family, index = item
        client.upload_fileobj(io.BytesIO(b"".join(family.pieces(index))), location.bucket, key)

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(write, missing))
    return len(missing)
