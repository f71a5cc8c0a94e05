"""A ring of shared memory, through which the ranks of a machine hand chunks to each other. Reads and sends nothing.

The file has the state of each chunk and participant, and slots with the bytes of chunks. Every change is one store of 8
bytes, made under a lock that the system releases when a process is killed, so that a killed rank leaves no half-made
change. A participant holds a lock of its own, by which the others notice its death: its chunks can then be read by
another one.

A chunk is unread, or a participant reads it, or it is ready in a slot. Its slot is used again when all participants
have received it, so the slowest one holds the others back. A participant that joins later reads what is gone again.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from torchobj.exceptions import TorchobjError
from torchobj.workers.descriptors import Descriptor

__all__ = ["IS_SUPPORTED", "MAX_PARTICIPANTS", "AbortedError", "Claim", "Ring", "RingShape", "StalledError"]

#: Maximum number of processes that join one ring: each has a bit of a word.
MAX_PARTICIPANTS = 60

#: Whether this system has files in memory whose size can be sealed, and locks of open files.
IS_SUPPORTED = sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLKW")

#: Positions of the numbers at the start of the file: the shape, the number of changes, of chunks that were published,
#: whether the read was aborted; then the state of each participant.
_SHAPE, _CHANGES, _PUBLISHED, _ABORTED, _PARTICIPANTS = 0, 4, 5, 6, 8
_STATES = _PARTICIPANTS + MAX_PARTICIPANTS

#: States of a participant.
_ABSENT, _ACTIVE, _LEFT = range(3)

#: States of a chunk, in the lowest bits of its word. Above them are its reader, and its slot.
_UNREAD, _READING, _READY = range(3)
_READER_SHIFT, _SLOT_SHIFT = 8, 16

#: Slot of a chunk that is read into memory of its reader.
_NO_SLOT = 1 << 30

#: Maximum time to wait for the lock of the states, which is held for microseconds; interval between two attempts.
_LOCK_S, _LOCK_PAUSE_S = 10.0, 0.0002

#: Byte of the lock of the states; each participant holds the byte behind it with its number.
_LOCKED_BYTE = 0


class AbortedError(TorchobjError):
    """Another participant has failed, and this one ends."""


class StalledError(TorchobjError):
    """Another participant is alive, but does not go on."""


class RingShape(NamedTuple):
    """The sizes of a ring."""

    chunks: int
    """Number of chunks."""
    pieces: int
    """Number of pieces of all chunks."""
    slots: int
    """Number of chunks that are in memory at a time."""
    chunk_bytes: int
    """Size of a slot."""

    @property
    def data(self) -> int:
        """Offset of the first slot: a whole page."""
        numbers = _STATES + 2 * self.chunks + self.pieces
        return -(-8 * numbers // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.data + self.slots * self.chunk_bytes


#: The rings of this process.
_rings: "weakref.WeakSet[Ring]" = weakref.WeakSet()


def _opened(descriptor: int) -> int:
    """Opens the file of a descriptor once more."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def _close_in_child() -> None:
    for ring in list(_rings):
        ring.close()


os.register_at_fork(after_in_child=_close_in_child)


class Claim(NamedTuple):
    """A chunk that this participant reads."""

    chunk: int
    slot: int | None
    """Where others receive it; None: only this participant needs it."""


class Ring:
    """A participant's view of the ring. Use `create`, or `join` with the descriptor of another participant.

    One thread at a time uses it, except for `locked`.

    Args:
        descriptor: The file, which the caller closes.
        shape: The sizes.

    Raises:
        OSError: The system refuses it.
    """

    def __init__(self, descriptor: int, shape: RingShape) -> None:
        self.shape, self.number = shape, -1
        self._thread_lock = threading.Lock()
        # Opened once to be mapped, and once for the locks: these belong to an open file, as which a forked child keeps
        # the mapping, and the other process that which it has sent.
        mapped = _opened(descriptor)
        try:
            self._map = mmap.mmap(mapped, shape.nbytes)
        finally:
            os.close(mapped)
        #: None when it is closed: also in a forked child, which would keep the locks when this process has ended.
        self._own: Descriptor | None = Descriptor(_opened(descriptor))
        _rings.add(self)
        self._numbers = np.frombuffer(self._map, np.int64, shape.data // 8)
        self._participants = self._numbers[_PARTICIPANTS:_STATES]
        self._states = self._numbers[_STATES : _STATES + shape.chunks]
        #: The participants that have received each chunk, a bit for each.
        self._received = self._numbers[_STATES + shape.chunks : _STATES + 2 * shape.chunks]
        #: The CRC-32 of each piece.
        self.sums = self._numbers[_STATES + 2 * shape.chunks :][: shape.pieces]

    @classmethod
    def create(cls, shape: RingShape) -> "Ring":
        """Creates a ring, with this process as its first participant. Its pages take memory when they are used.

        Raises:
            OSError: The system refuses it.
        """
        created = os.memfd_create("torchobj-read", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(created, shape.nbytes)
            # The seals prevent truncation below a mapping of another process.
            fcntl.fcntl(created, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            os.pwrite(created, struct.pack("4q", *shape), 8 * _SHAPE)
            ring = cls._of(created, shape)
        finally:
            os.close(created)
        assert ring is not None  # noqa: S101  a new ring has free numbers
        return ring

    @classmethod
    def join(cls, received: int) -> "Ring | None":
        """Joins the ring of another process.

        Args:
            received: A descriptor that the other process has sent; the caller closes it.

        Returns:
            The ring; None if the file is not a ring, or has no free participant number.

        Raises:
            OSError: The system refuses it.
        """
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        if fcntl.fcntl(received, fcntl.F_GET_SEALS) & seals != seals:
            return None
        shape = RingShape(*struct.unpack("4q", os.pread(received, 32, 8 * _SHAPE)))
        if min(shape) < 0 or os.fstat(received).st_size != shape.nbytes:
            return None
        return cls._of(received, shape)

    @classmethod
    def _of(cls, descriptor: int, shape: RingShape) -> "Ring | None":
        ring = cls(descriptor, shape)
        try:
            with ring.locked():
                free = np.flatnonzero(ring._participants == _ABSENT)
                if len(free):
                    ring.number = int(free[0])
                    ring._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, ring.number + 1)
                    ring._participants[ring.number] = _ACTIVE
        except BaseException:
            ring.close()
            raise
        if ring.number >= 0:
            return ring
        ring.close()
        return None

    def descriptor(self) -> int:
        """Returns the descriptor, for `join` in another process.

        Raises:
            OSError: It is closed.
        """
        if self._own is None:
            raise OSError(errno.EBADF, "this ring is closed, as it is in a forked child")
        return self._own.number()

    def close(self) -> None:
        """Closes the file. Views of slots stay valid."""
        self._own = None

    def _lock(self, command: int, kind: int, byte: int) -> int:
        """Locks, unlocks or tests a byte of the file. Returns the kind of the lock that another process holds."""
        asked = struct.pack("hhqqiq", kind, os.SEEK_SET, byte, 1, 0, 0)
        answer = fcntl.fcntl(self.descriptor(), command, asked)
        return int(struct.unpack_from("h", answer)[0]) if isinstance(answer, bytes) else fcntl.F_UNLCK

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Excludes other participants, and other threads of this one. The lock of a killed process is released.

        Raises:
            StalledError: Another participant holds the lock for too long: it is stopped.
        """
        with self._thread_lock:
            self._wait_for_lock()
            try:
                yield
            finally:
                self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _LOCKED_BYTE)

    def _wait_for_lock(self) -> None:
        until_s = time.monotonic() + _LOCK_S
        while True:
            try:
                self._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, _LOCKED_BYTE)
            except (BlockingIOError, PermissionError):
                if time.monotonic() > until_s:
                    raise StalledError(f"another rank holds the lock of a shared read for {_LOCK_S:.0f} s") from None
                time.sleep(_LOCK_PAUSE_S)
            else:
                return

    @property
    def changes(self) -> int:
        """A number that grows when chunks become ready, unread or received, by any participant. Needs no lock."""
        return int(self._numbers[_CHANGES])

    def _count_change(self) -> None:
        self._numbers[_CHANGES] += 1

    def slot(self, number: int) -> memoryview:
        """Returns the memory of a slot: `chunk_bytes` bytes, writable."""
        start = self.shape.data + number * self.shape.chunk_bytes
        return memoryview(self._map)[start : start + self.shape.chunk_bytes]

    # All methods below are called under the lock.

    @property
    def is_aborted(self) -> bool:
        """Whether a participant has failed, and all have to."""
        return bool(self._numbers[_ABORTED])

    def abort(self) -> None:
        """Ends the read of all participants."""
        self._numbers[_ABORTED] = 1
        self._count_change()

    def joined(self) -> int:
        """Returns the number of participants that have joined so far."""
        return int(np.count_nonzero(self._participants != _ABSENT))

    def active(self) -> int:
        """Returns the number of participants that have not left."""
        return int(np.count_nonzero(self._participants == _ACTIVE))

    def _active_bits(self) -> int:
        return sum(1 << int(number) for number in np.flatnonzero(self._participants == _ACTIVE))

    def leave_dead(self) -> bool:
        """Removes participants whose processes have ended: what they were reading is unread.

        Returns:
            Whether there were any.
        """
        found = False
        for number in np.flatnonzero(self._participants == _ACTIVE):
            if number != self.number and self._lock(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, int(number) + 1) == fcntl.F_UNLCK:
                self._leave(int(number))
                found = True
        return found

    def leave(self) -> None:
        """Removes this participant."""
        self._leave(self.number)

    def _leave(self, number: int) -> None:
        reading = (self._states & 0xFF == _READING) & ((self._states >> _READER_SHIFT) & 0xFF == number)
        for chunk in np.flatnonzero(reading):
            self._states[chunk] = _UNREAD
        self._participants[number] = _LEFT
        self._count_change()

    def needed(self, chunks: range) -> int:
        """Returns the number of these chunks that this participant has not received."""
        received = self._received[chunks.start : chunks.stop]
        return int(np.count_nonzero(received & (1 << self.number) == 0))

    def missing(self) -> list[int]:
        """Returns the chunks that this participant has not received."""
        return [int(chunk) for chunk in np.flatnonzero(self._received & (1 << self.number) == 0)]

    def ready(self) -> list[Claim]:
        """Returns the chunks in slots that this participant has not received."""
        found = (self._states & 0xFF == _READY) & (self._received & (1 << self.number) == 0)
        return [Claim(int(chunk), int(self._states[chunk]) >> _SLOT_SHIFT) for chunk in np.flatnonzero(found)]

    def claim(self, count: int, chunks: range, *, waits: bool, is_exchanged: bool = False) -> list[Claim]:
        """Claims chunks that are unread, the first ones first.

        Args:
            count: Maximum number.
            chunks: Those that may be claimed.
            waits: Whether to wait for a slot, because all participants have joined. Otherwise chunks stay in unused
                slots for those that join later, and a chunk without a slot is read by each participant for itself.
            is_exchanged: Whether each chunk needs a slot, because machines exchange it.
        """
        if count <= 0:
            return []
        own, active = 1 << self.number, self._active_bits()
        candidates = np.arange(chunks.start, chunks.stop, chunks.step)
        unread = (self._states[candidates] & 0xFF == _UNREAD) & (self._received[candidates] & own == 0)
        found = candidates[unread][:count]
        free = self._free_slots(active, len(found), reuse_first=waits) if len(found) else []
        claims: list[Claim] = []
        for chunk in map(int, found):
            others = active & ~int(self._received[chunk]) & ~own
            is_shared = (
                is_exchanged or others or (not waits and self._numbers[_PUBLISHED] + len(claims) < self.shape.slots)
            )
            if waits and is_shared and not free:
                break
            slot = free.pop() if is_shared and free else None
            reader = self.number << _READER_SHIFT
            self._states[chunk] = _READING | reader | (_NO_SLOT if slot is None else slot) << _SLOT_SHIFT
            claims.append(Claim(chunk, slot))
        return claims

    def _free_slots(self, active: int, count: int, *, reuse_first: bool) -> list[int]:
        """Returns up to `count` slots without bytes that a participant needs; those to be used first are last.

        The chunks that were in the returned slots are unread for participants that join later.
        """
        kinds, slots = self._states & 0xFF, self._states >> _SLOT_SHIFT
        held = ((kinds == _READING) & (slots != _NO_SLOT)) | (kinds == _READY)
        unused = sorted(set(range(self.shape.slots)) - {int(slot) for slot in slots[held]})
        done = np.flatnonzero((kinds == _READY) & (active & ~self._received == 0))
        count_reused = count if reuse_first else count - len(unused)
        done = done[: max(count_reused, 0)]
        reused = [int(slots[chunk]) for chunk in done]
        self._states[done] = _UNREAD
        return [*unused[::-1], *reused] if reuse_first else [*reused, *unused[::-1]]

    def publish(self, chunk: int) -> None:
        """Makes a chunk that this participant has read into a slot ready for all."""
        self._states[chunk] = int(self._states[chunk]) & ~0xFF | _READY
        self._numbers[_PUBLISHED] += 1
        self._count_change()

    def give_back(self, chunk: int) -> None:
        """Makes a chunk unread that this participant has claimed."""
        self._states[chunk] = _UNREAD
        self._count_change()

    def receive(self, chunk: int) -> None:
        """Records that this participant has the bytes of a chunk."""
        self._received[chunk] |= 1 << self.number
        state = int(self._states[chunk])
        if state & 0xFF == _READING:
            # Read for itself.
            self._states[chunk] = _UNREAD
        self._count_change()
