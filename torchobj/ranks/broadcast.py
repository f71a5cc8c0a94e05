"""Broadcasts one listing, or another value, to the ranks of a job: rank 0 lists, and the others receive its manifest.

Uses the store of the default process group and no collective: a rank that needs the listing alone, as in `if rank == 0:
print(len(dataset))`, does not block, and the others wait for rank 0 only, with a time limit. Lists nothing itself.

The n-th use of a name on one rank is the n-th of all ranks. The store may outlive the process group, and the job's
attempt: all keys contain a nonce of rank 0, one for each process group. A rank that used a name more often than others
may have another listing, so the ranks compare what they use when a pass begins.
"""

import collections
import datetime
import functools
import hashlib
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sized
from contextlib import contextmanager
from typing import Any, SupportsBytes, TypeVar

import torch.distributed

from torchobj import exceptions
from torchobj.exceptions import ManifestMismatchError, TorchobjError
from torchobj.manifest import Manifest
from torchobj.workers import process

logger = logging.getLogger("torchobj")

_Value = TypeVar("_Value", bound=SupportsBytes)

#: Maximum time that a rank waits for the listing of rank 0.
_TIMEOUT = datetime.timedelta(hours=1)

#: Time after which a rank that waits for a listing checks whether rank 0 lists something else.
_OTHER_NAMES_S = 30.0

#: Maximum time that a rank waits at the beginning of a pass for rank 0 to begin its pass.
_PASS_S = 20.0

#: Maximum interval between two checks; Ctrl-C interrupts it.
_MAX_PAUSE_S = 0.5

#: A manifest is sent in chunks of this size, because a TCPStore transfers each value in one message.
_CHUNK_BYTES = 16 << 20

#: Keys where gloo stores the address of rank 0, which each process group replaces; they depend on the version of torch.
_ADDRESSES = ("cpu//0/0", "0//cpu//0/0")


class _Job:
    """What this rank has done with one process group."""

    def __init__(self, rank: int, store: Any, what: str) -> None:
        self.rank, self.store = rank, store
        self.nonce = _nonce(rank, store, what)
        #: Number of uses of each name.
        self.uses: collections.Counter[str] = collections.Counter()
        #: The keys of all uses.
        self.keys: set[str] = set()
        #: The latest use of each name since a pass began.
        self.unconfirmed: dict[str, str] = {}
        #: Number of passes that confirmed each name.
        self.passes: collections.Counter[str] = collections.Counter()
        #: Whether to wait for rank 0 to begin a pass: until it has not done so once.
        self.waits = True

    def key_of(self, name: str, kind: str, number: int) -> str:
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        return f"torchobj/{self.nonce}/{kind}/{digest}/{number}"

    def use(self, name: str) -> str:
        """Returns the key of the next use of a name. Rank 0 announces it."""
        self.uses[name] += 1
        key = self.key_of(name, "use", self.uses[name])
        self.keys.add(key)
        if self.rank == 0:
            self.store.set(f"torchobj/{self.nonce}/name/{len(self.keys)}", f"{key} {name}")
            self.store.set(f"torchobj/{self.nonce}/names", str(len(self.keys)))
        return key

    def check_names(self, key: str, name: str) -> None:
        """Checks, while this rank waits for a use of rank 0, that rank 0 has not used another name instead.

        Raises:
            ManifestMismatchError: It has.
        """
        count = f"torchobj/{self.nonce}/names"
        number = int(self.store.get(count)) if self.store.check([count]) else 0
        lines = [self.store.get(f"torchobj/{self.nonce}/name/{at}").decode() for at in range(1, number + 1)]
        begun = dict(line.split(" ", 1) for line in lines)
        others = [of_first for other, of_first in begun.items() if other not in self.keys]
        if key not in begun and others:
            raise ManifestMismatchError(
                f"rank {self.rank} waits for rank 0 to list {name}, and rank 0 lists {others[-1]}, which rank "
                f"{self.rank} does not; create the same datasets on all ranks"
            )


#: By the store of a process group; a new process group has a new one.
_jobs: weakref.WeakKeyDictionary[Any, _Job] = weakref.WeakKeyDictionary()
#: Nonces of the process groups that this process was in.
_nonces: set[str] = set()


def _nonce(rank: int, store: Any, what: str) -> str:
    """Returns the nonce of a process group: rank 0 creates it at its first use of a dataset."""
    with _store_errors(f"rank 0 to list {what}"):
        address = next((store.get(key) for key in _ADDRESSES if store.check([key])), b"")
    key = f"torchobj/nonce/{hashlib.sha256(address).hexdigest()[:16]}"
    if rank == 0:
        nonce = secrets.token_hex(8)
        store.set(key, nonce)
    else:
        nonce = _wait_for(store, key, f"rank 0 to list {what}", other_than=_nonces).decode()
    _nonces.add(nonce)
    return nonce


def _rank() -> int | None:
    """The rank of this process if there are several, and it is not a DataLoader worker."""
    number, world_size = process.rank(None)
    return None if world_size == 1 or process.in_worker() else number


def _job(what: str = "a dataset") -> _Job | None:
    rank = _rank()
    if rank is None:
        return None
    store = torch.distributed.distributed_c10d._get_default_store()
    if store not in _jobs:
        _jobs[store] = _Job(rank, store, what)
    return _jobs[store]


def in_job() -> bool:
    """Whether this is one of several ranks."""
    return _rank() is not None


def first_value(name: str, kind: str, number: int, value: str, *, waits: bool = False) -> str | None:
    """The value that the first rank gave for this kind and number, which may be this one's.

    None outside of a job, and if its store cannot compare; also before the ranks of the process group have used a
    listing, unless it `waits` for rank 0 to use one, or to call this.
    """
    job = _job(name) if waits or _jobs else None
    if job is None:
        return None
    try:
        found: bytes = job.store.compare_set(job.key_of(name, kind, number), "", f"{job.rank} {value}")
    except (RuntimeError, NotImplementedError):
        return None
    return found.decode()


def nonce() -> str | None:
    """The nonce of the process group; None outside of a job, and in workers."""
    job = _job()
    return None if job is None else job.nonce


def is_current(agreed_in: str | None) -> bool:
    """Whether the ranks have agreed in the process group of this nonce, and it still exists. True outside of a job, and
    in workers.
    """
    if not in_job():
        return True
    # Not `_job`, which waits for the nonce of rank 0.
    job = _jobs.get(torch.distributed.distributed_c10d._get_default_store())
    return job is not None and job.nonce == agreed_in


def broadcast(name: str, read: Callable[[], _Value], from_bytes: Callable[[bytes], _Value]) -> _Value:
    """The value that `read` returns on rank 0, on every rank; outside of a job the return value of `read`.

    Args:
        name: Describes the value in messages; the same on every rank.
        read: Called on rank 0 only.
        from_bytes: Converts the bytes of the value on the other ranks.

    Raises:
        TorchobjError: `read` failed on rank 0, with its message, and its class if that is one of torchobj; or did not
            finish within an hour.
        ManifestMismatchError: Rank 0 reads something else.
    """
    job = _job(name)
    if job is None:
        return read()
    key = job.use(name)
    if job.rank != 0:
        chunks = int(_of_first(job, key, "chunks", name))
        value = from_bytes(b"".join(job.store.get(f"{key}/{number}") for number in range(chunks)))
    else:
        try:
            value = read()
        except BaseException as error:
            for part in ("chunks", "summary"):
                job.store.set(f"{key}/{part}", f"!{type(error).__name__}: {error}")
            raise
        _send(job, key, value)
    job.unconfirmed[name] = _summary(value)
    return value


def _summary(value: SupportsBytes) -> str:
    """Returns a digest of a value and the number of its objects."""
    digest = value.digest() if isinstance(value, Manifest) else hashlib.sha256(bytes(value)).hexdigest()
    return f"{digest} {len(value) if isinstance(value, Sized) else 1}"


def _send(job: _Job, key: str, value: SupportsBytes) -> None:
    data = bytes(value)
    starts = range(0, len(data), _CHUNK_BYTES)
    for number, start in enumerate(starts):
        job.store.set(f"{key}/{number}", data[start : start + _CHUNK_BYTES])
    job.store.set(f"{key}/chunks", str(len(starts)))
    job.store.set(f"{key}/summary", _summary(value))


def _of_first(job: _Job, key: str, part: str, name: str) -> str:
    check = functools.partial(job.check_names, key, name)
    found = _wait_for(job.store, f"{key}/{part}", f"rank 0 to list {name}", check=check).decode()
    if found.startswith("!"):
        kind, _, message = found[1:].partition(": ")
        known = getattr(exceptions, kind, None)
        if not (isinstance(known, type) and issubclass(known, TorchobjError)):
            known, message = TorchobjError, found[1:]
        raise known(f"{name}: rank 0 failed to list it: {message}")
    return found


def _wait_for(
    store: Any, key: str, what: str, *, other_than: Collection[str] = (), check: Callable[[], None] | None = None
) -> bytes:
    """Returns the value of a key when it exists, and is not one of `other_than`.

    Args:
        store: The store.
        key: The key.
        what: Describes the wait in errors.
        other_than: Values of earlier process groups.
        check: Called at times after the first 30 seconds.
    """
    # Polling: `store.wait` blocks Ctrl-C, and logs two lines per call if called with short timeouts.
    begun, pause_s = time.monotonic(), 0.01
    next_check = begun + _OTHER_NAMES_S
    while True:
        with _store_errors(what):
            found: bytes = store.get(key) if store.check([key]) else b""
        if found and found.decode(errors="replace") not in other_than:
            return found
        now = time.monotonic()
        if now > begun + _TIMEOUT.total_seconds():
            raise TorchobjError(
                f"waited {_TIMEOUT} for {what}; check that every rank creates the same datasets in the same order"
            )
        if check is not None and now > next_check:
            check()
            next_check = now + _OTHER_NAMES_S / 4
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


@contextmanager
def _store_errors(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # The first line only; the rest is torch's own stack.
        reason = str(error).partition("\n")[0]
        raise TorchobjError(f"waited for {what}: the store of the process group failed: {reason}") from error


def compare(name: str, manifest: Manifest, *, is_given: bool) -> None:
    """Compares a manifest from before this process group was initialised, or one that was given, with that of rank 0.

    Raises:
        ManifestMismatchError: They differ; the message contains both counts. Or rank 0 uses something else.
    """
    job = _job(name)
    if job is None:
        return
    key, summary = job.use(name), _summary(manifest)
    if job.rank == 0:
        if is_given:
            job.store.set(f"{key}/summary", summary)
        else:
            # Another rank may not have listed before.
            _send(job, key, manifest)
    elif (other := _of_first(job, key, "summary", name)) != summary:
        verb, advice = "listed", "create the dataset after torch.distributed is initialised, so that rank 0 lists"
        if is_given:
            verb, advice = "was given", "pass the URL of one manifest file, which rank 0 loads"
        raise _mismatch(name, verb, (job.rank, summary), other, f"{advice} for all ranks")
    job.unconfirmed[name] = summary


def _mismatch(name: str, verb: str, of_rank: tuple[int, str], of_first: str, advice: str) -> ManifestMismatchError:
    rank, summary = of_rank
    own, first = (text.split()[1] for text in (summary, of_first))
    return ManifestMismatchError(
        f"{name}: rank {rank} {verb} {own} objects, rank 0 {verb} {first}, and they differ; {advice}"
    )


def confirm() -> None:
    """Compares what this rank uses with what rank 0 uses, when a pass begins: each use once. Nothing outside of a job.

    Rank 0 does not wait, so that it can begin a pass alone. The others wait for it, until it has not begun one within
    20 seconds.

    Raises:
        ManifestMismatchError: A rank uses another listing than rank 0, which is raised on the later one of both.
    """
    job = _job() if _jobs else None
    if job is None:
        return
    while job.unconfirmed:
        name, summary = job.unconfirmed.popitem()
        job.passes[name] += 1
        key = job.key_of(name, "pass", job.passes[name])
        advice = "use each dataset equally often on all ranks, or give them one manifest"
        if job.rank == 0:
            job.store.set(key, summary)
            if job.store.check([f"{key}/unconfirmed"]):
                rank, other = job.store.get(f"{key}/unconfirmed").decode().split(" ", 1)
                if other != summary:
                    raise _mismatch(name, "uses", (int(rank), other), summary, advice)
            continue
        deadline = time.monotonic() + _PASS_S * job.waits
        while not job.store.check([key]) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not job.store.check([key]):
            job.store.set(f"{key}/unconfirmed", f"{job.rank} {summary}")
            if not job.store.check([key]):
                job.waits = False
                logger.info("%s: rank 0 has not begun a pass within %s s", name, _PASS_S)
                continue
        other = job.store.get(key).decode()
        if other != summary:
            raise _mismatch(name, "uses", (job.rank, summary), other, advice)
