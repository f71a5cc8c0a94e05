"""What map-style datasets share: samples by index and by batch. The datasets read and build them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.utils.data

from torchobj.config import StoreConfig
from torchobj.datasets.base import Sample_co, position_of, positions_of
from torchobj.datasets.failures import Failure, FailurePolicy, neighbours
from torchobj.ranks.sharding import Order
from torchobj.reading import lookahead_warning
from torchobj.telemetry.ranges import profiled
from torchobj.workers import process
from torchobj.workers.memory_budget import HAS_PREFETCHER


class MapStyleDataset(torch.utils.data.Dataset[Sample_co]):
    """Base class of the map-style datasets of torchobj.

    They define `__len__` and the methods that begin with `_torchobj_`, which leave all other names to subclasses of
    users.
    """

    @property
    def _torchobj_failures(self) -> FailurePolicy:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define __len__(): the number of samples")

    def __getitem__(self, index: int) -> Sample_co:
        """Sample `index`. Negative indices count from the end.

        Raises:
            IndexError: There is no such sample.
            StoreError: An object of it cannot be read.
        """
        if process.in_worker():
            self._torchobj_note_batch()
        sample: Sample_co = self._torchobj_samples([position_of(index, self)])[0]
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Sample_co]:
        """The samples of a batch, read concurrently. Called by DataLoader."""
        if self._torchobj_is_overridden():
            return [self[index] for index in indices]
        self._torchobj_note_batch()
        return self._torchobj_samples(positions_of(indices, self))

    def _torchobj_is_overridden(self) -> bool:
        """Whether a subclass of users returns other samples."""
        return type(self).__getitem__ is not MapStyleDataset.__getitem__

    def _torchobj_note_batch(self) -> None:
        if HAS_PREFETCHER and self._torchobj_is_announced():
            lookahead_warning.note_batch(self)

    def _torchobj_is_announced(self) -> bool:
        """Whether a loader announces the objects."""
        return True

    def _torchobj_samples(self, positions: list[int]) -> list[Any]:
        """The samples at these positions. Reads their objects concurrently."""
        read = self._torchobj_read(positions)
        with profiled("torchobj.decode"):
            return [self._torchobj_sample(position, each) for position, each in zip(positions, read, strict=True)]

    def _torchobj_in_order(self, order: Order) -> Iterator[Any]:
        """The samples at these positions. Objects of the next ones are announced."""
        return _OrderedSamples(self, order)

    def _torchobj_sample(self, position: int, read: Any) -> Any:
        """The sample of what was read for it, or one in place of it if it failed."""
        built = self._torchobj_build(position, read)
        if not isinstance(built, Failure):
            return built
        others = (
            self._torchobj_build(other, each)
            for other in neighbours(position, len(self))
            for each in self._torchobj_read([other])
        )
        return self._torchobj_failures.sample(position, built, others)

    def _torchobj_read(self, positions: list[int]) -> Iterable[Any]:
        """Reads the objects of samples concurrently. Returns what `_torchobj_build` builds each sample from."""
        raise NotImplementedError

    def _torchobj_read_in_order(self, order: Order) -> Iterator[tuple[int, Any]]:
        """As `_torchobj_read`, each with its position. Objects of the next samples are announced."""
        raise NotImplementedError

    def _torchobj_build(self, position: int, read: Any) -> Any | Failure:
        """Builds a sample."""
        raise NotImplementedError

    def _torchobj_to_announce(self, positions: list[int]) -> list[tuple[int, int]]:
        """The objects of samples, as pairs of source number and index, which a loader announces immediately."""
        raise NotImplementedError

    def _torchobj_prepare(self) -> None:
        """Creates what workers inherit, before they are started."""

    def _torchobj_configs(self) -> list[StoreConfig]:
        """The configurations of the stores of the objects, as far as they are known."""
        raise NotImplementedError


class _OrderedSamples(Iterator[Any]):
    """Not a generator, which would end with the first exception of a sample."""

    def __init__(self, dataset: MapStyleDataset[Any], order: Order) -> None:
        self._dataset, self._read = dataset, dataset._torchobj_read_in_order(order)

    def __next__(self) -> Any:
        return self._dataset._torchobj_sample(*next(self._read))
