"""`interleave`: mixes the samples of several datasets."""

import bisect
import logging
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch.utils.data
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from torchobj.config.checks import check
from torchobj.datasets.mixing.member_passes import IterableMember, MapMember, Member, samples_of
from torchobj.datasets.passes import PassDataset, PassIterator
from torchobj.datasets.samples import MapStyleDataset, Sample_co, is_overridden, positions_of
from torchobj.datasets.splitmix import mixed_seed, mixed_word
from torchobj.datasets.wrappers import Parts, parts_of
from torchobj.exceptions import ConfigError
from torchobj.ranks.sample_ranks import SampleRanks
from torchobj.ranks.sharding import Order, Shard, worker_part
from torchobj.stateful import Position

__all__ = ["IterableInterleaveDataset", "MapInterleaveDataset", "interleave"]

logger = logging.getLogger("torchobj")

StoppingStrategy = Literal["first_exhausted", "all_exhausted"]

#: Maximum deviation of the sum of the probabilities from 1.
_TOLERANCE = 1e-6

#: Number of draws per block: the draws of each dataset before each block are kept, those within it are counted.
_BLOCK = 4096

#: Number of draws that are made at a time until the mixture ends.
_DRAWN = 1 << 16


class Mixture:
    """Maps positions to datasets, and to the samples of these. Takes a byte per sample; round robin takes none.

    Args:
        lengths: Number of samples of each dataset; 1 or more.
        probabilities: Probability of each dataset; None: round robin.
        seed: Seed of the draws.
        oversample: Whether it ends when all datasets are exhausted; otherwise when one is.
        samples: Number of samples, instead; exhausted datasets start again.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        probabilities: Sequence[float] | None,
        seed: int,
        *,
        oversample: bool,
        samples: int | None = None,
    ) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)
        self._drawn: Order | None = None
        if probabilities is None:
            rounds = self.lengths.max() if oversample else self.lengths.min()
            self.samples = int(rounds) * len(lengths) if samples is None else samples
            return
        if samples is None:
            self._drawn = _drawn(self.lengths, probabilities, seed, oversample=oversample)
        else:
            self._drawn = _draw(np.random.default_rng(seed), _ends(probabilities), samples)
        self.samples = len(self._drawn)
        blocks = range(0, self.samples, _BLOCK)
        counts = [np.bincount(self._drawn[begin : begin + _BLOCK], minlength=len(lengths)) for begin in blocks]
        #: Number of draws from each dataset before each block.
        self._before = np.cumsum([np.zeros(len(lengths), dtype=np.int64), *counts[:-1]], axis=0)

    def located(self, positions: Order) -> tuple[Order, Order]:
        """The dataset of each position, and the number of the sample in it."""
        if self._drawn is None:
            members, numbers = positions % len(self.lengths), positions // len(self.lengths)
        else:
            members, numbers = self._drawn[positions], np.empty(len(positions), dtype=np.int64)
            for at, (position, member) in enumerate(zip(positions.tolist(), members.tolist(), strict=True)):
                block = position // _BLOCK
                within = np.count_nonzero(self._drawn[block * _BLOCK : position] == member)
                numbers[at] = self._before[block, member] + within
        return members, numbers % self.lengths[members]


def _drawn(lengths: Order, probabilities: Sequence[float], seed: int, *, oversample: bool) -> Order:
    """The dataset of each sample. Equals the draws of `numpy.random.Generator.choice`, which Hugging Face uses."""
    random, ends = np.random.default_rng(seed), _ends(probabilities)
    drawable = np.array(probabilities) > 0
    counts, parts = np.zeros(len(lengths), dtype=np.int64), []
    #: Position of the draw that exhausts each dataset.
    last = np.full(len(lengths), -1, dtype=np.int64)
    done = 0
    while not (last[drawable] >= 0).any() if not oversample else (last[drawable] < 0).any():
        part = _draw(random, ends, _DRAWN)
        for member in np.flatnonzero(last < 0).tolist():
            found = np.flatnonzero(part == member)
            missing = int(lengths[member] - counts[member])
            if missing <= len(found):
                last[member] = done + found[missing - 1]
            counts[member] += len(found)
        parts.append(part)
        done += len(part)
    known = last[last >= 0]
    return np.concatenate(parts)[: int(known.max() if oversample else known.min()) + 1]


def _draw(random: np.random.Generator, ends: Order, count: int) -> Order:
    """The next draws. Their number does not change those that follow."""
    return np.searchsorted(ends, random.random(count), side="right").astype(np.min_scalar_type(len(ends)))


def _ends(probabilities: Sequence[float]) -> Order:
    ends = np.cumsum(np.array(probabilities, dtype=np.float64))
    scaled: Order = ends / ends[-1]
    return scaled


class Draws:
    """The dataset of each draw. It depends on the seed and the number of the draw only.

    Args:
        members: Number of datasets.
        probabilities: Probability of each dataset; None: round robin.
        seed: Numbers that determine the draws.
    """

    def __init__(self, members: int, probabilities: Sequence[float] | None, seed: Sequence[int]) -> None:
        self._members, self._seed = members, mixed_seed(seed)
        self._ends: list[float] | None = None if probabilities is None else _ends(probabilities).tolist()

    def at(self, number: int) -> int:
        """The dataset of draw `number`."""
        if self._ends is None:
            return number % self._members
        # The 53 bits that a float represents exactly.
        return bisect.bisect_right(self._ends, (mixed_word(self._seed, number) >> 11) * 2.0**-53)


class _InterleaveDataset(torch.utils.data.Dataset[Sample_co]):
    """The arguments of a mixture, as those of `interleave`."""

    def __init__(
        self,
        datasets: Sequence[Any],
        probabilities: Sequence[float] | None = None,
        *,
        seed: int = 0,
        stopping_strategy: StoppingStrategy = "first_exhausted",
        epoch_samples: int | None = None,
    ) -> None:
        is_count = isinstance(epoch_samples, int) and not isinstance(epoch_samples, bool) and epoch_samples > 0
        check("epoch_samples", epoch_samples, "1 or more, or None", ok=epoch_samples is None or is_count)
        is_known = stopping_strategy in ("first_exhausted", "all_exhausted")
        check("stopping_strategy", stopping_strategy, "'first_exhausted' or 'all_exhausted'", ok=is_known)
        is_seed = hasattr(seed, "__index__") and not isinstance(seed, bool) and operator.index(seed) >= 0
        check("seed", seed, "an int, 0 or more", ok=is_seed)
        self._iterable = _are_iterable(datasets)
        if any(self._iterable) and not isinstance(self, torch.utils.data.IterableDataset):
            raise ConfigError(f"datasets[{self._iterable.index(True)}]: is iterable; use IterableInterleaveDataset")
        self.datasets = list(datasets)
        self.stopping_strategy, self.epoch_samples = stopping_strategy, epoch_samples
        self.probabilities = self._checked_probabilities(probabilities)
        self.seed = operator.index(seed)

    def __repr__(self) -> str:
        kinds = ", ".join(type(dataset).__name__ for dataset in self.datasets[:3])
        more = f", … {len(self.datasets) - 3} more" if len(self.datasets) > 3 else ""
        chosen = "" if self.probabilities is None else f", probabilities={self.probabilities[:3]}"
        end = f"stopping_strategy={self.stopping_strategy!r}"
        end = end if self.epoch_samples is None else f"epoch_samples={self.epoch_samples}"
        return f"<{type(self).__name__} of {kinds}{more}{chosen}, seed={self.seed}, {end}>"

    @property
    def _oversamples(self) -> bool:
        return self.stopping_strategy == "all_exhausted"

    def _checked_probabilities(self, probabilities: Sequence[float] | None) -> list[float] | None:
        if probabilities is None:
            return None
        try:
            found = [float(each) for each in probabilities]
        except (TypeError, ValueError):
            raise ConfigError(f"probabilities={probabilities!r}: must be numbers, or None") from None
        if len(found) != len(self.datasets):
            raise ConfigError(f"probabilities: {len(found)} for {len(self.datasets)} datasets; pass one for each")
        for number, each in enumerate(found):
            allowed = "more than 0 with all_exhausted, which needs all samples" if self._oversamples else "0 or more"
            is_possible = each > 0 if self._oversamples else each >= 0
            check(f"probabilities[{number}]", each, allowed, ok=math.isfinite(each) and is_possible)
        if abs(math.fsum(found) - 1) > _TOLERANCE:
            raise ConfigError(f"probabilities={found!r}: must sum to 1, but sum to {math.fsum(found):g}")
        return found


class MapInterleaveDataset(_InterleaveDataset[Sample_co]):
    """A mixture of map-style datasets, as `interleave` returns it. Can be subclassed."""

    _mixture: Mixture | None = None

    @property
    def mixture(self) -> Mixture:
        """The order of the mixture. The first access reads the lengths."""
        if self._mixture is None:
            lengths = [_length(number, dataset) for number, dataset in enumerate(self.datasets)]
            self._mixture = Mixture(
                lengths, self.probabilities, self.seed, oversample=self._oversamples, samples=self.epoch_samples
            )
        return self._mixture

    def __getstate__(self) -> dict[str, Any]:
        # Computed again, which is faster than to send it.
        return {name: value for name, value in self.__dict__.items() if name != "_mixture"}

    def __len__(self) -> int:
        return self.mixture.samples

    def __iter__(self) -> Iterator[Sample_co]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Sample_co:
        """Sample `index`. Negative indices count from the end.

        Raises:
            IndexError: There is no such sample.
        """
        [(member, number)] = self.located([index])
        sample: Sample_co = self.datasets[member][number]
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Sample_co]:
        """The samples of a batch. Each dataset reads its part concurrently. Called by DataLoader."""
        if is_overridden(self, "__getitem__"):
            return [self[index] for index in indices]
        located = self.located(indices)
        parts: dict[int, list[int]] = {}
        for member, number in located:
            parts.setdefault(member, []).append(number)
        samples = {member: iter(samples_of(self.datasets[member], numbers)) for member, numbers in parts.items()}
        return [next(samples[member]) for member, _ in located]

    def located(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """The dataset of each sample, by its number, and the index in it."""
        members, numbers = self.mixture.located(np.array(positions_of(indices, len(self)), dtype=np.int64))
        return list(zip(members.tolist(), numbers.tolist(), strict=True))


@parts_of.register
def _parts_of_map_style(dataset: MapInterleaveDataset) -> Parts:
    def located(positions: Order) -> tuple[Order, Order]:
        return dataset.mixture.located(positions)

    is_exact = not is_overridden(dataset, "__getitem__")
    return Parts(dataset.datasets, located, is_exact, is_exact, lambda: dataset.mixture)


class IterableInterleaveDataset(_InterleaveDataset[Sample_co], PassDataset[Sample_co]):
    """A mixture of datasets of which one or more are iterable, as `interleave` returns it. Can be subclassed."""

    def __init__(
        self,
        datasets: Sequence[Any],
        probabilities: Sequence[float] | None = None,
        *,
        seed: int = 0,
        stopping_strategy: StoppingStrategy = "first_exhausted",
        epoch_samples: int | None = None,
        enable_sharding: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(
            datasets, probabilities, seed=seed, stopping_strategy=stopping_strategy, epoch_samples=epoch_samples
        )
        known: dict[int, int] = {}
        for number, dataset in enumerate(self.datasets):
            if self._iterable[number] and known.setdefault(id(dataset), number) != number:
                raise ConfigError(
                    f"datasets[{number}] is datasets[{known[id(dataset)]}]: an iterable dataset has one position; "
                    "create another one with the same arguments"
                )
        self._set_up_passes("raise", SampleRanks.of(enable_sharding, rank, world_size, mesh))

    @override
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._set_epoch_of_datasets()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._set_epoch_of_datasets()

    def _set_epoch_of_datasets(self) -> None:
        for dataset, iterable in zip(self.datasets, self._iterable, strict=True):
            if iterable and callable(set_epoch := getattr(dataset, "set_epoch", None)):
                set_epoch(self._epoch.next())

    @override
    def _lengths(self, shards: Sequence[Shard], epoch: int) -> list[int]:
        if self.epoch_samples is None:
            raise TypeError(
                "the samples of a mixture with an iterable dataset cannot be counted; pass epoch_samples= to "
                "torchobj.interleave"
            )
        parts = [worker_part(-(-self.epoch_samples // shard.world_size), shard) for shard in shards]
        return [end - begin for begin, end in parts]

    def __iter__(self) -> Iterator[Sample_co]:
        self._check()
        shard, epoch = self._shard(), self._pass_epoch()
        lengths = [
            None if iterable else _length(number, dataset)
            for number, (dataset, iterable) in enumerate(zip(self.datasets, self._iterable, strict=True))
        ]
        self._warn_of_undivided_datasets(shard.world_size * shard.workers)
        shape = {
            "lengths": lengths,
            "probabilities": self.probabilities,
            "stopping_strategy": self.stopping_strategy,
            "world_size": shard.world_size,
            "workers": shard.workers,
        }
        samples = None
        if self.epoch_samples is not None:
            shape["epoch_samples"], [samples] = self.epoch_samples, self._lengths([shard], epoch)
        start = self._starting_position(shape, epoch)
        position = start.get("position", {})
        check("position of the state", position, "that of a mixture", ok=not position or self._is_position(position))
        starts = position.get("members", [None] * len(self.datasets))
        members: list[Member] = []
        for number, (dataset, at) in enumerate(zip(self.datasets, starts, strict=True)):
            if self._iterable[number]:
                members.append(IterableMember(dataset, self._ranks, epoch, len(self.datasets), at))
            else:
                members.append(MapMember(dataset, (self.seed, epoch, number), shard, len(self.datasets), at))
        draws = Draws(len(members), self.probabilities, (self.seed, epoch, shard.rank, shard.worker))
        mixed = _MixedMembers(self, members, draws, position, None if samples is None else samples - start["done"])
        return PassIterator(self, start, mixed, Member.take, mixed.position)

    def _is_position(self, position: Position) -> bool:
        """Whether this has the fields of `_MixedMembers.position`."""
        count = len(self.datasets)
        draws, exhausted, last, members = map(position.get, ("draws", "exhausted", "last", "members"))
        if not (isinstance(exhausted, list) and isinstance(members, list) and len(exhausted) == len(members) == count):
            return False
        done = ["count" if iterable else "done" for iterable in self._iterable]
        numbers = [draws, 0 if last is None else last]
        for field, member in zip(done, members, strict=True):
            numbers += map(member.get, (field, "round")) if isinstance(member, Mapping) else [None]
        is_known = last is None or (type(last) is int and last < count)
        return is_known and all(type(number) is int and number >= 0 for number in numbers)

    def _warn_of_undivided_datasets(self, parts: int) -> None:
        whole = [
            number
            for number, dataset in enumerate(self.datasets)
            if isinstance(dataset, PassDataset) and not dataset._ranks.is_divided
        ]
        if parts > 1 and whole and self._epoch.is_first("repeated"):
            logger.warning(
                "datasets[%d] of a mixture: each of %d ranks and DataLoader workers yields all its objects; "
                "pass enable_sharding=True to divide them",
                whole[0],
                parts,
            )


@parts_of.register
def _parts_of_iterable(dataset: IterableInterleaveDataset) -> Parts:
    return Parts(dataset.datasets, None, is_exact=False)


@overload
def interleave(
    datasets: Sequence[MapStyleDataset[Sample_co]],
    probabilities: Sequence[float] | None = None,
    *,
    seed: int = 0,
    stopping_strategy: StoppingStrategy = "first_exhausted",
    epoch_samples: int | None = None,
) -> MapInterleaveDataset[Sample_co]: ...
@overload
def interleave(
    datasets: Sequence[Any],
    probabilities: Sequence[float] | None = None,
    *,
    seed: int = 0,
    stopping_strategy: StoppingStrategy = "first_exhausted",
    epoch_samples: int | None = None,
    enable_sharding: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    mesh: DeviceMesh | None = None,
) -> MapInterleaveDataset[Any] | IterableInterleaveDataset[Any]: ...


def interleave(
    datasets: Sequence[Any],
    probabilities: Sequence[float] | None = None,
    *,
    seed: int = 0,
    stopping_strategy: StoppingStrategy = "first_exhausted",
    epoch_samples: int | None = None,
    enable_sharding: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    mesh: DeviceMesh | None = None,
) -> MapInterleaveDataset[Any] | IterableInterleaveDataset[Any]:
    """Mixes the samples of several datasets, as `interleave_datasets` of Hugging Face.

    Map-style datasets give a map-style dataset: a fixed mixture with a length, whose samples are read ahead in the
    order of any sampler, and which is resumed, also with another number of ranks, as each of its datasets. The lengths
    are read when they are first needed. The mixture takes a byte of memory per sample, without `probabilities` none.

    If one of the datasets is iterable, so is the mixture. Each rank and worker mixes its own parts of the datasets:
    iterable datasets divide themselves, and map-style datasets are shuffled and divided; both read ahead. The numbers
    of samples of ranks may differ. The position of a `torchobj.DataLoader` is exact, and can be resumed with the same
    numbers of ranks and workers. Iterable datasets without `state_dict` and `load_state_dict` are read again up to it.
    `set_epoch` also sets the epoch of the datasets.

    Args:
        datasets: The datasets: of torchobj, torch's wrappers of these, other datasets, and mixtures.
        probabilities: Probability with which a sample is drawn from each dataset; they must sum to 1. None: the
            datasets take turns.
        seed: Seed of the draws; 0 or more. With an iterable dataset, each pass has the draws of the next epoch.
        stopping_strategy: `first_exhausted` ends when one dataset, or the part of it that a worker has, is exhausted.
            `all_exhausted` ends when each was exhausted once; until then exhausted ones start again.
        epoch_samples: Number of samples of an epoch of the job, instead of a stopping strategy: exhausted datasets
            start again. A mixture of map-style datasets has this length. With an iterable dataset, each rank yields
            its part, rounded up, so that all ranks yield the same number; each epoch begins at the start of the
            datasets, in their order of that epoch. None: the stopping strategy decides.
        enable_sharding, rank, world_size, mesh: With an iterable dataset: as for `TarIterableDataset`; they apply to
            the datasets of torchobj in the mixture too, except those that have such arguments of their own. Without
            one, the sampler divides.

    Returns:
        A `MapInterleaveDataset` or an `IterableInterleaveDataset` of `torchobj.datasets.mixing.interleave`. Both have
        the attributes `datasets`, `probabilities`, `seed`, `stopping_strategy` and `epoch_samples`.

    Raises:
        ConfigError: An argument is invalid; or, at the first use, a map-style dataset has no samples. In iteration with
            `epoch_samples`: a worker has no samples of any dataset.

    Example:
        >>> import torchobj
        >>> store = torchobj.Store("memory://mixed")
        >>> for key in ("news/a", "news/b", "books/c", "books/d", "books/e"):
        ...     _ = store.put(key, key.encode())
        >>> news, books = (
        ...     torchobj.ObjectMapDataset(f"memory://mixed/{name}/", transform=lambda reader: reader.read())
        ...     for name in ("news", "books")
        ... )
        >>> list(torchobj.interleave([news, books]))
        [b'news/a', b'books/c', b'news/b', b'books/d']
        >>> mixed = torchobj.interleave([news, books], [0.25, 0.75], stopping_strategy="all_exhausted")
        >>> [mixed[index] for index in range(4)]
        [b'books/c', b'books/d', b'news/a', b'news/b']
    """
    ranks: Any = {"enable_sharding": enable_sharding, "rank": rank, "world_size": world_size, "mesh": mesh}
    if any(_are_iterable(datasets)):
        return IterableInterleaveDataset(
            datasets,
            probabilities,
            seed=seed,
            stopping_strategy=stopping_strategy,
            epoch_samples=epoch_samples,
            **ranks,
        )
    if SampleRanks.of(**ranks).given is not None:
        raise ConfigError(
            "rank, world_size, mesh: the sampler divides map-style datasets; pass them to ElasticDistributedSampler"
        )
    return MapInterleaveDataset(
        datasets, probabilities, seed=seed, stopping_strategy=stopping_strategy, epoch_samples=epoch_samples
    )


class _MixedMembers(Iterator[Member]):
    """The members of a mixture in the order of its samples, each of which has a next sample."""

    def __init__(
        self,
        dataset: IterableInterleaveDataset[Any],
        members: list[Member],
        draws: Draws,
        position: Position,
        left: int | None,
    ) -> None:
        self._dataset, self._members, self._draws = dataset, members, draws
        # Number of samples up to the end; None: the stopping strategy decides.
        self._left = left
        self._number: int = position.get("draws", 0)
        never = [left is not None and each == 0 for each in dataset.probabilities or [1.0] * len(members)]
        self._exhausted: list[bool] = list(position.get("exhausted", never))
        # The member of the last sample. Whether that was its last one is determined when the next sample is needed.
        self._last: int | None = position.get("last")

    def position(self) -> Position:
        """The position after the last sample that was taken."""
        members = [each.position() for each in self._members]
        return {"draws": self._number, "exhausted": list(self._exhausted), "last": self._last, "members": members}

    def __next__(self) -> Member:
        last, self._last = self._last, None
        if self._left == 0:
            raise StopIteration
        if last is not None and self._members[last].is_at_end():
            self._exhausted[last] = self._left is None
            if not self._is_over():
                self._members[last].start(None)
        while not self._is_over():
            number = self._draws.at(self._number)
            self._number += 1
            if not self._members[number].is_at_end():
                self._last = number
                if self._left is not None:
                    self._left -= 1
                return self._members[number]
            # Only a pass without samples: others are restarted at their end.
            self._exhausted[number] = True
            if self._dataset._epoch.is_first("no samples"):
                restarts = self._dataset._oversamples or self._left is not None
                action = "its passes over it are empty" if restarts else "its mixture ends"
                worker = getattr(torch.utils.data.get_worker_info(), "id", 0)
                logger.warning("datasets[%d] of a mixture has no samples for worker %d: %s", number, worker, action)
        if self._left is not None:
            raise ConfigError(
                f"epoch_samples={self._dataset.epoch_samples}: a worker has no samples of any dataset, and "
                f"{self._left} of its epoch are missing; use fewer workers, or smaller shards"
            )
        raise StopIteration

    def _is_over(self) -> bool:
        restarts = self._dataset._oversamples or self._left is not None
        return all(self._exhausted) if restarts else any(self._exhausted)


def _are_iterable(datasets: Any) -> list[bool]:
    """Whether each of the datasets is iterable.

    Raises:
        ConfigError: They are not datasets.
    """
    if isinstance(datasets, (str, bytes, Mapping)) or not isinstance(datasets, Sequence):
        raise ConfigError(f"datasets={type(datasets)}: must be a list of datasets")
    if not datasets:
        raise ConfigError("datasets=[]: must contain a dataset")
    return [_is_iterable(number, dataset) for number, dataset in enumerate(datasets)]


def _is_iterable(number: int, dataset: Any) -> bool:
    kind = type(dataset)
    is_map_style = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    is_dataset = is_map_style or hasattr(kind, "__iter__")
    check(f"datasets[{number}]", kind, "a map-style dataset with a length, or an iterable one", ok=is_dataset)
    return isinstance(dataset, torch.utils.data.IterableDataset) or not is_map_style


def _length(number: int, dataset: Any) -> int:
    length = len(dataset)
    if not length:
        raise ConfigError(f"datasets[{number}]: a {type(dataset).__name__} without samples; leave it out")
    return length
