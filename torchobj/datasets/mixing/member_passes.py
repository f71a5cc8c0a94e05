"""The passes of a mixture over each of its datasets, and their positions. `interleave` decides which one is next.

Samples of a map-style dataset are read ahead, in the order of the pass.
"""

import collections
import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from torchobj.datasets.map_style import MapStyleDataset
from torchobj.datasets.passes import PassDataset, in_epoch
from torchobj.datasets.wrappers import parts_of
from torchobj.exceptions import ConfigError
from torchobj.ranks.sample_ranks import SampleRanks, members_divided_by
from torchobj.ranks.sharding import Order, Shard, in_order
from torchobj.reading.read_ahead import sharing
from torchobj.stateful import is_stateful
from torchobj.warn_once import PROCESS, warn_once

#: Number of samples that a dataset that is not of torchobj returns at a time.
_GROUP_SAMPLES = 32


class MemberPass:
    """The passes over one dataset, one after the other. The next sample is read one step ahead, to find the end.

    Args:
        sharers: Number of datasets that share the memory for reading ahead.
        state: The return value of `state` at which to continue.
    """

    def __init__(self, sharers: int, state: dict[str, Any] | None) -> None:
        self._sharers = sharers
        self._start(state)
        # The next sample, or the exception in its place, and the position before it.
        self._held: tuple[Any, Exception | None] | None = None
        self._before: dict[str, Any] = {}

    def _start(self, state: dict[str, Any] | None) -> None:
        """Starts a pass."""
        raise NotImplementedError

    def _next(self) -> Any:
        """The next sample of the pass."""
        raise NotImplementedError

    def _position(self) -> dict[str, Any]:
        """The position after the last sample that was read, as plain values."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
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
        """The next sample.

        Raises:
            StopIteration: The pass has no further sample.
            Exception: The exception in its place.
        """
        if self.is_at_end():
            raise StopIteration
        assert self._held is not None  # noqa: S101  not at the end
        (sample, error), self._held = self._held, None
        if error is not None:
            raise error
        return sample

    def restart(self) -> None:
        """Starts the next pass over the same dataset."""
        self._held = None
        self._start(None)


class IterablePass(MemberPass):
    """Passes over an iterable dataset, which divides itself among ranks and workers.

    Args:
        dataset: The dataset.
        ranks: Who divides, by the arguments of the mixture.
        epoch: The epoch of the mixture; passes that follow at the end of the dataset have the next ones.
        sharers, state: As for `MemberPass`.
    """

    def __init__(
        self, dataset: Any, ranks: SampleRanks, epoch: int, sharers: int, state: dict[str, Any] | None
    ) -> None:
        self._dataset, self._ranks, self._epoch, self._round = dataset, ranks, epoch, -1
        super().__init__(sharers, state)

    def _start(self, state: dict[str, Any] | None) -> None:
        dataset, own = self._dataset, {} if state is None else state
        self._round = own.get("round", self._round + 1)
        with self._as_member():
            if not isinstance(dataset, PassDataset) and callable(set_epoch := getattr(dataset, "set_epoch", None)):
                set_epoch(self._epoch + self._round)
            if own.get("dataset") is not None:
                _load(dataset, own["dataset"])
            self._iterator = iter(dataset)
        if own.get("iterator") is not None:
            _load(self._iterator, own["iterator"])
        self._is_saved = is_stateful(dataset) or is_stateful(self._iterator)
        self._count = own.get("count", 0)
        if self._count and not self._is_saved:
            _warn_of_replay(type(dataset).__name__)
            with sharing(self._sharers), self._as_member():
                self._skip(self._count)

    @contextlib.contextmanager
    def _as_member(self) -> Iterator[None]:
        with members_divided_by(self._ranks), in_epoch(self._epoch + self._round):
            yield

    def _skip(self, count: int) -> None:
        for _ in range(count):
            try:
                next(self._iterator)
            except StopIteration:
                return
            except Exception:  # noqa: BLE001, S112  it was raised before the state was saved
                continue

    def _next(self) -> Any:
        self._count += 1
        # A wrapper may start the pass of its dataset at the first sample.
        with self._as_member():
            return next(self._iterator)

    def _position(self) -> dict[str, Any]:
        if isinstance(self._dataset, PassDataset):
            position = self._dataset.state_dict()
            return {"dataset": position, "iterator": None, "count": self._count, "round": self._round}
        dataset, iterator = self._dataset, self._iterator
        # Copies, because these objects may be changed by the next sample.
        own = copy.deepcopy(dataset.state_dict()) if is_stateful(dataset) else None
        other = iterator is not dataset and is_stateful(iterator)
        return {
            "dataset": own,
            "iterator": copy.deepcopy(iterator.state_dict()) if other else None,
            "count": self._count,
            "round": self._round,
        }


class MapPass(MemberPass):
    """Passes over a map-style dataset, each in an order of its own, of which each rank and worker has a part.

    Args:
        dataset: The dataset.
        seed: Seed, epoch, and the number of the dataset.
        shard: The rank and worker.
        sharers, state: As for `MemberPass`.
    """

    def __init__(
        self, dataset: Any, seed: tuple[int, int, int], shard: Shard, sharers: int, state: dict[str, Any] | None
    ) -> None:
        self._dataset, self._seed, self._shard, self._round = dataset, seed, shard, -1
        super().__init__(sharers, state)

    def _start(self, state: dict[str, Any] | None) -> None:
        self._round = self._round + 1 if state is None else int(state["round"])
        self._done = 0 if state is None else int(state["done"])
        order = np.random.default_rng((*self._seed, self._round)).permutation(in_order(len(self._dataset)))
        self._samples: Iterator[Any] = ordered_samples(
            self._dataset, self._shard.select(order, None)[self._done :].astype(np.int64)
        )

    def _next(self) -> Any:
        self._done += 1
        return next(self._samples)

    def _position(self) -> dict[str, Any]:
        return {"round": self._round, "done": self._done}


def _load(target: Any, state: Any) -> None:
    if not is_stateful(target):
        raise ConfigError(
            f"position of the state: contains the state of a dataset; a {type(target).__name__} has no state_dict and "
            "load_state_dict"
        )
    target.load_state_dict(copy.deepcopy(state))


def _warn_of_replay(name: str) -> None:
    warn_once(PROCESS, "%s has no state_dict and load_state_dict: its samples are read again and dropped", name)


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
    if isinstance(dataset, MapStyleDataset) and not dataset._torchobj_is_overridden():
        return dataset._torchobj_in_order(order)
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
