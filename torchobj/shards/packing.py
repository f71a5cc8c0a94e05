"""Packs objects below a prefix into tar shards: plans them from a listing, writes them, and finds complete ones.

A plan depends only on the listing and the limits, so that hosts with the same listing divide its shards, and a repeated
run continues. The index of a shard keeps a digest of the objects in it; a shard is complete if its index has the digest
of the plan, and its size and version are those in the index. Does not import torch.
"""

import dataclasses
import hashlib
import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import groupby
from pathlib import Path
from typing import Any

from torchobj._torchobj import NativeStore, ObjectReader
from torchobj.config import StoreConfig, resolve
from torchobj.exceptions import ConfigError, ObjectNotFoundError, StoreError, TarIndexError, TransferError
from torchobj.manifest import Manifest
from torchobj.shards import index_file
from torchobj.shards.members import end_of_archive, header, padding, split_name
from torchobj.shards.writer import TarWriter, check_shard_limits, check_shard_pattern, check_start_shard, shard_url
from torchobj.store import Store
from torchobj.store.concurrency import CallPool, concurrently
from torchobj.store.transfers import ProgressOption, counters_to
from torchobj.urls import Url, parse_url

__all__ = ["PackPlan", "Packing", "PlannedShard", "check_next", "is_below", "pack", "plan_shards"]

#: Objects that are read by one call, and their bytes. While these are written, the next ones are read.
_ROUND_OBJECTS, _ROUND_BYTES = 512, 16 << 20
#: Calls that read ahead of the one whose objects are written.
_ROUNDS_AHEAD = 2
#: Larger objects are read as streams, by ranges ahead of their position.
_LARGE_BYTES, _CHUNK_BYTES = 32 << 20, 8 << 20


class Stopped(Exception):  # noqa: N818  not an error: the caller asked for it
    """Packing was stopped."""


@dataclasses.dataclass(frozen=True)
class PlannedShard:
    """A shard of a plan."""

    number: int
    """The number in its URL."""
    url: str
    """URL of the shard."""
    samples: int
    """Number of samples."""
    objects: Sequence[int]
    """Indices of the objects in the manifest, in the order of the members."""
    bytes: int
    """Bytes of the objects."""


@dataclasses.dataclass(frozen=True, repr=False)
class PackPlan:
    """Which objects are in which shard."""

    manifest: Manifest
    """The objects."""
    folder: Url
    """The folder, with a slash at the end: names of members are the keys relative to it."""
    shards: list[PlannedShard]
    """The shards."""
    left_out: list[int]
    """Indices of objects without an extension, and of others that webdataset does not read."""

    def __repr__(self) -> str:
        return f"<PackPlan of {len(self.shards)} shards, {len(self.manifest)} objects below {self.folder}>"

    def name(self, index: int) -> str:
        """The name of the member for an object."""
        return self.manifest.entry(index)[1][len(self.folder.key) :]

    def size(self, index: int) -> int:
        """The size of an object in bytes."""
        return self.manifest.entry(index)[2] or 0

    def digest(self, shard: PlannedShard) -> str:
        """A hash of the names, sizes and versions of the objects of a shard, 32 hexadecimal digits."""
        found = hashlib.blake2b(digest_size=16)
        for index in shard.objects:
            _, _, size, version = self.manifest.entry(index)
            found.update(f"{self.name(index)}\0{size}\0{version}\0".encode())
        return found.hexdigest()

    def size_of_shard(self, shard: PlannedShard) -> int:
        """The size of the archive in bytes."""
        sizes = ((self.name(index), self.size(index)) for index in shard.objects)
        total = sum(len(header(name, size)) + size + len(padding(size)) for name, size in sizes)
        return total + len(end_of_archive(total))


def plan_shards(
    manifest: Manifest, folder: Url, pattern: str, *, maxcount: int, maxsize: float, start_shard: int = 0
) -> PackPlan:
    """Groups the objects of a manifest into samples by their common stem, and these into shards, in key order.

    Args:
        manifest: The objects, with sizes.
        folder: The folder that contains them.
        pattern: URL of the shards, as for `ShardWriter`.
        maxcount, maxsize: As for `ShardWriter`.
        start_shard: Number of the first shard.

    Raises:
        ConfigError: An argument is invalid; an object is not below the folder, or has no size; or two objects would be
            the same field of a sample.
    """
    check_shard_pattern(pattern)
    check_shard_limits(maxcount, maxsize)
    left_out: list[int] = []
    shards: list[PlannedShard] = []
    objects, samples, size = array("q"), 0, 0

    def finish() -> None:
        nonlocal objects, samples, size
        if samples:
            number = start_shard + len(shards)
            shards.append(PlannedShard(number, shard_url(pattern, number), samples, objects, size))
        objects, samples, size = array("q"), 0, 0

    for group in _groups(manifest, _ordered_names(manifest, folder), left_out):
        if samples >= maxcount or size >= maxsize:
            finish()
        objects.extend(index for index, _ in group)
        samples, size = samples + 1, size + sum(size for _, size in group)
    finish()
    return PackPlan(manifest, folder, shards, left_out)


def _ordered_names(manifest: Manifest, folder: Url) -> Iterator[tuple[str, int, int]]:
    """Name, index and size of the objects, in the order of their names."""
    entries = (manifest.entry(index) for index in range(len(manifest)))
    is_ordered, last = True, b""
    for base, key, size, _ in entries:
        if base != folder.base or not key.startswith(folder.key):
            raise ConfigError(f"{base}/{key}: is not below {folder}; build the manifest of this prefix")
        if size is None:
            raise ConfigError(f"{base}/{key}: has no size in the manifest; build it with `torchobj manifest build`")
        encoded = key.encode()
        is_ordered, last = is_ordered and last < encoded, encoded
    indices: Sequence[int] = range(len(manifest))
    if not is_ordered:
        indices = sorted(indices, key=lambda index: manifest.entry(index)[1].encode())
    for index in indices:
        _, key, size, _ = manifest.entry(index)
        yield key[len(folder.key) :], index, size or 0


def _groups(
    manifest: Manifest, names: Iterator[tuple[str, int, int]], left_out: list[int]
) -> Iterator[list[tuple[int, int]]]:
    """The objects of each sample, as index and size. A sample ends before the first name that does not start with it.

    Names of a folder `a.b/` are between those of the sample `a`, whose group therefore remains open meanwhile.
    """
    open_groups: list[tuple[str, dict[str, tuple[int, int]]]] = []
    for name, index, size in names:
        while open_groups and not name.startswith(f"{open_groups[-1][0]}."):
            yield list(open_groups.pop()[1].values())
        parts = split_name(name)
        if parts is None or "\0" in name:
            left_out.append(index)
            continue
        key, field = parts
        if not open_groups or open_groups[-1][0] != key:
            open_groups.append((key, {}))
        members = open_groups[-1][1]
        if field in members:
            raise ConfigError(
                f"{manifest.url(index)} and {manifest.url(members[field][0])}: are the same field {field!r} of sample "
                f"{key!r}; rename one of them"
            )
        members[field] = (index, size)
    while open_groups:
        yield list(open_groups.pop()[1].values())


def is_complete(plan: PackPlan, shard: PlannedShard, config: StoreConfig | None) -> bool:
    """Whether the shard and its index exist and contain the objects of the plan, in their listed versions.

    Raises:
        StoreError: One of them cannot be read.
    """
    parsed = parse_url(shard.url)
    store = Store(parsed.base, config=config)
    try:
        found = store.head(parsed.key)
        index = index_file.read(store.get(f"{parsed.key}{index_file.SUFFIX}"), shard.url)
    except (ObjectNotFoundError, TarIndexError):
        return False
    expected = (parsed.key.rpartition("/")[2], found.size, found.version)
    return (
        index.shards == (expected,)
        and found.size == plan.size_of_shard(shard)
        and index.members.num_rows == len(shard.objects)
        and index.source == plan.digest(shard)
    )


def pack_shard(
    plan: PackPlan,
    shard: PlannedShard,
    config: StoreConfig | None,
    report: Callable[[int], None],
    stopped: threading.Event,
) -> None:
    """Writes a shard and its index, and verifies both.

    Objects are read ahead of their use, in at most 150 MiB of memory, and only in their listed versions.

    Args:
        plan: The plan.
        shard: One of its shards.
        config: The configuration of both stores.
        report: Receives the size of each object that was written.
        stopped: Ends the call when it is set.

    Raises:
        StoreError: An object cannot be read or has changed, or the shard cannot be written. There is no new shard.
        Stopped: `stopped` is set. There is no new shard.
    """
    with (
        CallPool(_ROUNDS_AHEAD, "torchobj-pack") as pool,
        TarWriter(shard.url, config=config, source=plan.digest(shard)) as writer,
    ):
        contents = _contents(plan, shard, config, pool)

        def members(objects: Iterator[int]) -> Iterator[tuple[str, int, Any]]:
            for index, parts in zip(objects, contents, strict=False):
                if stopped.is_set():
                    raise Stopped
                size = plan.size(index)
                yield _divided(plan.name(index))[1], size, parts
                report(size)

        for key, objects in groupby(shard.objects, key=lambda index: _divided(plan.name(index))[0]):
            writer._write_parts(key, members(objects))
    if writer.count != shard.samples or not is_complete(plan, shard, config):
        raise StoreError(
            f"{shard.url}: is not as it was written, {shard.samples} samples in {plan.size_of_shard(shard)} bytes; "
            "another writer has replaced it or its index. Pack it again"
        )


def is_below(pattern: str, folder: Url) -> bool:
    """Whether shards of this pattern would be in the listing of a folder.

    Raises:
        ConfigError: The pattern is not valid.
    """
    check_shard_pattern(pattern)
    shard = parse_url(shard_url(pattern, 0))
    if not shard.scheme == folder.scheme == "file":
        return str(shard).startswith(str(folder))
    # Listings follow symbolic links.
    target, root = Path("/", shard.key).resolve(), Path("/", folder.key)
    if target.is_relative_to(root.resolve()):
        return True
    seen = set[Path]()
    for at, names, _ in os.walk(root, followlinks=True):
        real = Path(at).resolve()
        if target.is_relative_to(real):
            return True
        if real in seen:
            names.clear()
        seen.add(real)
    return False


def check_next(plan: PackPlan, pattern: str, start_shard: int, config: StoreConfig | None) -> None:
    """Checks that there is no shard after those of the plan, which readers would read with them.

    Raises:
        ConfigError: There is one.
    """
    url = parse_url(shard_url(pattern, start_shard + len(plan.shards)))
    if Store(url.base, config=config).exists(url.key):
        raise ConfigError(
            f"{url}: exists, but the plan has {len(plan.shards)} shards: it is of other objects or limits; delete it "
            "and those after it, or choose other names"
        )


class Packing:
    """Packs shards at the same time, and adds up their progress.

    Args:
        plan: The plan.
        shards: Those of its shards that are packed.
        config: The configuration of both stores.
        progress: Receives the number of objects and bytes that are packed. An exception that it raises ends `run`.
    """

    def __init__(
        self, plan: PackPlan, shards: Sequence[PlannedShard], config: StoreConfig | None, progress: ProgressOption
    ) -> None:
        self._plan, self._shards, self._config, self._report = plan, shards, config, counters_to(progress)
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._total = sum(len(shard.objects) for shard in shards), sum(shard.bytes for shard in shards)
        self._files = self._bytes = self._skipped = 0
        self._raised: Exception | None = None
        self.packed: list[PlannedShard] = []
        """The shards that were written."""
        self.complete: list[PlannedShard] = []
        """The shards that were complete before."""
        self.failures: list[tuple[str, Exception]] = []
        """URL and exception of each shard that could not be packed."""

    def run(self, parallel: int) -> None:
        """Packs shards that are not complete. A failure does not end the others."""
        try:
            for shard, done in concurrently(self._pack, self._shards, parallel, waits=False):
                if isinstance(done, Exception):
                    self.failures.append((shard.url, done))
                else:
                    (self.packed if done else self.complete).append(shard)
        finally:
            # The writers abort their uploads, for which the end of the process waits.
            self._stopped.set()
        if self._raised is not None:
            raise self._raised

    def write(self, shard: PlannedShard) -> None:
        """Writes a shard that is not complete."""
        pack_shard(self._plan, shard, self._config, lambda size: self._add(1, size, 0), self._stopped)

    def _pack(self, shard: PlannedShard) -> bool:
        """Packs a shard unless it is complete. Returns whether it did."""
        if self._stopped.is_set():
            raise Stopped
        if is_complete(self._plan, shard, self._config):
            self._add(len(shard.objects), shard.bytes, len(shard.objects))
            return False
        self.write(shard)
        return True

    def _add(self, files: int, size: int, skipped: int) -> None:
        with self._lock:
            self._files, self._bytes, self._skipped = self._files + files, self._bytes + size, self._skipped + skipped
            if self._report is None or self._raised is not None:
                return
            try:
                self._report(self._files, self._total[0], self._bytes, self._total[1], self._skipped)
            except Exception as error:
                self._raised = error
                self._stopped.set()
                raise Stopped from error


def pack(
    prefix: str,
    shards: str,
    *,
    maxcount: int = 100_000,
    maxsize: float = 3e9,
    start_shard: int = 0,
    parallel: int = 4,
    progress: ProgressOption = None,
    config: StoreConfig | None = None,
) -> list[str]:
    """Packs the objects in a folder into tar shards in the format of webdataset, with an index beside each.

    Objects with the same name up to the first dot are a sample. Which objects are in which shard depends on the listing
    and the limits only, so that a repeated call packs what is missing or has changed, and skips complete shards. Each
    shard is verified after it was written. Objects without an extension are left out. `torchobj pack` does the same.
    Needs the extra `manifest`.

    Args:
        prefix: URL of the folder.
        shards: URL of the shards, with the number of a shard as in `train-%06d.tar`; not below the folder.
        maxcount, maxsize, start_shard: As for `ShardWriter`.
        parallel: Maximum number of shards that are packed at the same time.
        progress: Receives a `torchobj.files.Progress` of objects and bytes, in the threads that write; True shows a bar
            on stderr. An exception that it raises ends the packing; shards that are complete remain.
        config: Settings of the store.

    Returns:
        The URLs of all shards.

    Raises:
        ConfigError: An argument is invalid, two objects would be the same field of a sample, or there is a shard after
            the last one.
        ObjectNotFoundError: The folder has no samples.
        TransferError: Some shards could not be packed: `failures` has their URLs and exceptions. The others are packed.

    Example:
        >>> import torchobj
        >>> store = torchobj.Store("memory://unpacked")
        >>> for name in ("a.jpg", "a.cls", "b.jpg", "b.cls"):
        ...     _ = store.put(f"in/{name}", name.encode())
        >>> pack("memory://unpacked/in/", "memory://unpacked/out/train-%06d.tar")
        ['memory://unpacked/out/train-000000.tar']
    """
    index_file.check_installed()
    parsed = parse_url(prefix)
    folder = parsed._replace(key=parsed.key.rstrip("/") + "/" if parsed.key else "")
    if isinstance(parallel, bool) or not isinstance(parallel, int) or parallel < 1:
        raise ConfigError(f"parallel={parallel!r}: must be an int of 1 or more")
    counters_to(progress)
    check_start_shard(start_shard)
    if is_below(shards, folder):
        raise ConfigError(f"shards={shards!r}: is below {folder}, whose next listing would contain the shards")
    manifest = Manifest.from_prefix(str(folder), config=config)
    plan = plan_shards(manifest, folder, shards, maxcount=maxcount, maxsize=maxsize, start_shard=start_shard)
    if not plan.shards:
        raise ObjectNotFoundError(f"{folder}: no samples; {len(plan.left_out)} objects are left out")
    check_next(plan, shards, start_shard, config)
    packing = Packing(plan, plan.shards, config, progress)
    packing.run(parallel)
    if packing.failures:
        failed = "; ".join(f"{url}: {error}" for url, error in packing.failures[:3])
        count = f"{len(packing.failures)} of {len(plan.shards)} shards were not packed"
        raise TransferError(f"pack {folder}: {count}: {failed}", packing.failures)
    return [shard.url for shard in plan.shards]


def _divided(name: str) -> tuple[str, str]:
    """Key and field of the name of a member, the field as it is."""
    key, _ = split_name(name) or ("", "")
    return key, name[len(key) + 1 :]


def _contents(plan: PackPlan, shard: PlannedShard, config: StoreConfig | None, pool: CallPool) -> Iterator[Any]:
    """The bytes of the objects of a shard, each as an iterable of parts, in order. Others are read meanwhile."""
    url = str(plan.folder)
    store = NativeStore(plan.folder.scheme, plan.folder.bucket, resolve(url, config))
    rounds = _rounds(plan, shard)
    running: deque[tuple[list[int], Future[list[ObjectReader]] | None]] = deque()
    while True:
        while len(running) <= _ROUNDS_AHEAD and (indices := next(rounds, None)) is not None:
            is_large = plan.size(indices[0]) > _LARGE_BYTES
            running.append((indices, None if is_large else pool.submit(plan.manifest.read, [store], indices)))
        if not running:
            return
        indices, future = running.popleft()
        if future is None:
            yield _stream(plan, indices[0], store)
            continue
        readers = future.result()
        # Frees the memory of each object after its use.
        del future
        readers.reverse()
        while readers:
            with readers.pop() as reader:
                yield (reader.getbuffer(),)


def _rounds(plan: PackPlan, shard: PlannedShard) -> Iterator[list[int]]:
    """The objects of a shard, divided into those that are read together. A large object is alone."""
    indices, total = list[int](), 0
    for index in shard.objects:
        size = plan.size(index)
        if indices and (len(indices) >= _ROUND_OBJECTS or total + size > _ROUND_BYTES):
            yield indices
            indices, total = [], 0
        indices.append(index)
        total += size
    if indices:
        yield indices


def _stream(plan: PackPlan, index: int, store: NativeStore) -> Iterator[bytes]:
    _, key, _, version = plan.manifest.entry(index)
    with ObjectReader.open(
        store, plan.manifest.url(index), plan.folder.bucket, key, ahead_bytes=_LARGE_BYTES, version=version
    ) as reader:
        while chunk := reader.read(_CHUNK_BYTES):
            yield chunk
