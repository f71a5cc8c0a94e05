"""Divides the ranges of a read into chunks, which several ranks can read. Sends nothing."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from torchobj import _torchobj

__all__ = ["Chunks", "Job", "Piece", "digest_of", "urls_of"]

#: An object to read: its store, key and version, and pairs of an offset and the memory that is filled from there.
Job: TypeAlias = tuple["_torchobj.NativeStore", str, str | None, Sequence[tuple[int, Any]]]


class Piece(NamedTuple):
    """A part of a range, in one chunk."""

    number: int
    """Its number among all pieces."""
    job: int
    """Index of the object's job."""
    offset: int
    """Offset in the object, in bytes."""
    length: int
    """Number of bytes."""
    target: int
    """Number of the range, counted through all jobs."""
    start: int
    """Offset in the memory of the range, in bytes."""


class Chunks:
    """The ranges of jobs in the order of their URLs and offsets, divided into chunks of `chunk_bytes`.

    Ranks with the same objects, versions and ranges have the same chunks, in whatever order they name the ranges.

    Args:
        jobs: What to read.
        chunk_bytes: Number of bytes of a chunk; the last one may be smaller.
    """

    def __init__(self, jobs: Sequence[Job], chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        #: The pieces of each chunk.
        self.pieces: list[list[Piece]] = []
        self.nbytes = self.count = 0
        chunk: list[Piece] = []
        room = chunk_bytes
        for job, offset, length, target in _in_order(jobs):
            start = 0
            while start < length:
                size = min(room, length - start)
                chunk.append(Piece(self.count, job, offset + start, size, target, start))
                self.count += 1
                start, room = start + size, room - size
                if not room:
                    self.pieces.append(chunk)
                    chunk, room = [], chunk_bytes
            self.nbytes += length
        if chunk:
            self.pieces.append(chunk)

    def __len__(self) -> int:
        return len(self.pieces)

    def size(self, chunk: int) -> int:
        """Returns the number of bytes of a chunk."""
        return min(self.chunk_bytes, self.nbytes - chunk * self.chunk_bytes)


def urls_of(jobs: Sequence[Job]) -> list[str]:
    """Returns the URLs of jobs."""
    return [store.url(key) for store, key, _, _ in jobs]


def digest_of(jobs: Sequence[Job]) -> bytes:
    """Returns a digest of the objects, versions and ranges of jobs: 32 bytes."""
    digest = hashlib.sha256()
    urls, last = urls_of(jobs), None
    for job, offset, length, _ in _in_order(jobs):
        if job != last:
            digest.update(f"{urls[job]}\0{jobs[job][2]}\0".encode(errors="surrogateescape"))
            last = job
        digest.update(b"%d %d\n" % (offset, length))
    return digest.digest()


def _in_order(jobs: Sequence[Job]) -> Iterator[tuple[int, int, int, int]]:
    """Yields job, offset, length and number of each range, in the order of URLs and offsets."""
    ranges, number = [], 0
    for job, url in enumerate(urls_of(jobs)):
        for offset, memory in jobs[job][3]:
            ranges.append((url, offset, memory.nbytes if hasattr(memory, "nbytes") else len(memory), job, number))
            number += 1
    for _, offset, length, job, number in sorted(ranges, key=lambda each: each[:3]):
        yield job, offset, length, number
