"""Map-style datasets whose samples consist of several objects that a subclass names."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from torchobj._torchobj import ObjectReader, ObjectRef
from torchobj.config import StoreConfig, resolve
from torchobj.datasets.base import Sample_co
from torchobj.datasets.failures import Failure, FailurePolicy, OnError
from torchobj.datasets.map_style import MapStyleDataset
from torchobj.ranks.sharding import Order
from torchobj.reading.read_ahead import Group, grouped, read_ahead
from torchobj.reading.reader import RefReader
from torchobj.workers import process

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
        config: Settings of the stores. A subclass that does not call `super().__init__()` uses the defaults.
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
        config: StoreConfig | None = None,
        on_error: OnError = "raise",
    ) -> None:
        failures = FailurePolicy.of_map_style(on_error)
        # Not by assignment: a subclass may define __setattr__.
        self.__dict__["_torchobj_parts"] = _Parts(RefReader(config), failures)
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
        if process.is_pickling_for_spawn():
            self._torchobj_prepare()
        return super().__getstate__()

    @functools.cached_property
    def _torchobj_parts(self) -> "_Parts":
        # Of a subclass that did not call super().__init__().
        return _Parts(RefReader(None), FailurePolicy.of_map_style("raise"))

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
    def _torchobj_read(self, positions: list[int]) -> Iterator[Any]:
        named = [self._torchobj_refs(position) for position in positions]
        readers = iter(self._torchobj_parts.reader.read([ref for refs in named for ref in refs]))
        return ((refs, [next(readers) for _ in refs]) for refs in named)

    @override
    def _torchobj_read_in_order(self, order: Order) -> Iterator[tuple[int, Any]]:
        def groups(limit: int) -> Iterator[Group[ObjectRef]]:
            sized = ((each, sum(map(_size_of, each.refs))) for each in map(self._torchobj_named, order.tolist()))
            for samples, size in grouped(sized, _GROUP_SAMPLES, min(_GROUP_BYTES, limit // 4)):
                yield Group([ref for each in samples for ref in each.refs], size, samples)

        for group, readers in read_ahead(self._torchobj_parts.reader, groups):
            for position, refs, failure in group.content:
                yield position, failure or (refs, [next(readers) for _ in refs])

    def _torchobj_named(self, position: int) -> "_Named":
        try:
            return _Named(position, self._torchobj_refs(position))
        except Exception as error:  # noqa: BLE001  raised in the place of the sample
            return _Named(position, [], Failure(None, error))

    @override
    def _torchobj_build(self, position: int, read: Any) -> Any | Failure:
        if isinstance(read, Failure):
            return read
        refs, readers = read
        for ref, reader in zip(refs, readers, strict=True):
            if isinstance(reader, Exception):
                return Failure.noted(reader, "in the read", ref.url, position)
        try:
            return self.build(position, readers)
        except Exception as error:  # noqa: BLE001  raised, unless on_error handles it
            return Failure.noted(error, "in build", refs[0].url if refs else "without objects", position)

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
        """The configurations of the stores of the first sample; empty if its objects cannot be named."""
        try:
            refs = self._torchobj_refs(0)
        except Exception:  # noqa: BLE001  raised when the sample is read
            return []
        return [resolve(ref.url, self._torchobj_parts.reader.config) for ref in refs]


class _Parts(NamedTuple):
    """What a dataset consists of besides its subclass, in a single attribute: a subclass may use any other name."""

    reader: RefReader
    failures: FailurePolicy


class _Named(NamedTuple):
    """The objects of a sample, or the failure of `objects_at`."""

    position: int
    refs: list[ObjectRef]
    failure: Failure | None = None


def _size_of(ref: ObjectRef) -> int:
    """Number of bytes to read, or an assumption."""
    end = ref.size if ref.end is None else ref.end
    return _ASSUMED_BYTES if end is None else max(0, end - ref.start)
