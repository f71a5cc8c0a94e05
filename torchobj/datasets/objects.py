"""Map-style datasets whose samples consist of several objects that a subclass names."""

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.utils.data

from torchobj._torchobj import ObjectReader, ObjectRef
from torchobj.config import S3ClientConfig, StoreConfig, resolved, store_config
from torchobj.datasets import lookahead_warning, prefetch_source, ragged, reductions, worker_process  # noqa: F401  register buffers with multiprocessing and readers with default_collate
from torchobj.datasets.base import Sample_co, position_of, positions_of
from torchobj.datasets.errors import OnError, add_sample_note, check_map_on_error, log_failed_sample, neighbours
from torchobj.datasets.read_ahead import read_refs_ahead
from torchobj.datasets.ref_reader import RefReader
from torchobj.datasets.sharding import Order
from torchobj.datasets.shared_values import SharedCounter

__all__ = ["ObjectDataset"]

#: Maximum number of samples, and of bytes, whose objects are requested at a time when samples are read in order.
_GROUP_SAMPLES, _GROUP_BYTES = 32, 16 << 20

#: Assumed size of an object whose size is not known.
_ASSUMED_BYTES = 1 << 20


class ObjectDataset(torch.utils.data.Dataset[Sample_co]):
    r"""A map-style dataset whose samples consist of objects, or of ranges of objects, that a subclass names.

    A subclass defines `__len__`, `objects_at` and `build`. The objects of a sample, or of a whole batch, are read
    concurrently; with `torchobj.DataLoader` they are read ahead. They can be in any buckets, of any scheme. If
    prefixes of the configuration file within a bucket apply to some of them, those with different configurations are
    read one after the other.

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
        check_map_on_error(on_error)
        self.__dict__["_torchobj"] = _SampleReader(store_config(config, region, endpoint_url), on_error)
        batch_reader_of(self).start()

    def __repr__(self) -> str:
        # Without the length: a subclass may compute it with I/O.
        return f"<{type(self).__name__}, a torchobj.ObjectDataset, on_error={batch_reader_of(self).on_error!r}>"

    @property
    def failed_samples(self) -> int:
        """Number of samples that failed so far, in this process and its DataLoader workers."""
        return batch_reader_of(self).failed.total()

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define __len__(): the number of samples")

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

    def _torchobj_prepare(self) -> None:
        """Creates what workers inherit, before they are started. For the datasets of torchobj."""

    def __getstate__(self) -> object:
        if worker_process.is_pickling_for_spawn():
            self._torchobj_prepare()
        return super().__getstate__()

    def __getitem__(self, index: int) -> Sample_co:
        """Sample `index`. Negative indices count from the end.

        Raises:
            IndexError: There is no such sample.
            StoreError: An object of it cannot be read.
        """
        if worker_process.in_worker():
            _note_batch(self)
        sample: Sample_co = _samples(self, [position_of(index, self)])[0]
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Sample_co]:
        """The samples of a batch, read concurrently. Called by DataLoader."""
        if type(self).__getitem__ is not ObjectDataset.__getitem__:
            # A subclass may override the samples.
            return [self[index] for index in indices]
        _note_batch(self)
        return _samples(self, positions_of(indices, self))


class _SampleReader(RefReader):
    """Reads the objects of a dataset, and knows what happens to samples that fail."""

    def __init__(self, config: StoreConfig, on_error: OnError) -> None:
        super().__init__(config)
        self.on_error, self.failed = on_error, SharedCounter()


# Functions and a single attribute, so that a subclass may use any other name.


def batch_reader_of(dataset: ObjectDataset) -> _SampleReader:
    """The reader of a dataset."""
    made: _SampleReader | None = dataset.__dict__.get("_torchobj")
    if made is None:
        made = dataset.__dict__.setdefault("_torchobj", _SampleReader(StoreConfig(), "raise"))
    return made


def objects_to_announce(dataset: ObjectDataset, indices: Sequence[int]) -> list[tuple[int, int]]:
    """The objects of samples, as pairs of source number and index, which a loader announces.

    Called without indices before workers are started.
    """
    refs: list[ObjectRef] = []
    if not indices:
        dataset._torchobj_prepare()
    for index in indices:
        try:
            refs += _refs_at(dataset, position_of(index, dataset))
        except Exception:  # noqa: BLE001, S112  raised when the sample is read
            continue
    return batch_reader_of(dataset).objects(refs)


def configs_at_start(dataset: ObjectDataset) -> list[StoreConfig]:
    """The configurations of the stores of the first sample; empty if its objects cannot be named."""
    try:
        refs = _refs_at(dataset, 0)
    except Exception:  # noqa: BLE001  raised when the sample is read
        return []
    return [resolved(ref.url, batch_reader_of(dataset).config) for ref in refs]


def _note_batch(dataset: ObjectDataset) -> None:
    if prefetch_source.SUPPORTED:
        lookahead_warning.note_batch(dataset)


def _refs_at(dataset: ObjectDataset, position: int) -> list[ObjectRef]:
    named = dataset.objects_at(position)
    refs = list(named) if isinstance(named, Iterable) else None
    if refs is None or not all(isinstance(ref, ObjectRef) for ref in refs):
        raise TypeError(
            f"{type(dataset).__name__}.objects_at({position}) returned {named!r}: must be a sequence of ObjectRef"
        )
    return refs


def _samples(dataset: ObjectDataset, positions: list[int]) -> list[Any]:
    named = [_refs_at(dataset, position) for position in positions]
    readers = iter(batch_reader_of(dataset).read([ref for refs in named for ref in refs]))
    parts = [[next(readers) for _ in refs] for refs in named]
    return [
        _sample(dataset, position, refs, read) for position, refs, read in zip(positions, named, parts, strict=True)
    ]


def _sample(dataset: ObjectDataset, position: int, refs: list[ObjectRef], read: list[ObjectReader | Exception]) -> Any:
    built = _built(dataset, position, refs, read)
    if not isinstance(built, _Failure):
        return built
    on_error = batch_reader_of(dataset).on_error
    if on_error == "raise":
        raise built.error
    batch_reader_of(dataset).failed.add()
    sample = on_error(position, *built) if callable(on_error) else _replacement(dataset, position, built.error)
    log_failed_sample(position, *built)
    return sample


class _Failure(NamedTuple):
    """The URL of the object that failed, and the exception."""

    url: str
    error: Exception


def _built(
    dataset: ObjectDataset, position: int, refs: list[ObjectRef], read: list[ObjectReader | Exception]
) -> Any | _Failure:
    readers = []
    for ref, reader in zip(refs, read, strict=True):
        if isinstance(reader, Exception):
            add_sample_note(reader, "in the read", ref.url, position)
            return _Failure(ref.url, reader)
        readers.append(reader)
    try:
        return dataset.build(position, readers)
    except Exception as error:  # noqa: BLE001  raised, unless on_error handles it
        url = refs[0].url if refs else "without objects"
        add_sample_note(error, "in build", url, position)
        return _Failure(url, error)


def _replacement(dataset: ObjectDataset, position: int, error: Exception) -> Any:
    for neighbour in neighbours(position, len(dataset)):
        refs = _refs_at(dataset, neighbour)
        built = _built(dataset, neighbour, refs, batch_reader_of(dataset).read(refs))
        if not isinstance(built, _Failure):
            return built
    raise error


def announced_samples(dataset: ObjectDataset, order: Order) -> Iterator[Any]:
    """The samples at these positions. The objects of the next ones are announced."""
    return _AnnouncedSamples(dataset, order)


class _AnnouncedSamples(Iterator[Any]):
    """Not a generator, which would end with the first exception of a sample."""

    def __init__(self, dataset: ObjectDataset, order: Order) -> None:
        self._dataset, self._order = dataset, order
        # Positions and objects of the samples of the groups that were announced.
        self._announced: collections.deque[list[_Named]] = collections.deque()
        self._groups: Iterator[tuple[list[ObjectRef], list[Any]]] | None = None
        self._ready: collections.deque[tuple[_Named, list[Any]]] = collections.deque()

    def _start(self) -> Iterator[tuple[list[ObjectRef], list[Any]]]:
        reader = batch_reader_of(self._dataset)
        return read_refs_ahead(reader, lambda limit: self._grouped(min(_GROUP_BYTES, limit // 4)))

    def _grouped(self, max_bytes: int) -> Iterator[tuple[list[ObjectRef], int]]:
        """The objects of each request, with their size in bytes."""
        group: list[_Named] = []
        size = 0
        for position in self._order.tolist():
            named = _named(self._dataset, position)
            count = sum(_size_of(ref) for ref in named.refs)
            if group and (len(group) == _GROUP_SAMPLES or size + count > max_bytes):
                yield self._announce(group), size
                group, size = [], 0
            group.append(named)
            size += count
        if group:
            yield self._announce(group), size

    def _announce(self, group: "list[_Named]") -> list[ObjectRef]:
        self._announced.append(group)
        return [ref for named in group for ref in named.refs]

    def __next__(self) -> Any:
        if self._groups is None:
            self._groups = self._start()
        if not self._ready:
            _, found = next(self._groups)
            readers = iter(found)
            self._ready.extend((named, [next(readers) for _ in named.refs]) for named in self._announced.popleft())
        named, read = self._ready.popleft()
        if named.error is not None:
            raise named.error
        return _sample(self._dataset, named.position, named.refs, read)


class _Named(NamedTuple):
    """The objects of a sample, or the exception of `objects_at`."""

    position: int
    refs: list[ObjectRef]
    error: Exception | None = None


def _named(dataset: ObjectDataset, position: int) -> _Named:
    try:
        return _Named(position, _refs_at(dataset, position))
    except Exception as error:  # noqa: BLE001  raised in the place of the sample
        return _Named(position, [], error)


def _size_of(ref: ObjectRef) -> int:
    """Number of bytes to read, or an assumption."""
    end = ref.size if ref.end is None else ref.end
    return _ASSUMED_BYTES if end is None else max(0, end - ref.start)
