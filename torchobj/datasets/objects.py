"""Map-style datasets of the user's, whose samples are made of several objects that the user names."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.utils.data

from torchobj import _torchobj
from torchobj._torchobj import ObjectReader, ObjectRef
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.datasets import handover, ragged, source, unannounced, workers  # noqa: F401  teach multiprocessing and default_collate what to do with readers
from torchobj.datasets.base import Sample_co, position_of
from torchobj.datasets.errors import OnError, check_on_error, neighbours, note, say_failed
from torchobj.datasets.shared import Tally

__all__ = ["ObjectDataset"]


class ObjectDataset(torch.utils.data.Dataset[Sample_co]):
    r"""A dataset whose samples are made of objects, or of ranges of objects, that a subclass names.

    A subclass defines `__len__`, `objects_at` and `build`. The objects of a sample, or of a whole batch, are read at
    once; under `torchobj.DataLoader` they are read before a worker asks for them. They may lie in any bucket of any
    scheme that `Store` speaks.

    Args:
        region, endpoint_url: In place of the configuration's.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector. A subclass that does not call
            `super().__init__()` has the defaults.
        on_error: What to do about a sample that cannot be read or built: `raise`; `replace` by the next one that can;
            or a callable that gets index, URL and exception and returns a sample. The URL is that of the object that
            could not be read, else of the sample's first. The first of each process is logged. An exception of
            `objects_at` is always raised.

    Attributes:
        failed_samples: How many samples could not be read or built, in this process and its DataLoader workers.

    Raises:
        ConfigError: An argument is wrong. Nothing is asked of a store here.

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
        check_on_error(on_error)
        self.__dict__["_torchobj"] = _Reads(store_config(config, region, endpoint_url), on_error)
        # Before workers are forked: they inherit it.
        reads_of(self).source()

    @property
    def failed_samples(self) -> int:
        """How many samples could not be read or built so far, in this process and its DataLoader workers."""
        return reads_of(self).failed.total()

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define __len__(): the number of samples")

    def objects_at(self, index: int) -> Sequence[ObjectRef]:
        """The objects of sample `index`, which is in `range(len(self))`: a subclass says.

        Called in the trainer's process and in workers: must name the same objects each time, and reads nothing.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define objects_at(index): the ObjectRefs of sample {index}"
        )

    def build(self, index: int, readers: Sequence[ObjectReader]) -> Sample_co:
        """Makes sample `index` of the readers of its objects, in the order of `objects_at`: a subclass says.

        The content of a reader is its object's, or the range's only. Its memory is the reader's alone, lives as long as
        the reader or a view of it does, and may be written to.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define build(index, readers): sample {index} of {len(readers)} readers"
        )

    def __getitem__(self, index: int) -> Sample_co:
        """Sample `index`; a negative one counts from the end.

        Raises:
            IndexError: There is no such sample.
            StoreError: An object of it cannot be read.
        """
        if workers.in_worker():
            _note_batch(self)
        sample: Sample_co = _samples(self, [position_of(index, self)])[0]
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Sample_co]:
        """The samples of a batch, read at once; what a DataLoader calls."""
        if type(self).__getitem__ is not ObjectDataset.__getitem__:
            # What a subclass makes of a sample is what a batch is made of.
            return [self[index] for index in indices]
        _note_batch(self)
        return _samples(self, [position_of(index, self) for index in indices])


class _Reads:
    """How the objects of one dataset are read."""

    def __init__(self, config: StoreConfig, on_error: OnError) -> None:
        self.config, self.on_error, self.failed = config, on_error, Tally()
        self._source: source.Source[_torchobj.RefSource] = source.Source()

    def source(self) -> "_torchobj.RefSource | None":
        """The objects as a source of the prefetcher; None where there is none."""
        if not source.SUPPORTED:
            return None
        native = _torchobj.RefSource
        return self._source.native(lambda budget: native(self.config, budget), native.attach)

    def read(self, refs: list[ObjectRef]) -> list[ObjectReader | Exception]:
        """Readers of objects, all read at once: what was announced is there sooner."""
        ahead = self.source()
        if ahead is not None and ahead.announced():
            return ahead.read(refs)
        return _torchobj.read_refs(self.config, refs)


# Functions, and one attribute with a name of ours: names of a subclass are the user's.


def reads_of(dataset: ObjectDataset) -> _Reads:
    """How the objects of a dataset are read."""
    made: _Reads | None = dataset.__dict__.get("_torchobj")
    if made is None:
        made = dataset.__dict__.setdefault("_torchobj", _Reads(StoreConfig(), "raise"))
    return made


def announceable(dataset: ObjectDataset, indices: Sequence[int]) -> list[tuple[int, int]]:
    """The objects that samples are made of, as the prefetcher knows them: what a loader announces."""
    ahead = reads_of(dataset).source()
    if ahead is None:
        return []
    refs: list[ObjectRef] = []
    for index in indices:
        try:
            refs += _refs_at(dataset, position_of(index, dataset))
        except Exception:  # noqa: BLE001, S112  whoever takes the sample says so, in its turn
            continue
    return ahead.objects(refs)


def _note_batch(dataset: ObjectDataset) -> None:
    if source.SUPPORTED:
        unannounced.note_batch(dataset)


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
    readers = iter(reads_of(dataset).read([ref for refs in named for ref in refs]))
    parts = [[next(readers) for _ in refs] for refs in named]
    return [
        _sample(dataset, position, refs, read) for position, refs, read in zip(positions, named, parts, strict=True)
    ]


def _sample(dataset: ObjectDataset, position: int, refs: list[ObjectRef], read: list[ObjectReader | Exception]) -> Any:
    built = _built(dataset, position, refs, read)
    if not isinstance(built, _Failure):
        return built
    on_error = reads_of(dataset).on_error
    if on_error == "raise":
        raise built.error
    reads_of(dataset).failed.add()
    sample = on_error(position, *built) if callable(on_error) else _replacement(dataset, position, built.error)
    say_failed(position, *built)
    return sample


class _Failure(NamedTuple):
    """Why there is no sample: of which object, and the exception."""

    url: str
    error: Exception


def _built(
    dataset: ObjectDataset, position: int, refs: list[ObjectRef], read: list[ObjectReader | Exception]
) -> Any | _Failure:
    readers = []
    for ref, reader in zip(refs, read, strict=True):
        if isinstance(reader, Exception):
            note(reader, "in the read", ref.url, position)
            return _Failure(ref.url, reader)
        readers.append(reader)
    try:
        return dataset.build(position, readers)
    except Exception as error:  # noqa: BLE001  raised, unless the user said what to do about it
        url = refs[0].url if refs else "which has no objects"
        note(error, "in build", url, position)
        return _Failure(url, error)


def _replacement(dataset: ObjectDataset, position: int, error: Exception) -> Any:
    for neighbour in neighbours(position, len(dataset)):
        refs = _refs_at(dataset, neighbour)
        built = _built(dataset, neighbour, refs, reads_of(dataset).read(refs))
        if not isinstance(built, _Failure):
            return built
    raise error
