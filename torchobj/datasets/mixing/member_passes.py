"""The datasets of a mixture: the passes over each, and their positions. `interleave` decides which one is next.

Samples of a map-style dataset are read ahead, in the order of the pass.
"""

import collections
import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from torchobj.datasets.passes import DatasetPass, PassDataset, in_epoch, warn_of_replay
from torchobj.datasets.samples import MapStyleDataset, is_overridden
from torchobj.datasets.wrappers import parts_of
from torchobj.ranks.sample_ranks import SampleRanks, members_divided_by
from torchobj.ranks.sharding import Order, Shard, in_order
from torchobj.reading.read_ahead import sharing
from torchobj.stateful import Position

#: Number of samples that a dataset that is not of torchobj returns at a time.
_GROUP_SAMPLES = 32


class Member:
    """A dataset of a mixture: passes over it, one after the other. The next sample is read one step ahead, to find the
    end.

    Args:
        sharers: Number of datasets that share the memory for reading ahead.
        position: The position at which to continue.
    """

    def __init__(self, sharers: int, position: Position | None) -> None:
        self._sharers = sharers
        # The number of the pass.
        self._round = -1
        # The next sample, or the exception in its place, and the position before it.
        self._held: tuple[Any, Exception | None] | None = None
        self._before: Position = {}
        self.start(position)

    def start(self, position: Position | None) -> None:
        """Starts a pass at a position; None: the next pass, at its beginning."""
        self._round = self._round + 1 if position is None else int(position["round"])

    def _next(self) -> Any:
        """The next sample of the pass."""
        raise NotImplementedError

    def _position(self) -> Position:
        """The position after the last sample that was read."""
        raise NotImplementedError

    def position(self) -> Position:
        """The position after the last sample that was taken."""
        return self._position() if self._held is None else self._before

    def is_at_end(self) -> bool:
        """Whether the pass has no further sample. Reads the next one."""
        if self._held is None:
            self._before = self._position()
            try:
                with sharing(self._sharers):
                    self._held = self._next(), None
            except StopIteration:
                return True
            except Exception as error:  # noqa: BLE001  raised in the place of the sample
                self._held = None, error
        return False

    def take(self) -> Any:
        """The next sample, which `is_at_end` has read.

        Raises:
            Exception: The exception in its place.
        """
        assert self._held is not None  # noqa: S101  not at the end
        (sample, error), self._held = self._held, None
        if error is not None:
            raise error
        return sample


class IterableMember(Member):
    """An iterable dataset, which divides itself among ranks and workers.

    Args:
        dataset: The dataset.
        ranks: Who divides, by the arguments of the mixture.
        epoch: The epoch of the mixture; passes that follow at the end of the dataset have the next ones.
        sharers, position: As for `Member`.
    """

    def __init__(self, dataset: Any, ranks: SampleRanks, epoch: int, sharers: int, position: Position | None) -> None:
        self._pass, self._ranks, self._epoch, self._count = DatasetPass(dataset), ranks, epoch, 0
        super().__init__(sharers, position)

    @override
    def start(self, position: Position | None) -> None:
        super().start(position)
        self._count = 0 if position is None else position["count"]
        dataset = self._pass.dataset
        if not isinstance(dataset, PassDataset) and callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(self._epoch + self._round)
        with self._as_member():
            self._pass.start(position)
        if self._count and not self._pass.has_state:
            warn_of_replay(dataset, "its samples")
            with sharing(self._sharers):
                for _ in range(self._count):
                    # What is raised now was raised before the state was saved.
                    with contextlib.suppress(Exception), self._as_member():
                        next(self._pass)

    @contextlib.contextmanager
    def _as_member(self) -> Iterator[None]:
        with members_divided_by(self._ranks), in_epoch(self._epoch + self._round):
            yield

    @override
    def _next(self) -> Any:
        self._count += 1
        # A wrapper may start the pass of its dataset at the first sample.
        with self._as_member():
            return next(self._pass)

    @override
    def _position(self) -> Position:
        position = self._pass.position()
        if not isinstance(self._pass.dataset, PassDataset):
            # The next sample may change what these objects return.
            position = copy.deepcopy(position)
        return position | {"count": self._count, "round": self._round}


class MapMember(Member):
    """A map-style dataset: each pass has an order of its own, of which each rank and worker has a part.

    Args:
        dataset: The dataset.
        seed: Seed, epoch, and the number of the dataset.
        shard: The rank and worker.
        sharers, position: As for `Member`.
    """

    def __init__(
        self, dataset: Any, seed: tuple[int, int, int], shard: Shard, sharers: int, position: Position | None
    ) -> None:
        self._dataset, self._seed, self._shard, self._done = dataset, seed, shard, 0
        self._samples: Iterator[Any] = iter(())
        super().__init__(sharers, position)

    @override
    def start(self, position: Position | None) -> None:
        super().start(position)
        self._done = 0 if position is None else int(position["done"])
        order = np.random.default_rng((*self._seed, self._round)).permutation(in_order(len(self._dataset)))
        left = self._shard.select(order, None)[self._done :].astype(np.int64)
        self._samples = ordered_samples(self._dataset, left)

    @override
    def _next(self) -> Any:
        self._done += 1
        return next(self._samples)

    @override
    def _position(self) -> Position:
        return {"round": self._round, "done": self._done}


def ordered_samples(dataset: Any, order: Order) -> Iterator[Any]:
    """The samples at these positions. An exception of a sample does not end the iteration.

    The datasets of torchobj and torch's wrappers of these announce what they read next. Samples of other datasets are
    requested in groups, if they have `__getitems__`.
    """
    parts = parts_of(dataset)
    if parts is not None and parts.is_exact and parts.located is not None:
        members, positions = parts.located(order)
        if len(parts.datasets) == 1:
            return ordered_samples(parts.datasets[0], positions)
        samples = [ordered_samples(part, positions[members == at]) for at, part in enumerate(parts.datasets)]
        return _Merged(samples, members)
    if isinstance(dataset, MapStyleDataset) and not is_overridden(dataset, "__getitem__"):
        return dataset._torchobj.in_order(order)
    return _Requested(dataset, order)


def samples_of(dataset: Any, positions: list[int]) -> Sequence[Any]:
    """The samples at these positions, read concurrently if the dataset can."""
    together = getattr(dataset, "__getitems__", None)
    return together(positions) if callable(together) else [dataset[position] for position in positions]


class _Merged(Iterator[Any]):
    """Takes each next sample from the iterator that `members` names."""

    def __init__(self, samples: list[Iterator[Any]], members: Order) -> None:
        self._samples, self._members = samples, iter(members.tolist())

    def __next__(self) -> Any:
        with sharing(len(self._samples)):
            return next(self._samples[next(self._members)])


class _Requested(Iterator[Any]):
    """Samples of any other dataset."""

    def __init__(self, dataset: Any, order: Order) -> None:
        self._dataset, self._order, self._begin = dataset, order, 0
        self._together = callable(getattr(dataset, "__getitems__", None))
        self._samples: collections.deque[Any] = collections.deque()
        # Of a group that failed: its samples are requested one by one.
        self._single = 0

    def __next__(self) -> Any:
        if self._samples:
            return self._samples.popleft()
        if self._begin == len(self._order):
            raise StopIteration
        group = self._order[self._begin : self._begin + _GROUP_SAMPLES].tolist()
        if self._together and not self._single:
            try:
                samples = list(self._dataset.__getitems__(group))
            except Exception:  # noqa: BLE001  raised when its sample is requested alone
                self._single = len(group)
            else:
                self._begin += len(group)
                self._samples.extend(samples)
                return self._samples.popleft()
        self._single = max(0, self._single - 1)
        self._begin += 1
        return self._dataset[group[0]]
