"""Broadcasts one listing, or another value, to the ranks of a job: rank 0 lists, and the others receive its manifest.

Uses the store of the default process group and no collective: a rank that needs the listing alone, as in `if rank == 0:
print(len(dataset))`, does not block, and the others wait for rank 0 only, with a time limit. Lists nothing itself.
"""

import collections
import datetime
import hashlib
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, SupportsBytes, TypeVar

import torch.distributed

from torchobj.datasets import worker_process
from torchobj.exceptions import ManifestMismatchError, TorchobjError
from torchobj.manifest import Manifest

_Value = TypeVar("_Value", bound=SupportsBytes)

#: Maximum time that a rank waits for the listing of rank 0.
_TIMEOUT = datetime.timedelta(hours=1)

#: Maximum interval between two checks; Ctrl-C interrupts it.
_MAX_PAUSE_S = 0.5

#: A manifest is sent in chunks of this size, because a TCPStore transfers each value in one message.
_CHUNK_BYTES = 16 << 20

#: Number of datasets of each name that this process has listed, by the store of the process group: the n-th dataset of
#: one rank is the n-th of all ranks. A new process group starts again at zero.
_counts: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = weakref.WeakKeyDictionary()


class Agreement(NamedTuple):
    """Confirms that the ranks have the same listing."""

    digest: str


class _Group(NamedTuple):
    rank: int
    store: Any


def _group() -> _Group | None:
    """The process group, if this process is a rank of a job and not a DataLoader worker."""
    number, world_size = worker_process.rank(None)
    if world_size == 1 or worker_process.in_worker():
        return None
    return _Group(number, torch.distributed.distributed_c10d._get_default_store())


def in_job() -> bool:
    """Whether this is one of several ranks."""
    return _group() is not None


def _key(group: _Group, name: str) -> str:
    counts = _counts.setdefault(group.store, collections.Counter())
    counts[name] += 1
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"torchobj/manifest/{digest}/{counts[name]}"


def broadcast(name: str, list_objects: Callable[[], Manifest]) -> tuple[Manifest, Agreement | None]:
    """The manifest of rank 0, on every rank; outside of a job the return value of `list_objects`.

    Raises:
        TorchobjError: Rank 0 failed to list, with its message; or did not finish within an hour.
    """
    manifest = broadcast_value(name, list_objects, Manifest)
    return manifest, Agreement(manifest.digest()) if in_job() else None


def broadcast_value(name: str, read: Callable[[], _Value], from_bytes: Callable[[bytes], _Value]) -> _Value:
    """The value that `read` returns on rank 0, on every rank; outside of a job the return value of `read`.

    Args:
        name: Describes the value in messages; the same on every rank.
        read: Called on rank 0 only.
        from_bytes: Converts the bytes of the value on the other ranks.

    Raises:
        TorchobjError: `read` failed on rank 0, with its message; or did not finish within an hour.
    """
    group = _group()
    if group is None:
        return read()
    key = _key(group, name)
    if group.rank != 0:
        return from_bytes(_receive(group.store, key, name))
    try:
        value = read()
    except BaseException as error:
        group.store.set(f"{key}/chunks", f"!{type(error).__name__}: {error}")
        raise
    _send(group.store, key, bytes(value))
    return value


def _send(store: Any, key: str, data: bytes) -> None:
    starts = range(0, len(data), _CHUNK_BYTES)
    for number, start in enumerate(starts):
        store.set(f"{key}/{number}", data[start : start + _CHUNK_BYTES])
    store.set(f"{key}/chunks", str(len(starts)))


def _receive(store: Any, key: str, name: str) -> bytes:
    chunks = _wait_for(store, f"{key}/chunks", f"rank 0 to list {name}").decode()
    if chunks.startswith("!"):
        raise TorchobjError(f"{name}: rank 0 failed to list it: {chunks[1:]}")
    return b"".join(store.get(f"{key}/{number}") for number in range(int(chunks)))


def _wait_for(store: Any, key: str, what: str) -> bytes:
    # Polling: `store.wait` blocks Ctrl-C, and logs two lines per call if called with short timeouts.
    deadline, pause_s = time.monotonic() + _TIMEOUT.total_seconds(), 0.01
    try:
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise TorchobjError(
                    f"waited {_TIMEOUT} for {what}; check that every rank creates the same datasets in the same order"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        value: bytes = store.get(key)
    except RuntimeError as error:
        # The first line only; the rest is torch's own stack.
        reason = str(error).partition("\n")[0]
        raise TorchobjError(f"waited for {what}: the store of the process group failed: {reason}") from error
    return value


def compare(name: str, manifest: Manifest, *, is_given: bool) -> Agreement | None:
    """Compares a manifest from before torch.distributed was initialised, or one that was given, with that of rank 0.

    Raises:
        ManifestMismatchError: They differ; the message contains both counts.
    """
    group = _group()
    if group is None:
        return None
    key = _key(group, name)
    mine = f"{manifest.digest()} {len(manifest)}"
    if group.rank == 0:
        group.store.set(f"{key}/digest", mine)
        return Agreement(manifest.digest())
    theirs = _wait_for(group.store, f"{key}/digest", f"rank 0 to send the digest of {name}").decode()
    if theirs != mine:
        verb, advice = "listed", "create the dataset after torch.distributed is initialised, so that rank 0 lists"
        if is_given:
            verb, advice = "was given", "pass the URL of one manifest file, which rank 0 loads"
        raise ManifestMismatchError(
            f"{name}: rank {group.rank} {verb} {len(manifest)} objects, rank 0 {verb} {theirs.split()[1]}, and they "
            f"differ; {advice} for all ranks"
        )
    return Agreement(manifest.digest())
