"""How a load reads the ranges of objects: for itself, or once with other ranks.

`sharing` gives a load its `Reads`. With `share="auto"` a read joins one of the same ranges that is running in another
process of this machine, and waits for no process that has not begun. With `"host"` and `"job"` the reads are
collective: ranks compare what they read, and an error of one is raised on all.
"""

import contextlib
import dataclasses
import datetime
import errno
import hashlib
import logging
import os
import pickle
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch

from torchobj import _torchobj
from torchobj.config import StoreConfig, resolve
from torchobj.exceptions import ConfigError
from torchobj.ranks.machine import machine
from torchobj.ranks.meeting import Meeting, RankGoneError, Ranks
from torchobj.ranks.shared_read import handshake
from torchobj.ranks.shared_read.chunks import Chunks, Job, digest_of
from torchobj.ranks.shared_read.handshake import Offer
from torchobj.ranks.shared_read.hosts import Exchange, Hosts, exchange_pays
from torchobj.ranks.shared_read.participant import Participant
from torchobj.ranks.shared_read.ring import IS_SUPPORTED, MAX_PARTICIPANTS, AbortedError, Ring, RingShape, StalledError
from torchobj.urls import parse_url
from torchobj.workers import process
from torchobj.workers.memory_budget import memory_bytes

__all__ = ["MIN_BYTES", "Arrived", "Peers", "Reads", "ShareOption", "read_alone", "read_with", "sharing"]

logger = logging.getLogger("torchobj")

#: The argument `share` of loads.
ShareOption: TypeAlias = Literal["auto", "host", "job"] | None

#: Receives the number of bytes of a call that have arrived.
Arrived: TypeAlias = Callable[[int], object] | None

#: Smaller reads are not shared without a collective: two requests cost less than the handshake.
MIN_BYTES = 16 << 20

#: Number of requests at a time for which a ring has slots if `max_in_flight` is "auto".
_SLOTS = 64

#: Number of slots for processes that may come: as many chunks stay for them, and cost the first one an extra copy.
_KEPT_SLOTS = 16

#: A ring takes at most this part of the memory of the machine or container.
_MEMORY_SHARE = 16

#: Minimum size of a chunk that machines exchange.
_MIN_CHUNK_BYTES = 1 << 20

#: Number of chunks of each rank that machines exchange before they compare their timings.
_TRIED = 2

#: Without a collective: time without a change after which a rank reads for itself what another one has begun.
_STALL_S = 10.0

#: Time that a rank waits for the ring of another one that has just begun to offer it.
_TURN_S = 1.0

#: Time that a rank waits for those that are about to read the same.
_PEERS_S = 5.0

#: Time that a rank waits for the ring of the first rank of its machine, which has created it already or is about to.
_PATIENCE_S = 10.0

#: Environment variables that credentials depend on.
_CREDENTIAL_PREFIXES = ("AWS_", "GOOGLE_", "CLOUDSDK_")


class Reads(Protocol):
    """Reads ranges of objects into memory."""

    is_collective: bool
    """Whether all ranks make the same calls, one after the other."""

    def read(self, jobs: Sequence[Job], *, checksum: bool, arrived: Arrived = None) -> list[list[int]]:
        """Reads all ranges.

        Args:
            jobs: The objects; memory is a writable buffer, or a uint8 tensor of a device if `reaches` it.
            checksum: Whether to compute the CRC-32 of each range.
            arrived: Called about every 0.1 s with the number of bytes that have arrived; its exception ends the read.

        Returns:
            For each object the CRC-32 of each range; empty without `checksum`.

        Raises:
            ObjectChangedError: An object has another version.
            StoreError: An object cannot be read.
        """

    def reaches(self, device: torch.device) -> bool:
        """Returns whether it reads into tensors of this device."""


class _Alone:
    """Reads for this process."""

    is_collective = False

    def read(self, jobs: Sequence[Job], *, checksum: bool, arrived: Arrived = None) -> list[list[int]]:
        return [sums for _, _, sums in _torchobj.scatter(jobs, checksum, arrived)]

    def reaches(self, device: torch.device) -> bool:
        return device.type == "cpu"


#: Reads that are not shared.
read_alone: Reads = _Alone()


class _Settings(NamedTuple):
    """What the ring of a read depends on."""

    chunk_bytes: int
    slots: int

    def for_ranks(self, count: int) -> "_Settings":
        """Returns smaller chunks for many ranks of several machines, each of which has a chunk in each direction."""
        chunk_bytes = max(_MIN_CHUNK_BYTES, min(self.chunk_bytes, self.chunk_bytes * self.slots // (4 * count)))
        return _Settings(chunk_bytes, max(self.chunk_bytes * self.slots // chunk_bytes, 2 * count))


def _settings(config: StoreConfig) -> _Settings:
    chunk_bytes = config.part_bytes
    slots = _SLOTS if config.max_in_flight == "auto" else config.max_in_flight
    return _Settings(chunk_bytes, max(4, min(slots, memory_bytes() // _MEMORY_SHARE // chunk_bytes)))


@contextlib.contextmanager
def sharing(
    share: ShareOption, url: str, config: StoreConfig | None, group: "torch.distributed.ProcessGroup | None" = None
) -> Iterator[Reads]:
    """Returns the reads of one load. At the end of the block, collective ones let all ranks meet.

    Args:
        share: Whether ranks read together.
        url: What is loaded.
        config: Settings of the store.
        group: The ranks of collective reads; None for all.

    Raises:
        ConfigError: An argument is invalid, or the ranks load different things.
        Exception: That of another rank, for collective reads.
        RankGoneError: Another rank does not respond.
    """
    if share not in ("auto", "host", "job", None):
        raise ConfigError(f"share={share!r}: must be 'auto', 'host', 'job' or None")
    if group is not None and share not in ("host", "job"):
        raise ConfigError(f"process_group: is for share='host' and share='job', not for share={share!r}")
    if share in ("host", "job"):
        with _ranks_of(group) as ranks:
            if not ranks.several:
                yield read_alone
                return
            collective = _Collective(ranks, share, url)
            with collective.until_end():
                collective.configure(config)
                yield collective
        return
    is_one_of_several = process.rank(None).world_size > 1 or os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"
    yield read_with(Peers(), url, config) if share == "auto" and is_one_of_several else read_alone


class Peers(NamedTuple):
    """Processes of this machine that are about to read the same ranges."""

    nonce: bytes = b""
    """Secret that only these processes have; empty: any process may join."""
    ranks: int = 1
    """Their number, including this one."""


def read_with(peers: Peers, url: str, config: StoreConfig | None) -> Reads:
    """Returns reads that other processes join; each first waits for those peers that have not begun.

    Args:
        peers: The processes.
        url: What is loaded.
        config: Settings of the store.
    """
    can_join = IS_SUPPORTED and not process.in_worker() and (peers.ranks > 1 or not peers.nonce)
    return _Joining(url, resolve(url, config), peers) if can_join else read_alone


def _local_ranks() -> int:
    """Returns the number of ranks of this machine as the launcher gave it, or the most that a ring has."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() else MAX_PARTICIPANTS


class _Joining:
    """Joins a read of the same ranges, or lets others join."""

    is_collective = False

    def __init__(self, url: str, config: StoreConfig, peers: Peers) -> None:
        self._config, self._settings, self._peers = config, _settings(config), peers
        # Each process has objects of its own in memory.
        self._is_local = parse_url(url).scheme == "memory"

    def reaches(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def read(self, jobs: Sequence[Job], *, checksum: bool, arrived: Arrived = None) -> list[list[int]]:
        chunks = Chunks(jobs, self._settings.chunk_bytes)
        if chunks.nbytes < MIN_BYTES or self._is_local or any(version is None for _, _, version, _ in jobs):
            return read_alone.read(jobs, checksum=checksum, arrived=arrived)
        digest = hashlib.sha256(digest_of(jobs) + b"%d %d" % (checksum, self._settings.chunk_bytes) + self._peers.nonce)
        name, secret = f"torchobj-read-{os.geteuid()}-{digest.hexdigest()[:32]}", _identity_of(self._config)
        with contextlib.ExitStack() as stack:
            try:
                ring = self._join(name, secret, chunks, stack)
            except (OSError, StalledError) as error:
                logger.debug("share='auto': reading alone: %s", error)
                ring = None
            if ring is None or ring.shape[:2] != (len(chunks), chunks.count):
                return read_alone.read(jobs, checksum=checksum, arrived=arrived)
            own = Participant(
                ring,
                chunks,
                jobs,
                checksum=checksum,
                arrived=arrived,
                waits=False,
                stall_s=_STALL_S,
                expected=min(self._peers.ranks, MAX_PARTICIPANTS),
                patience_s=_PEERS_S,
                most=self._peers.ranks if self._peers.nonce else _local_ranks(),
            )
            try:
                with own:
                    own.read()
            except StalledError as error:
                logger.debug("share='auto': reading alone: %s", error)
                return read_alone.read(jobs, checksum=checksum, arrived=arrived)
            return own.sums()

    def _join(self, name: str, secret: bytes, chunks: Chunks, stack: contextlib.ExitStack) -> Ring | None:
        """Returns the ring of another process, or one that others can join until the stack is closed."""
        ring = _received(name, secret, stack, 0)
        if ring is None:
            slots = self._settings.slots if self._peers.nonce else min(self._settings.slots, _KEPT_SLOTS)
            ring = _created(chunks, slots, stack)
            try:
                stack.enter_context(Offer(name, secret, ring.descriptor()))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                # Another process was faster.
                return _received(name, secret, stack, _TURN_S)
        return ring


def _identity_of(config: StoreConfig) -> bytes:
    """Returns a digest of a configuration with its secrets, and of the variables that credentials come from."""
    names = [name for name in os.environ if name.startswith(_CREDENTIAL_PREFIXES) or name == "HOME"]
    variables = [(name, os.environ[name]) for name in sorted(names)]
    return hashlib.sha256(repr((_values(config), variables)).encode(errors="surrogateescape")).digest()


def _values(config: Any) -> Any:
    if dataclasses.is_dataclass(config):
        return [(field.name, _values(getattr(config, field.name))) for field in dataclasses.fields(config)]
    if not callable(config):
        return str(config)
    try:
        return pickle.dumps(config)
    except Exception:  # noqa: BLE001  pickling an object of the user's may raise anything
        # Not equal to that of another process.
        return secrets.token_bytes(16)


#: The ranks of each group that no load uses. Loads that overlap have other ones, whose messages do not mix.
_free: "weakref.WeakKeyDictionary[Any, list[Ranks]]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def _ranks_of(group: "torch.distributed.ProcessGroup | None") -> Iterator[Ranks]:
    """Returns the ranks of a group for one load, whose waits end with the timeout of that group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        yield Ranks()
        return
    key = torch.distributed.group.WORLD if group is None else group
    free = _free.setdefault(key, [])
    ranks = free.pop() if free else Ranks(group, _timeout_of(key))
    # Created here, on the thread that creates the program's other groups.
    ranks.group  # noqa: B018
    try:
        yield ranks
    finally:
        if ranks.is_connected:
            free.append(ranks)


def _timeout_of(group: Any) -> datetime.timedelta:
    default: datetime.timedelta = torch.distributed.constants.default_pg_timeout
    for device in ("cpu", "cuda"):
        with contextlib.suppress(Exception):
            return getattr(group._get_backend(torch.device(device)).options, "_timeout", default)
    return default


class _Plan(NamedTuple):
    """What a rank is going to read."""

    host: str
    share: str
    url: str
    digest: bytes
    checksum: bool
    settings: _Settings


class _Start(NamedTuple):
    """What the ranks of a read agree on before they join."""

    name: str
    """Name of the handshakes, to which the number of the first rank of a machine is added."""
    secret: bytes
    firsts: list[int]
    """For each rank the first rank of its machine."""
    settings: _Settings


class _Collective:
    """Reads once for all ranks of a machine, or of a job."""

    is_collective = True

    def __init__(self, ranks: Ranks, share: str, url: str) -> None:
        self._ranks, self._share, self._url = ranks, share, url
        #: Whether a meeting has failed, so that the other ranks have left, too.
        self._is_over = False

    def reaches(self, device: torch.device) -> bool:  # noqa: ARG002  tensors of any device are copied to
        return True

    def configure(self, config: StoreConfig | None) -> None:
        """Takes the settings. What is wrong with them is raised on all ranks.

        Raises:
            ConfigError: They are invalid, or the URL is.
        """
        self._settings = _settings(resolve(self._url, config))
        # Each process has objects of its own in memory.
        self._is_local = parse_url(self._url).scheme == "memory"

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[Meeting]:
        try:
            with self._ranks.meeting() as meeting:
                yield meeting
        except BaseException:
            self._is_over = True
            raise

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Meeting]:
        """Lets all ranks meet after they have read. What ended the read of one rank is raised on all of them."""
        aborted = None
        with self._meeting() as meeting:
            try:
                yield meeting
            except AbortedError as error:
                aborted = error
            except StalledError as error:
                raise RankGoneError(f"{self._url}: {error}") from error
        if aborted is not None:
            raise aborted

    @contextlib.contextmanager
    def until_end(self) -> Iterator[None]:
        """Lets all ranks meet at the end of the block, unless they have met for an error."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as failed:  # noqa: BLE001  all ranks raise it
            error = failed
        if error is not None and self._is_over:
            raise error
        with self._ranks.meeting() as meeting:
            if error is not None:
                raise error
            self._check(meeting.gather(None))

    def _check(self, plans: Sequence[_Plan | None] | None) -> None:
        """Compares what ranks read, on the first one.

        Raises:
            ConfigError: They differ.
        """
        if plans is None:
            return
        first = plans[0]
        for number, plan in enumerate(plans):
            if first is None or plan is None:
                if first is not plan:
                    reading, ended = (0, number) if plan is None else (number, 0)
                    raise ConfigError(
                        f"share={self._share!r}: rank {reading} reads {self._url}, of which rank {ended} needs nothing "
                        "more; load the same entries into objects of the same form on all ranks"
                    )
                continue
            if plan.share != first.share:
                raise ConfigError(
                    f"share={plan.share!r} on rank {number}, {first.share!r} on rank 0: must be the same on all ranks"
                )
            if plan.url != first.url:
                raise ConfigError(
                    f"share={self._share!r}: rank {number} loads {plan.url}, rank 0 loads {first.url}: must be the "
                    "same on all ranks; share=None lets each rank read for itself"
                )
            if (plan.digest, plan.checksum) != (first.digest, first.checksum):
                raise ConfigError(
                    f"share={self._share!r}: rank {number} reads another version or other ranges of {plan.url} than "
                    "rank 0; load the same entries into objects of the same form on all ranks, and do not overwrite "
                    "the file meanwhile"
                )

    def read(self, jobs: Sequence[Job], *, checksum: bool, arrived: Arrived = None) -> list[list[int]]:
        if self._is_local:
            return read_alone.read(jobs, checksum=checksum, arrived=arrived)
        start = self._begin(jobs, checksum=checksum)
        chunks = Chunks(jobs, start.settings.chunk_bytes)
        with contextlib.ExitStack() as stack:
            ring, hosts = self._join(start, chunks, stack)
            stall_s = self._ranks.timeout.total_seconds()
            own = Participant(ring, chunks, jobs, checksum=checksum, arrived=arrived, waits=True, stall_s=stall_s)
            with own:
                if len(hosts.groups) == 1 or self._share == "host":
                    with self._reading():
                        own.read()
                else:
                    self._read_with_hosts(own, ring, chunks, hosts)
            return own.sums()

    def _read_with_hosts(self, own: Participant, ring: Ring, chunks: Chunks, hosts: Hosts) -> None:
        """Exchanges the first chunks between machines, and the others if that is not slower than to read them."""
        group = self._ranks.group
        assert group is not None  # noqa: S101  there are several ranks
        first = range(min(len(chunks), _TRIED * len(hosts.groups) * hosts.columns))
        others = range(len(first), len(chunks))
        with self._reading() as meeting:
            with Exchange(ring, chunks, first, hosts, group) as exchange:
                own.read(first, exchange)
            timings = meeting.gather(exchange.timing)
            if timings is not None:
                meeting.result = exchange_pays(timings)
        if not others:
            return
        with self._reading():
            logger.debug("%s: machines %s", self._url, "exchange parts" if meeting.result else "read for themselves")
            if meeting.result:
                with Exchange(ring, chunks, others, hosts, group) as exchange:
                    own.read(others, exchange)
            else:
                own.read(others)

    def _begin(self, jobs: Sequence[Job], *, checksum: bool) -> _Start:
        """Lets all ranks agree on what they read, and on the machines that they may be on."""
        if not IS_SUPPORTED:
            raise ConfigError(f"share={self._share!r}: needs Linux; share=None lets each rank read for itself")
        with self._meeting() as meeting:
            plans = meeting.gather(_Plan(machine(), self._share, self._url, digest_of(jobs), checksum, self._settings))
            self._check(plans)
            if plans is not None:
                hosts = [plan.host for plan in plans]
                settings = plans[0].settings
                if self._share == "job" and len(set(hosts)) > 1:
                    settings = settings.for_ranks(len(hosts))
                meeting.result = _Start(secrets.token_hex(8), secrets.token_bytes(32), _firsts(hosts), settings)
        start: _Start = meeting.result
        return start

    def _join(self, start: _Start, chunks: Chunks, stack: contextlib.ExitStack) -> tuple[Ring, Hosts]:
        """Joins the ring of this machine. A rank that the descriptor does not reach has a ring of its own."""
        number = self._ranks.number
        first = start.firsts[number]
        name = f"torchobj-read-{start.name}-{first}"
        # The offer ends when all ranks have joined.
        with contextlib.ExitStack() as offering, self._meeting() as meeting:
            try:
                ring = None if first == number else _received(name, start.secret, stack)
                joined = number if ring is None else first
                if ring is None:
                    ring = _created(chunks, start.settings.slots, stack)
                    if first == number:
                        offering.enter_context(Offer(name, start.secret, ring.descriptor()))
            except OSError as error:
                raise ConfigError(
                    f"share={self._share!r}: {self._url}: the system refuses shared memory: {error}; share=None lets "
                    "each rank read for itself"
                ) from error
            all_joined = meeting.gather(joined)
            if all_joined is not None:
                found: dict[int, list[int]] = {}
                for rank, of_rank in enumerate(all_joined):
                    found.setdefault(of_rank, []).append(rank)
                meeting.result = list(found.values())
        return ring, Hosts(meeting.result, number)


def _firsts(hosts: Sequence[str]) -> list[int]:
    """Returns for each rank the first one of the same machine: each ring has at most `MAX_PARTICIPANTS` of them."""
    firsts, of_host = [], dict[str, list[int]]()
    for number, host in enumerate(hosts):
        ranks = of_host.setdefault(host, [])
        ranks.append(number)
        firsts.append(ranks[(len(ranks) - 1) // MAX_PARTICIPANTS * MAX_PARTICIPANTS])
    return firsts


def _created(chunks: Chunks, slots: int, stack: contextlib.ExitStack) -> Ring:
    """Creates a ring, which `stack` closes."""
    shape = RingShape(len(chunks), chunks.count, max(1, min(slots, len(chunks))), chunks.chunk_bytes)
    ring = Ring.create(shape)
    stack.callback(ring.close)
    return ring


def _received(name: str, secret: bytes, stack: contextlib.ExitStack, patience_s: float = _PATIENCE_S) -> Ring | None:
    """Joins the ring that another process offers, which `stack` closes; None if it does not arrive."""
    descriptor = handshake.receive(name, secret, patience_s=patience_s)
    if descriptor is None:
        return None
    try:
        ring = Ring.join(descriptor)
    finally:
        os.close(descriptor)
    if ring is not None:
        stack.callback(ring.close)
    return ring
