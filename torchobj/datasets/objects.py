"""Map-style datasets whose samples consist of several objects that a subclass names."""

import collections
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from torchobj._torchobj import ObjectReader, ObjectRef
from torchobj.config import S3ClientConfig, StoreConfig, resolved, store_config
from torchobj.datasets import ragged, reductions, worker_process  # noqa: F401  register buffers with multiprocessing and readers with default_collate
from torchobj.datasets.base import Sample_co
from torchobj.datasets.dataset_reader import RefReader
from torchobj.datasets.failures import Failure, FailurePolicy, OnError, add_sample_note, stopped
from torchobj.datasets.map_style import MapStyleDataset
from torchobj.datasets.read_ahead import read_ahead
from torchobj.datasets.sharding import Order

__all__ = ["ObjectDataset"]

#: Maximum number of samples, and of bytes, whose objects are requested at a time when samples are read in order.
_GROUP_SAMPLES, _GROUP_BYTES = 32, 16 << 20

#: Assumed size of an object whose size is not known.
_ASSUMED_BYTES = 1 << 20


class ObjectDataset(MapStyleDataset[Sample_co]):
    r"""A map-style dataset whose samples consist of objects, or of ranges of objects, that a subclass names.

    A subclass defines `__len__`, `objects_at` and `build`. The objects of a sample, or of a whole batch, are read
    concurrently; with `torchobj.DataLoader` they are read ahead. They can be in any buckets, of any scheme.

    Args:
        region, endpoint_url: Override those of `config` for the objects of S3.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector. A subclass that does not call
            `super().__init__()` uses the defaults.
        on_error: Action for a sample that cannot be read or built: `raise`; `replace` it by the next one that can; or a
            callable that receives index, URL and exception and returns a sample. The URL is that of the object that
            could not be read, otherwise of the first object of the sample. The first failure of each process is logged.
            Exceptions of `objects_at` are always raised.

    Attributes:
        failed_samples: Number of samples that failed, in this process and its DataLoader workers.

    Raises:
        ConfigError: An argument is invalid. No request is sent here.

    Example:
        >>> import json, torchobj
        >>> store = torchobj.Store("memory://pairs")
        >>> for number in range(3):
        ...     _ = store.put(f"{number}.bin", bytes([number] * 4))
        ...     _ = store.put(f"{number}.json", json.dumps({"label": number * 10}).encode())
        >>> class Pairs(torchobj.ObjectDataset):
        ...     def __len__(self):
        ...         return 3
        ...
        ...     def objects_at(self, index):
        ...         return [torchobj.ObjectRef(f"memory://pairs/{index}.{end}") for end in ("bin", "json")]
        ...
        ...     def build(self, index, readers):
        ...         body, label = readers
        ...         return body.read(), json.load(label)["label"]
        >>> Pairs()[1]
        (b'\x01\x01\x01\x01', 10)
        >>> [labels.tolist() for _, labels in torchobj.DataLoader(Pairs(), batch_size=2)]
        [[0, 10], [20]]
    """

    def __init__(
        self,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
        on_error: OnError = "raise",
    ) -> None:
        failures = FailurePolicy.of_map_style(on_error)
        self.__dict__["_torchobj"] = _Parts(RefReader(store_config(config, region, endpoint_url)), failures)
        self._torchobj_parts.reader.source()

    def __repr__(self) -> str:
        # Without the length: a subclass may compute it with I/O.
        return f"<{type(self).__name__}, a torchobj.ObjectDataset, on_error={self._torchobj_failures.on_error!r}>"

    @property
    def failed_samples(self) -> int:
        """Number of samples that failed so far, in this process and its DataLoader workers."""
        return self._torchobj_failures.count

    def objects_at(self, index: int) -> Sequence[ObjectRef]:
        """The objects of sample `index`, which is in `range(len(self))`. Defined by a subclass.

        Called in the trainer's process and in workers. It must return the same objects each time, without I/O.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define objects_at(index): the ObjectRefs of sample {index}"
        )

    def build(self, index: int, readers: Sequence[ObjectReader]) -> Sample_co:
        """Builds sample `index` from the readers of its objects, in the order of `objects_at`. Defined by a subclass.

        A reader contains its object, or its range only. The memory belongs to the reader, lives as long as the reader
        or a view of it, and is writable.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define build(index, readers): sample {index} of {len(readers)} readers"
        )

    def __getstate__(self) -> object:
        if worker_process.is_pickling_for_spawn():
            self._torchobj_prepare()
        return super().__getstate__()

    @property
    def _torchobj_parts(self) -> "_Parts":
        parts: _Parts | None = self.__dict__.get("_torchobj")
        if parts is None:
            # A subclass did not call super().__init__().
            parts = _Parts(RefReader(StoreConfig()), FailurePolicy.of_map_style("raise"))
            parts = self.__dict__.setdefault("_torchobj", parts)
        return parts

    @property
    @override
    def _torchobj_failures(self) -> FailurePolicy:
        return self._torchobj_parts.failures

    def _torchobj_refs(self, position: int) -> list[ObjectRef]:
        named = self.objects_at(position)
        refs = list(named) if isinstance(named, Iterable) else None
        if refs is None or not all(isinstance(ref, ObjectRef) for ref in refs):
            raise TypeError(
                f"{type(self).__name__}.objects_at({position}) returned {named!r}: must be a sequence of ObjectRef"
            )
        return refs

    @override
    def _torchobj_prepare(self) -> None:
        self._torchobj_parts.reader.source()

    @override
    def _torchobj_samples(self, positions: list[int]) -> list[Any]:
        named = [self._torchobj_refs(position) for position in positions]
        readers = iter(self._torchobj_parts.reader.read([ref for refs in named for ref in refs]))
        return [
            self._torchobj_sample(position, self._torchobj_build(position, refs, [next(readers) for _ in refs]))
            for position, refs in zip(positions, named, strict=True)
        ]

    @override
    def _torchobj_built(self, position: int) -> Any | Failure:
        refs = self._torchobj_refs(position)
        return self._torchobj_build(position, refs, self._torchobj_parts.reader.read(refs))

    def _torchobj_build(
        self, position: int, refs: list[ObjectRef], read: list[ObjectReader | Exception]
    ) -> Any | Failure:
        for ref, reader in zip(refs, read, strict=True):
            if isinstance(reader, Exception):
                add_sample_note(reader, "in the read", ref.url, position)
                return Failure(ref.url, reader)
        try:
            return self.build(position, read)  # type: ignore[arg-type]  # exceptions were returned above
        except Exception as error:  # noqa: BLE001  raised, unless on_error handles it
            url = refs[0].url if refs else "without objects"
            add_sample_note(error, "in build", url, position)
            return Failure(url, error)

    @override
    def _torchobj_in_order(self, order: Order) -> Iterator[Any]:
        return _OrderedSamples(self, order)

    @override
    def _torchobj_to_announce(self, positions: list[int]) -> list[tuple[int, int]]:
        refs: list[ObjectRef] = []
        for position in positions:
            try:
                refs += self._torchobj_refs(position)
            except Exception:  # noqa: BLE001, S112  raised when the sample is read
                continue
        return self._torchobj_parts.reader.to_announce(refs)

    @override
    def _torchobj_configs(self) -> list[StoreConfig]:
        """Those of the stores of the first sample; empty if its objects cannot be named."""
        try:
            refs = self._torchobj_refs(0)
        except Exception:  # noqa: BLE001  raised when the sample is read
            return []
        return [resolved(ref.url, self._torchobj_parts.reader.config) for ref in refs]


class _Parts(NamedTuple):
    """What a dataset consists of besides its subclass, in a single attribute: a subclass may use any other name."""

    reader: RefReader
    failures: FailurePolicy


class _Named(NamedTuple):
    """The objects of a sample, or the exception of `objects_at`."""

    position: int
    refs: list[ObjectRef]
    error: Exception | None = None


class _OrderedSamples(Iterator[Any]):
    """Not a generator, which would end with the first exception of a sample."""

    def __init__(self, dataset: ObjectDataset, order: Order) -> None:
        self._dataset, self._order = dataset, order
        # Positions and objects of the samples of the groups that were announced.
        self._announced: collections.deque[list[_Named]] = collections.deque()
        self._groups: Iterator[tuple[list[ObjectRef], list[Any]]] | None = None
        self._ready: collections.deque[tuple[_Named, list[Any]]] = collections.deque()
        # The process that has read these.
        self._pid = os.getpid()

    def _grouped(self, limit: int) -> Iterator[tuple[list[ObjectRef], int]]:
        """The objects of each request, with their size in bytes."""
        max_bytes = min(_GROUP_BYTES, limit // 4)
        group: list[_Named] = []
        size = 0
        for position in self._order.tolist():
            named = self._named(position)
            count = sum(_size_of(ref) for ref in named.refs)
            if group and (len(group) == _GROUP_SAMPLES or size + count > max_bytes):
                yield self._announce(group), size
                group, size = [], 0
            group.append(named)
            size += count
        if group:
            yield self._announce(group), size

    def _named(self, position: int) -> _Named:
        try:
            return _Named(position, self._dataset._torchobj_refs(position))
        except Exception as error:  # noqa: BLE001  raised in the place of the sample
            return _Named(position, [], error)

    def _announce(self, group: list[_Named]) -> list[ObjectRef]:
        self._announced.append(group)
        return [ref for named in group for ref in named.refs]

    def _read_again(self) -> None:
        """In a forked child: the parent reads other objects into the memory of these once it has used them."""
        waiting = [named for named, _ in self._ready]
        readers = iter(self._dataset._torchobj_parts.reader.read([ref for named in waiting for ref in named.refs]))
        self._ready = collections.deque((named, [next(readers) for _ in named.refs]) for named in waiting)
        self._pid = os.getpid()

    def __next__(self) -> Any:
        if self._groups is None:
            self._groups = read_ahead(self._dataset._torchobj_parts.reader, self._grouped)
        if not self._ready:
            _, found = next(self._groups)
            readers = iter(found)
            self._ready.extend((named, [next(readers) for _ in named.refs]) for named in self._announced.popleft())
            self._pid = os.getpid()
        if self._pid != os.getpid():
            self._read_again()
        named, read = self._ready.popleft()
        if isinstance(named.error, StopIteration):
            raise stopped(named.error)
        if named.error is not None:
            raise named.error
        built = self._dataset._torchobj_build(named.position, named.refs, read)
        return self._dataset._torchobj_sample(named.position, built)


def _size_of(ref: ObjectRef) -> int:
    """Number of bytes to read, or an assumption."""
    end = ref.size if ref.end is None else ref.end
    return _ASSUMED_BYTES if end is None else max(0, end - ref.start)
