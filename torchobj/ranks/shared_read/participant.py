"""The read of one participant of a ring: it reads chunks, publishes them, and copies those of the others.

The calling thread makes all changes of the ring; the threads of a pool only read from the store.
"""

import collections
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self

import numpy as np
import torch

from torchobj import _torchobj
from torchobj.ranks.shared_read.chunks import Chunks, Job
from torchobj.ranks.shared_read.destinations import fill, part_of
from torchobj.ranks.shared_read.hosts import Exchange
from torchobj.ranks.shared_read.ring import MAX_PARTICIPANTS, AbortedError, Claim, Ring, StalledError
from torchobj.store.concurrency import CallPool
from torchobj.store.tensor_memory import advise_huge_pages

__all__ = ["Participant"]

#: Maximum number of calls of the store at a time. Each reads several chunks if more requests may be in flight.
_CALLS = 16

#: Polling interval: it doubles while nothing changes.
_MIN_WAIT_S, _MAX_WAIT_S = 0.0005, 0.004

#: Time between two checks whether other participants have died.
_CHECK_S = 0.1

#: Time between two reports of progress.
_REPORT_S = 0.1

#: Number of chunks that all participants have in flight at first.
_FIRST_IN_FLIGHT = 8

#: Factor by which a larger number must raise the throughput.
_GAIN = 1.2


class _Period:
    """A time in which throughput is measured."""

    def __init__(self) -> None:
        self.began_s, self.nbytes = time.monotonic(), 0


class Participant:
    """Reads the chunks of one ring into this process's memory.

    Args:
        ring: The ring.
        chunks: What all participants read.
        jobs: The objects, with their memory: writable buffers, or uint8 tensors of a device.
        checksum: Whether to compute the CRC-32 of each piece.
        arrived: Called about every 0.1 s with the number of bytes that have arrived; its exception ends the read.
        waits: Whether all participants have joined, and fail together. See `Ring.claim`.
        stall_s: Time without any change after which the read fails; without `waits`, after which this participant reads
            what is left for itself.
        expected: Number of participants that are about to join.
        patience_s: Time to wait for them.
        most: Maximum number of participants that may join.
    """

    def __init__(
        self,
        ring: Ring,
        chunks: Chunks,
        jobs: Sequence[Job],
        *,
        checksum: bool,
        arrived: Callable[[int], object] | None,
        waits: bool,
        stall_s: float,
        expected: int = 1,
        patience_s: float = 0.0,
        most: int = MAX_PARTICIPANTS,
    ) -> None:
        self._most = most
        self._expected, self._until_s = expected, time.monotonic() + patience_s
        self._ring, self._chunks, self._jobs = ring, chunks, jobs
        self._memories = [memory for *_, ranges in jobs for _, memory in ranges]
        self._checksum, self._arrived = checksum, arrived
        self._waits, self._stall_s = waits, stall_s
        #: Reads that have ended: their claims and the error, or None.
        self._ended: collections.deque[tuple[Sequence[Claim], BaseException | None]] = collections.deque()
        #: CRC-32 of pieces that were read into memory of this process, by number.
        self._own_sums: dict[int, int] = {}
        self._woken = threading.Event()
        self._in_flight = 0
        #: Maximum number of chunks in flight of all participants: it grows while that raises the throughput.
        self._limit, self._period, self._best_rate = _FIRST_IN_FLIGHT, _Period(), 0.0
        self._done_bytes, self._wait_s = 0, _MIN_WAIT_S
        #: Times of the last change, of the last check of other participants, and of the last report.
        self._changed_s = self._checked_s = self._reported_s = 0.0
        self._range, self._exchange = range(0), None  # type: range, Exchange | None
        #: Chunks that were copied, and are in their slots until they are sent.
        self._kept: set[int] = set()

    def __enter__(self) -> Self:
        for memory in self._memories:
            if isinstance(memory, np.ndarray):
                advise_huge_pages(memory)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(StalledError), self._ring.locked():
            if kind is not None and self._waits:
                self._ring.abort()
            self._ring.leave()

    def read(self, chunks: range | None = None, exchange: Exchange | None = None) -> None:
        """Reads and copies until this participant has all chunks.

        Args:
            chunks: Those to read; None: all.
            exchange: What exchanges them with other machines; None: they are all read here.

        Raises:
            AbortedError: Another participant has failed.
            StalledError: Another participant is alive, but delivers nothing, and `waits`.
            StoreError: A chunk cannot be read.
        """
        self._range, self._exchange = range(len(self._chunks)) if chunks is None else chunks, exchange
        pool = CallPool(_CALLS, "torchobj-shared-read")
        error: BaseException | None = None
        try:
            self._run(pool)
        except BaseException as failed:
            error = failed
            if self._waits:
                # The others end now, and do not wait for slots that this participant holds back.
                with suppress(StalledError), self._ring.locked():
                    self._ring.abort()
            raise
        finally:
            # Then no thread writes into a slot that another participant may use.
            pool.leave(error)

    def _run(self, pool: CallPool) -> None:
        ring, received = self._ring, list[int]()
        self._changed_s = self._checked_s = self._reported_s = time.monotonic()
        while True:
            seen = ring.changes
            self._woken.clear()
            with ring.locked():
                self._record(received)
                received = self._settle()
                if ring.is_aborted:
                    raise AbortedError("another rank has failed to read")
                claims = self._claim()
                ready = [claim for claim in ring.ready() if claim.chunk not in self._kept]
                is_done = not ring.needed(self._range)
            if is_done:
                return
            self._start(pool, claims)
            for claim in ready:
                self._copy(claim)
                received.append(claim.chunk)
            self._report(received)
            self._wait(seen, has_changed=bool(received or claims))
            if self._is_stalled():
                if self._waits:
                    raise StalledError(f"another rank of this machine has not delivered for {self._stall_s:.0f} s")
                # It goes on alone.
                self._read_chunks([Claim(chunk, None) for chunk in ring.missing()])
                return

    def _report(self, received: Sequence[int]) -> None:
        self._done_bytes += sum(map(self._chunks.size, received))
        if self._arrived is not None and time.monotonic() > self._reported_s + _REPORT_S:
            self._arrived(self._done_bytes)
            self._reported_s = time.monotonic()

    def _wait(self, seen: int, *, has_changed: bool) -> None:
        """Waits for a change since the ring had `seen` of them, or for a read, unless there was one."""
        if has_changed or self._ring.changes != seen:
            self._changed_s, self._wait_s = time.monotonic(), _MIN_WAIT_S
        if not has_changed:
            self._woken.wait(self._wait_s)
            self._wait_s = min(2 * self._wait_s, _MAX_WAIT_S)

    def _is_stalled(self) -> bool:
        """Removes participants that have died, at times. Returns whether those that live deliver nothing."""
        now = time.monotonic()
        if now < self._checked_s + _CHECK_S:
            return False
        self._checked_s = now
        with self._ring.locked():
            if self._ring.leave_dead() and self._waits:
                self._ring.abort()
        return not self._in_flight and now > self._changed_s + self._stall_s

    def _record(self, received: Sequence[int]) -> None:
        """Records what this participant has, so that slots are used again: not before a chunk has been sent."""
        for chunk in (*self._kept, *received):
            if self._exchange is not None and self._exchange.keeps(chunk):
                self._kept.add(chunk)
            else:
                self._kept.discard(chunk)
                self._ring.receive(chunk)

    def _settle(self) -> list[int]:
        """Publishes what has been read. Returns the chunks that only this participant has read, into its memory."""
        own = []
        while self._ended:
            claims, error = self._ended.popleft()
            self._in_flight -= len(claims)
            self._adapt(sum(self._chunks.size(claim.chunk) for claim in claims))
            for claim in claims:
                if error is not None:
                    self._ring.give_back(claim.chunk)
                elif claim.slot is None:
                    own.append(claim.chunk)
                else:
                    self._ring.publish(claim.chunk)
                    if self._exchange is not None:
                        self._exchange.send(claim)
            if error is not None:
                raise error
        return own

    def _adapt(self, nbytes: int) -> None:
        """Doubles the limit, up to the number of slots, if the last period was faster than those before.

        A slot that is used for the first time costs 0.8 ms per MiB, as much as the read itself.
        """
        period, now = self._period, time.monotonic()
        period.nbytes += nbytes
        if period.nbytes < self._limit * self._chunks.chunk_bytes // max(1, self._ring.active()):
            return
        rate = period.nbytes / max(now - period.began_s, 1e-6)
        if rate > _GAIN * self._best_rate:
            self._limit = min(2 * self._limit, self._ring.shape.slots)
        self._best_rate = max(rate, self._best_rate)
        self._period = _Period()

    def _claim(self) -> list[Claim]:
        ring = self._ring
        if ring.joined() < self._expected and time.monotonic() < self._until_s:
            return []
        share = min(self._limit, ring.shape.slots) // max(1, ring.active())
        if self._exchange is None:
            # Without a slot, each of those that have joined would read the chunk.
            waits = self._waits or ring.joined() >= self._most
            return ring.claim(max(1, share) - self._in_flight, self._range, waits=waits)
        # The other half is for what arrives from other machines.
        room = max(1, share // 2) - self._in_flight - self._exchange.unsent()
        return ring.claim(room, self._exchange.own, waits=True, is_exchanged=True)

    def _start(self, pool: CallPool, claims: Sequence[Claim]) -> None:
        """Reads chunks, several by one call if there are many."""
        self._in_flight += len(claims)
        size = -(-self._ring.shape.slots // _CALLS)
        for first in range(0, len(claims), size):
            batch = claims[first : first + size]
            reading = pool.submit(self._read_chunks, batch)
            reading.add_done_callback(functools.partial(self._end, batch))

    def _end(self, claims: Sequence[Claim], reading: "Future[None]") -> None:
        self._ended.append((claims, reading.exception() if not reading.cancelled() else None))
        self._woken.set()

    def _read_chunks(self, claims: Sequence[Claim]) -> None:
        """Reads chunks into their slots, or into memory of this process."""
        pieces, ranges, copied = [], dict[int, list[tuple[int, Any]]](), []
        for claim in claims:
            position = 0
            for piece in self._chunks.pieces[claim.chunk]:
                if claim.slot is not None:
                    memory: Any = self._ring.slot(claim.slot)[position : position + piece.length]
                else:
                    memory = part_of(self._memories[piece.target], piece.start, piece.length)
                    if isinstance(memory, torch.Tensor):
                        copied.append((memory, memory := np.empty(piece.length, np.uint8)))
                ranges.setdefault(piece.job, []).append((piece.offset, memory))
                pieces.append((piece, claim))
                position += piece.length
        jobs = [(*self._jobs[job][:3], segments) for job, segments in ranges.items()]
        results = _torchobj.scatter(jobs, self._checksum)
        for target, memory in copied:
            fill(target, memory)
        if self._checksum:
            by_job = {job: iter(sums) for job, (_, _, sums) in zip(ranges, results, strict=True)}
            for piece, claim in pieces:
                sums: Any = self._own_sums if claim.slot is None else self._ring.sums
                sums[piece.number] = next(by_job[piece.job])

    def _copy(self, claim: Claim) -> None:
        """Copies a chunk from its slot into memory of this process."""
        assert claim.slot is not None  # noqa: S101  only chunks in slots are ready
        slot, position = self._ring.slot(claim.slot), 0
        for piece in self._chunks.pieces[claim.chunk]:
            target = part_of(self._memories[piece.target], piece.start, piece.length)
            fill(target, slot[position : position + piece.length])
            position += piece.length

    def sums(self) -> list[list[int]]:
        """Returns the CRC-32 of each range of each job, from those of its pieces; empty without `checksum`."""
        if not self._checksum:
            return [[] for _ in self._jobs]
        of_ranges = [0] * len(self._memories)
        # The pieces of a range follow each other.
        for piece in itertools.chain.from_iterable(self._chunks.pieces):
            value = self._own_sums.get(piece.number, int(self._ring.sums[piece.number]))
            of_ranges[piece.target] = (
                value if not piece.start else _torchobj.crc32_combine(of_ranges[piece.target], value, piece.length)
            )
        found = iter(of_ranges)
        return [[next(found) for _ in ranges] for *_, ranges in self._jobs]
