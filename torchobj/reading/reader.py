"""Reads the objects of a dataset, by index in its manifest or by `ObjectRef`, through the prefetcher if there is one.

`read_ahead` reads them in an order that is known.
"""

import itertools
import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from typing_extensions import override

from torchobj import _torchobj
from torchobj._torchobj import ObjectReader, ObjectRef
from torchobj.config import StoreConfig, file_for, resolve, store_config
from torchobj.manifest import Manifest
from torchobj.reading import (
    lookahead_warning,
    ragged,  # noqa: F401  registers readers with default_collate
)
from torchobj.reading.reader_constructor import ReaderConstructor
from torchobj.urls import parse_url
from torchobj.workers import process
from torchobj.workers.descriptors import Descriptors
from torchobj.workers.memory_budget import budget_bytes, record_refusal, start_prefetcher

#: What identifies an object: its index in a manifest, or an `ObjectRef`.
Key = TypeVar("Key")

#: Pairs of source number and index, which identify objects for the prefetcher.
Objects = list[tuple[int, int]]

#: Assumed size of an object whose size is not known.
_ASSUMED_BYTES = 1 << 20


class DatasetReader(Generic[Key]):
    """Reads the objects of a dataset through the prefetcher of the process in which the dataset was created.

    Workers of a DataLoader use that process, however they were started. Any other process that receives a copy of the
    dataset uses a prefetcher of its own. Without a prefetcher, each process reads its own objects.
    """

    #: The objects, if they are identified by their index.
    manifest: Manifest | None = None
    #: Whether `read` reads objects whole; otherwise its readers fetch what is read of them.
    is_whole = True
    #: Maximum number of bytes that are requested together when objects are read in order, within the memory budget.
    group_bytes = sys.maxsize

    def __init__(self) -> None:
        # By number of the process, because a fork copies it. Only setdefault writes, which is atomic, so that no lock
        # is needed that could be held during a fork.
        self._sources: dict[int, _torchobj.ObjectSource] = {}
        #: Owner, number and descriptors of a source that is being sent to a worker started by spawn or forkserver.
        self._sent: tuple[int, int, Descriptors] | None = None

    def _create_source(self, budget: int) -> "_torchobj.ObjectSource":
        """Creates the source, given a budget in bytes for the prefetcher."""
        raise NotImplementedError

    def _read_directly(self, keys: Sequence[Key]) -> list[Any]:
        """As `read`, without the prefetcher."""
        raise NotImplementedError

    def url_of(self, key: Key) -> str:
        """The URL of an object."""
        raise NotImplementedError

    def sizes(self, keys: Sequence[Key]) -> list[int]:
        """The memory in bytes that each object takes, as far as it is known."""
        raise NotImplementedError

    def source(self) -> "_torchobj.ObjectSource | None":
        """The objects as a source of the prefetcher, created at the first use.

        To be called before workers are forked, which inherit it. None in a worker that was started before the source
        existed, if the system refuses the shared memory, and on systems without a prefetcher.
        """
        own = _torchobj.process_number()
        if own in self._sources:
            return self._sources[own]
        if not process.in_worker():
            if not start_prefetcher():
                return None
            return self._sources.setdefault(own, self._create_source(budget_bytes()))
        if self._sent is not None:
            return self._attach(own)
        # A forked worker inherits the sources of its ancestors too.
        parent = multiprocessing.parent_process()
        if parent is None:
            return None
        # The last one: an earlier ancestor may have had the process id of the parent.
        sources = [found for number, found in [*self._sources.items()] if _torchobj.process_id(number) == parent.pid]
        return sources[-1] if sources else None

    def _attach(self, own: int) -> "_torchobj.ObjectSource | None":
        """The source that was sent to this worker."""
        assert self._sent is not None  # noqa: S101  checked by the caller
        process.exit_with_trainer()
        (owner, number, descriptors), self._sent = self._sent, None
        try:
            file, eventfd = descriptors.copies()
            self._sources[own] = _torchobj.ObjectSource.attach(owner, number, file, eventfd, self.manifest)
        except OSError as error:
            # The address space and the open files of a spawned worker may be limited separately.
            record_refusal(error)
            return None
        return self._sources[own]

    def read(self, keys: Sequence[Key]) -> list[Any]:
        """Readers of objects, read concurrently, with an exception in place of each object that cannot be read.

        Announced objects may be in memory already.
        """
        source = self.source()
        if source is not None and source.announced():
            return source.read(keys, return_errors=True)  # type: ignore[arg-type]  # the keys of this source
        return self._read_directly(keys)

    def object_finder(self) -> Callable[[list[Key]], Objects]:
        """The function that returns objects as a loader announces them, immediately. Called when a pass begins.

        It returns none in workers, which do not announce, and without a prefetcher.
        """
        source = self.source()
        if source is None or source.owner != _torchobj.process_number() or not self.is_whole:
            return lambda _: []
        if self.manifest is None:
            return source.to_announce  # type: ignore[return-value]  # the keys of this source
        number = source.number
        return lambda keys: list(zip(itertools.repeat(number), keys))  # type: ignore[arg-type]  # indices

    def __getstate__(self) -> dict[str, Any]:
        spawning = process.is_pickling_for_spawn()
        source, sent = self._sources.get(_torchobj.process_number()), None
        if spawning and source is not None:
            sent = source.owner, source.number, Descriptors.to_new_process(*source.descriptors())
        warning = {"_warning_disabled": spawning and lookahead_warning.is_disabled()}
        return self.__dict__ | {"_sources": {}, "_sent": sent} | warning

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.pop("_warning_disabled"):
            lookahead_warning.disable()
        self.__dict__.update(state)


class ManifestReader(DatasetReader[int]):
    """Reads the objects of a manifest by their index.

    Args:
        manifest: The objects.
        configs: The configurations of their stores by the base of their URLs.
        config: The configuration of other stores.
        kind: Kind of the readers.
        pinned: Whether an object must have the size and version of the manifest.
    """

    manifest: Manifest

    def __init__(
        self,
        manifest: Manifest,
        configs: Mapping[str, StoreConfig],
        config: StoreConfig,
        kind: ReaderConstructor,
        *,
        pinned: bool,
    ) -> None:
        super().__init__()
        self.manifest, self._configs, self._config, self._pinned = manifest, dict(configs), config, pinned
        self._kind, self.is_whole = kind, kind.whole
        self._stores: list[_torchobj.NativeStore] | None = None

    def stores(self) -> "list[_torchobj.NativeStore]":
        """A store for each of the manifest's bases, in its order."""
        if self._stores is None:
            urls = [parse_url(f"{base}/") for base in self.manifest.bases()]
            self._stores = [
                _torchobj.NativeStore(url.scheme, url.bucket, self._configs.get(url.base, self._config)) for url in urls
            ]
        return self._stores

    @override
    def _create_source(self, budget: int) -> "_torchobj.ObjectSource":
        return _torchobj.ObjectSource.of_manifest(self.manifest, self.stores(), budget, self._pinned)

    @override
    def read(self, keys: Sequence[int]) -> list[Any]:
        return super().read(keys) if self.is_whole else [self._open(key) for key in keys]

    @override
    def _read_directly(self, keys: Sequence[int]) -> list[Any]:
        return self.manifest.read(self.stores(), keys, True, self._pinned)  # noqa: FBT003  positional in Rust

    def _open(self, index: int) -> ObjectReader:
        """A reader that fetches what is read of an object. Sends no request."""
        base, key, _, version = self.manifest.entry(index)
        store = self.stores()[self.manifest.bases().index(base)]
        bucket, pinned = parse_url(f"{base}/").bucket, version if self._pinned else None
        return ObjectReader.open(
            store, self.url_of(index), bucket, key, self._kind.jump_bytes, self._kind.ahead_bytes, pinned
        )

    @override
    def url_of(self, key: int) -> str:
        return self.manifest.url(key)

    @override
    def sizes(self, keys: Sequence[int]) -> list[int]:
        source = self.source()
        return [0] * len(keys) if source is None else source.charges(keys)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_stores": None}


class RefReader(DatasetReader[ObjectRef]):
    """Reads objects that a dataset names by `ObjectRef`, each with the configuration that applies to it.

    Args:
        config: The argument of the dataset; prefixes of the configuration file apply within it.
    """

    # The sizes of objects may be assumed.
    group_bytes = 16 << 20

    def __init__(self, config: StoreConfig | None) -> None:
        super().__init__()
        self.config = config = store_config(config)
        prefixes = [*map(str, file_for(config).prefixes), ""]
        #: By prefix of a URL, the longest first; the last one, with "", is for all others.
        self._configs = [(prefix, resolve(prefix, config)) for prefix in prefixes]

    @override
    def _create_source(self, budget: int) -> "_torchobj.ObjectSource":
        return _torchobj.ObjectSource.of_refs(self._configs, budget)

    @override
    def _read_directly(self, keys: Sequence[ObjectRef]) -> list[Any]:
        return _torchobj.read_refs(self._configs, keys)

    @override
    def url_of(self, key: ObjectRef) -> str:
        return key.url

    @override
    def sizes(self, keys: Sequence[ObjectRef]) -> list[int]:
        return list(map(_size_of, keys))


def _size_of(ref: ObjectRef) -> int:
    """Number of bytes to read, or an assumption."""
    end = ref.size if ref.end is None else ref.end
    return _ASSUMED_BYTES if end is None else max(0, end - ref.start)
