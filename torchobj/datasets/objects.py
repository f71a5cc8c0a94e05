"""Map-style datasets whose samples consist of several objects that a subclass names."""

from collections.abc import Sequence
from typing import Any

from torchobj._torchobj import ObjectReader, ObjectRef
from torchobj.config import StoreConfig, resolve
from torchobj.datasets.failures import FailurePolicy, OnError
from torchobj.datasets.listing import Listing
from torchobj.datasets.samples import MapStyleDataset, Sample_co, Samples, Unnamed
from torchobj.reading.reader import RefReader
from torchobj.workers import process

__all__ = ["ObjectDataset"]


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
        # Not by assignment: a subclass may define __setattr__.
        self.__dict__["_torchobj"] = RefReader(config), FailurePolicy.of_map_style(on_error)
        self._torchobj.source.reader()

    def __repr__(self) -> str:
        # Without the length: a subclass may compute it with I/O.
        return f"<{type(self).__name__}, a torchobj.ObjectDataset, on_error={self._torchobj.failures.on_error!r}>"

    @property
    def _torchobj(self) -> Samples[ObjectRef]:  # type: ignore[override]  # not an attribute, see below
        # A copy of the dataset has another source, of its own methods, with the same reader. A subclass may not have
        # called super().__init__().
        if "_torchobj" not in self.__dict__:
            self.__dict__["_torchobj"] = RefReader(None), FailurePolicy.of_map_style("raise")
        reader, failures = self.__dict__["_torchobj"]
        return Samples(_NamedObjects(self, reader), failures, "in build")

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
            self._torchobj.source.prepare()
        return super().__getstate__()


class _NamedObjects:
    """The source of a dataset whose class names the objects."""

    def __init__(self, dataset: ObjectDataset[Any], reader: RefReader) -> None:
        self._dataset, self._reader = dataset, reader

    def __len__(self) -> int:
        return len(self._dataset)

    def prepare(self) -> None:
        self.reader()
        if isinstance(getattr(self._dataset, "_listing", None), Listing):
            # What torchobj's own subclasses list, and index, is inherited too. A user's dataset may have no length.
            len(self._dataset)

    def reader(self) -> RefReader:
        self._reader.source()
        return self._reader

    def keys(self, positions: list[int]) -> list[Sequence[ObjectRef]]:
        return list(map(self._named, positions))

    def _named(self, position: int) -> Sequence[ObjectRef]:
        try:
            named = self._dataset.objects_at(position)
            refs: list[Any] = list(named) if hasattr(named, "__iter__") else [None]
        except Exception as error:  # noqa: BLE001  raised in the place of the sample
            return Unnamed(error)
        for ref in refs:
            if not isinstance(ref, ObjectRef):
                kind = type(self._dataset).__name__
                message = f"{kind}.objects_at({position}) returned {named!r}: must be a sequence of ObjectRef"
                return Unnamed(TypeError(message))
        return refs

    def build(self, position: int, readers: Sequence[ObjectReader]) -> Any:
        return self._dataset.build(position, readers)

    def configs(self) -> list[StoreConfig]:
        # Of the first sample; empty if its objects cannot be named.
        return [resolve(ref.url, self._reader.config) for ref in self._named(0)]
