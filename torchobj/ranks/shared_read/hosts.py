"""Exchanges chunks between machines: each machine reads its part, and sends it to the others while it reads on.

The n-th ranks of all machines form a column. Each rank reads every n-th chunk, and sends them to the others of its
column, so that all ranks send and receive at the same time. Every chunk begins with a header, which says if its sender
has failed: then no bytes follow, but all headers are still sent, and no rank waits for a message that never comes.
"""

import queue
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

from torchobj.ranks.meeting import RankGoneError
from torchobj.ranks.shared_read.chunks import Chunks
from torchobj.ranks.shared_read.ring import AbortedError, Claim, Ring

__all__ = ["Exchange", "Hosts", "Timing", "exchange_pays"]

#: Time between two attempts to get a slot for a chunk of another machine.
_PAUSE_S = 0.001

#: An exchange is chosen if it takes up to this many times as long as reading, because machines that read the same
#: objects slow each other down.
_PREFERENCE = 2.0


class Hosts(NamedTuple):
    """The ranks of each machine."""

    groups: list[list[int]]
    """The numbers of the ranks of each machine."""
    number: int
    """This rank."""

    @property
    def own(self) -> int:
        """Index of the machine of this rank."""
        return next(index for index, group in enumerate(self.groups) if self.number in group)

    @property
    def columns(self) -> int:
        """Number of ranks of each machine that read and send; others only copy."""
        return min(map(len, self.groups))

    @property
    def column(self) -> int:
        """This rank's number among those of its machine."""
        return self.groups[self.own].index(self.number)

    @property
    def round_size(self) -> int:
        """Number of chunks in a round, of which each rank that reads has one. Those of a column follow each other."""
        return len(self.groups) * self.columns


class Timing(NamedTuple):
    """How fast a rank reads and exchanges, in seconds per byte; 0 if it did not."""

    read: float
    exchange: float


def exchange_pays(timings: list[Timing]) -> bool:
    """Returns whether machines exchange chunks, rather than each reading all of them."""
    reading = [timing.read for timing in timings if timing.read]
    exchanging = [timing.exchange for timing in timings if timing.exchange]
    return not (reading and exchanging) or max(exchanging) <= _PREFERENCE * sum(reading) / len(reading)


class Exchange:
    """Sends the chunks that this rank reads to its column, and receives those of the others. A context.

    One thread does both, in rounds: it waits for the next chunk of this rank, and exchanges it with one machine after
    the other, each rank with another one.

    Args:
        ring: The ring of this machine.
        chunks: The chunks of the whole read.
        part: Those that are exchanged.
        hosts: The machines.
        group: Process group of the ranks, on the CPU.
    """

    def __init__(
        self, ring: Ring, chunks: Chunks, part: range, hosts: Hosts, group: "torch.distributed.ProcessGroup"
    ) -> None:
        self._ring, self._chunks, self._part, self._hosts, self._group = ring, chunks, part, hosts, group
        #: The first chunk of this column, and those of this rank. A part begins with a round.
        self._first = part.start + hosts.column * len(hosts.groups)
        reads = hosts.column < hosts.columns
        self.own = range(self._first + hosts.own, part.stop if reads else 0, hosts.round_size)
        self._unsent = set(self.own)
        #: What the participant has published; None: it has failed, and publishes nothing more.
        self._published: queue.Queue[Claim | None] = queue.Queue()
        self._slots: dict[int, int] = {}
        #: Number of chunks that were given to `send`, and of those that are sent.
        self._given = self._sent = 0
        self._has_failed = False
        self._error: BaseException | None = None
        self._began_s = time.monotonic()
        self._read_s = self._exchange_s = 0.0
        self._exchanged_bytes = 0
        self._thread = threading.Thread(target=self._run, name="torchobj-exchange", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._has_failed = True
        self._published.put(None)
        self._thread.join()
        if self._error is not None and (kind is None or issubclass(kind, AbortedError)):
            if not isinstance(self._error, RuntimeError):
                raise self._error
            raise RankGoneError(f"another rank is gone: {self._error}") from self._error

    @property
    def timing(self) -> Timing:
        """How fast this rank has read and exchanged."""
        read_bytes = sum(map(self._chunks.size, self.own))
        return Timing(
            self._read_s / read_bytes if read_bytes else 0.0,
            self._exchange_s / self._exchanged_bytes if self._exchanged_bytes else 0.0,
        )

    def send(self, claim: Claim) -> None:
        """Starts to send a chunk that this rank has published."""
        self._read_s = time.monotonic() - self._began_s
        self._given += 1
        self._published.put(claim)

    def keeps(self, chunk: int) -> bool:
        """Returns whether a chunk was not sent yet, so that its slot must not be used again."""
        return chunk in self._unsent

    def unsent(self) -> int:
        """Returns the number of chunks that are being sent, or wait for it."""
        return self._given - self._sent

    def _run(self) -> None:
        hosts, machines = self._hosts, len(self._hosts.groups)
        machine, column = hosts.own, hosts.column
        if column >= hosts.columns:
            return
        for first in range(self._first, self._part.stop, hosts.round_size):
            # The chunk of machine m in this round.
            chunks = range(first, first + machines)
            own = chunks[machine] if chunks[machine] in self._part else None
            slot = None if own is None else self._slot_of(own)
            for step in range(1, machines):
                to, source = (machine + step) % machines, (machine - step) % machines
                sent = None if own is None else (own, slot, hosts.groups[to][column])
                received = chunks[source]
                self._exchange(sent, (received, hosts.groups[source][column]) if received in self._part else None)
            if own is not None:
                self._unsent.discard(own)
                self._sent += 1

    def _slot_of(self, chunk: int) -> int | None:
        """Returns the slot of a chunk of this rank when it is published; None if the read has failed."""
        while chunk not in self._slots and not self._has_failed:
            claim = self._published.get()
            if claim is None:
                self._has_failed = True
            elif claim.slot is not None:
                self._slots[claim.chunk] = claim.slot
        return None if self._has_failed else self._slots.pop(chunk)

    def _exchange(self, sent: tuple[int, int | None, int] | None, received: tuple[int, int] | None) -> None:
        """Sends a chunk to one rank, and receives one of another rank."""
        try:
            header = self._exchange_headers(sent, received)
            began_s = time.monotonic()
            works, claim = [], None
            if received is not None and header is not None:
                chunk, source = received
                claim = self._slot_for(chunk)
                slot = None if claim is None else claim.slot
                size = self._chunks.size(chunk)
                data = torch.empty(size, dtype=torch.uint8) if slot is None else self._tensor(slot, chunk)
                works.append(torch.distributed.irecv(data, group=self._group, group_src=source, tag=2 * chunk + 1))
                self._exchanged_bytes += size
            if sent is not None and sent[1] is not None:
                chunk, slot, to = sent
                data = self._tensor(sent[1], chunk)
                works.append(torch.distributed.isend(data, group=self._group, group_dst=to, tag=2 * chunk + 1))
            _wait(works)
            self._exchange_s += time.monotonic() - began_s
            if claim is not None and header is not None:
                for number, piece in enumerate(self._chunks.pieces[claim.chunk], 1):
                    self._ring.sums[piece.number] = int(header[number])
                with self._ring.locked():
                    self._ring.publish(claim.chunk)
        except BaseException as error:  # noqa: BLE001  raised by `__exit__`: a rank is gone, or a fault of this rank
            self._error = self._error or error
            self._fail()

    def _exchange_headers(
        self, sent: tuple[int, int | None, int] | None, received: tuple[int, int] | None
    ) -> torch.Tensor | None:
        """Sends whether the chunk follows, and the CRC-32 of its pieces. Returns what was received, if one follows."""
        works, header = [], None
        if received is not None:
            chunk, source = received
            header = self._header(chunk)
            works.append(torch.distributed.irecv(header, group=self._group, group_src=source, tag=2 * chunk))
        if sent is not None:
            chunk, slot, to = sent
            own = self._header(chunk)
            own[0] = slot is None
            for number, piece in enumerate(self._chunks.pieces[chunk], 1):
                own[number] = int(self._ring.sums[piece.number])
            works.append(torch.distributed.isend(own, group=self._group, group_dst=to, tag=2 * chunk))
        _wait(works)
        if header is not None and header[0]:
            self._fail()
            return None
        return header

    def _fail(self) -> None:
        self._has_failed = True
        with self._ring.locked():
            self._ring.abort()

    def _slot_for(self, chunk: int) -> Claim | None:
        """Returns the claim of a chunk when there is a slot; None if the read has failed."""
        while not self._has_failed:
            with self._ring.locked():
                if self._ring.is_aborted:
                    self._has_failed = True
                elif claims := self._ring.claim(1, range(chunk, chunk + 1), waits=True, is_exchanged=True):
                    return claims[0]
            time.sleep(_PAUSE_S)
        return None

    def _header(self, chunk: int) -> torch.Tensor:
        return torch.zeros(1 + len(self._chunks.pieces[chunk]), dtype=torch.int64)

    def _tensor(self, slot: int, chunk: int) -> torch.Tensor:
        return torch.frombuffer(self._ring.slot(slot), dtype=torch.uint8)[: self._chunks.size(chunk)]


def _wait(works: Sequence["torch.distributed.Work | None"]) -> None:
    for work in works:
        if work is not None:
            work.wait()
