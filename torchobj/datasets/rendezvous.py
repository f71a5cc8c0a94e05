"""How the ranks of a job come to have one listing: rank 0 lists, the others get what it listed.

Through the store of the default process group, not by a collective: a rank that asks alone, as in `if rank == 0:
print(len(dataset))`, waits for nobody, and others wait for rank 0 only, with an end. Lists nothing itself.
"""

import collections
import datetime
import hashlib
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed

from torchobj._torchobj import Manifest
from torchobj.datasets import workers
from torchobj.exceptions import ManifestMismatchError, TorchobjError

#: How long a rank waits for what rank 0 lists. A listing of a hundred million keys takes hours: its progress is in
#: rank 0's log, and it is better made once and saved.
_WAIT = datetime.timedelta(hours=1)

#: How often a rank that has waited for a while asks; Ctrl-C ends the pause.
_LONGEST_PAUSE_S = 0.5

#: Values in a TCPStore travel whole; so much of a manifest is sent at a time.
_PIECE_BYTES = 16 << 20

#: How many datasets of one name were listed by this process, by the store of the process group: the n-th of one rank is
#: the n-th of all. A group that is initialised after another one was destroyed begins anew.
_counts: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = weakref.WeakKeyDictionary()


class Agreement(NamedTuple):
    """Proof that the ranks have one listing."""

    digest: str


class _Group(NamedTuple):
    rank: int
    store: Any


def _group() -> _Group | None:
    """The job, where there is one and this is one of its ranks, not a DataLoader worker of one."""
    number, world_size = workers.rank(None)
    if world_size == 1 or workers.in_worker():
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


def share(name: str, make: Callable[[], Manifest]) -> tuple[Manifest, Agreement | None]:
    """The manifest that rank 0 makes, on every rank; without a job just what `make` makes.

    Raises:
        TorchobjError: Rank 0 could not list, with its message; or did not within an hour.
    """
    group = _group()
    if group is None:
        return make(), None
    key = _key(group, name)
    if group.rank == 0:
        try:
            manifest = make()
        except BaseException as error:
            group.store.set(f"{key}/pieces", f"!{type(error).__name__}: {error}")
            raise
        _send(group.store, key, bytes(manifest))
        return manifest, Agreement(manifest.digest())
    manifest = Manifest(_receive(group.store, key, name))
    return manifest, Agreement(manifest.digest())


def _send(store: Any, key: str, data: bytes) -> None:
    starts = range(0, len(data), _PIECE_BYTES)
    for number, start in enumerate(starts):
        store.set(f"{key}/{number}", data[start : start + _PIECE_BYTES])
    store.set(f"{key}/pieces", str(len(starts)))


def _receive(store: Any, key: str, name: str) -> bytes:
    pieces = _wait_for(store, f"{key}/pieces", f"what rank 0 lists of {name}").decode()
    if pieces.startswith("!"):
        raise TorchobjError(f"{name}: rank 0 could not list it: {pieces[1:]}")
    return b"".join(store.get(f"{key}/{number}") for number in range(int(pieces)))


def _wait_for(store: Any, key: str, what: str) -> bytes:
    # By asking again: `store.wait` keeps Ctrl-C waiting, and in short slices it fills the log, two lines for each.
    deadline, pause_s = time.monotonic() + _WAIT.total_seconds(), 0.01
    try:
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise TorchobjError(f"waited {_WAIT} for {what}: does every rank make the same datasets, in one order?")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        value: bytes = store.get(key)
    except RuntimeError as error:
        # The first line: what follows is torch's own stack.
        reason = str(error).partition("\n")[0]
        raise TorchobjError(f"waited for {what}, and the job's store failed: {reason}") from error
    return value


def compare(name: str, manifest: Manifest) -> Agreement | None:
    """Compares a manifest that was listed before torch.distributed was initialised with that of rank 0.

    Raises:
        ManifestMismatchError: They differ; the message has both counts. Rank 0 raises it too, at its next use, once
            another rank has.
    """
    group = _group()
    if group is None:
        return None
    key = _key(group, name)
    mine = f"{manifest.digest()} {len(manifest)}"
    if group.rank == 0:
        group.store.set(f"{key}/digest", mine)
        return Agreement(manifest.digest())
    theirs = _wait_for(group.store, f"{key}/digest", f"the digest of {name} from rank 0").decode()
    if theirs != mine:
        count = theirs.split()[1]
        raise ManifestMismatchError(
            f"{name}: rank {group.rank} listed {len(manifest)} objects, rank 0 listed {count}, and they differ: "
            "make the dataset after torch.distributed is initialised, and rank 0 lists for all"
        )
    return Agreement(manifest.digest())
