"""What iterable datasets share: epochs, the shard of each rank and worker, and the state of a pass."""

import logging
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch.utils.data

from torchobj.config.checks import check
from torchobj.datasets.failures import SKIPPED, FailurePolicy, OnIterableError
from torchobj.datasets.rank_passes import RankPasses
from torchobj.datasets.samples import Sample_co, is_overridden
from torchobj.exceptions import ConfigError
from torchobj.ranks.sample_ranks import SampleRanks, callers
from torchobj.ranks.sharding import Shard
from torchobj.stateful import Position, is_stateful, load_state
from torchobj.workers import process
from torchobj.workers.context import setting
from torchobj.workers.shared_values import SharedEpoch

logger = logging.getLogger("torchobj")


#: The module of torchdata's `StatefulDataLoader`, which may read the samples of a pass again.
_STATEFUL_LOADER = "torchdata.stateful_dataloader.stateful_dataloader"

#: The epoch of passes that are not counted: those of a dataset within a wrapper without a state. On resume the wrapper
#: reads from the start again, in the same order.
UNCOUNTED = -1

_given_epoch: ContextVar[int | None] = ContextVar("_given_epoch", default=None)


def in_epoch(epoch: int) -> AbstractContextManager[None]:
    """Within the block, datasets start passes of this epoch, which the caller counts.

    Args:
        epoch: The epoch; `UNCOUNTED` for the one that was set last.
    """
    return setting(_given_epoch, epoch)


class DatasetPass(Iterator[Any]):
    """A pass over any iterable dataset, which is resumed by its state, by that of its iterator, or by both.

    Args:
        dataset: An iterable dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        #: The iterator of the dataset, once the pass was started.
        self.iterator: Any = None
        #: Whether the iterator has raised `StopIteration`.
        self.ended = False

    @property
    def has_state(self) -> bool:
        """Whether the dataset or its iterator has a state."""
        return is_stateful(self.dataset) or is_stateful(self.iterator)

    def start(self, position: Position | None) -> None:
        """Starts the pass at a position; None: where the dataset is.

        Raises:
            ConfigError: The position contains the state of an object that has none now.
        """
        own = {} if position is None else position
        load_state(self.dataset, own.get("dataset"))
        self.iterator, self.ended = iter(self.dataset), False
        load_state(self.iterator, own.get("iterator"))

    def __next__(self) -> Any:
        try:
            return next(self.iterator)
        except StopIteration:
            self.ended = True
            raise

    def position(self) -> Position:
        """The position after the last sample. The states are those that the objects return, and no copies."""
        dataset, iterator = self.dataset, self.iterator
        own = iterator is not dataset and is_stateful(iterator)
        return {
            "dataset": dataset.state_dict() if is_stateful(dataset) else None,
            "iterator": iterator.state_dict() if own else None,
        }


def has_own_samples(dataset: "PassDataset[Any]") -> bool:
    """Whether a subclass of users yields other samples, or has a length of its own."""
    return isinstance(dataset, Sized) or is_overridden(dataset, "__iter__")


def warn_of_replay(dataset: Any, samples: str) -> None:
    """Logs that samples are read again to resume a pass over a dataset, because their position is not known."""
    name = type(dataset).__name__
    reason = f"{name} has no state_dict and load_state_dict"
    if is_stateful(dataset):
        reason = f"the state of the loader contains no state of {name}"
    logger.warning("%s: %s are read again and dropped", reason, samples)


class PassIterator(Iterator[Any]):
    """The samples of one pass. An exception of a sample does not end the pass.

    Args:
        dataset: The dataset.
        position: Where the pass starts, from `PassDataset._starting_position`. Its `done` counts the items.
        items: What samples are made of.
        sample_of: Returns the sample of an item, or `SKIPPED` for an item without a sample.
        within: Returns the position in `items`, if `done` does not determine it.
    """

    def __init__(
        self,
        dataset: "PassDataset[Any]",
        position: Position,
        items: Iterator[Any],
        sample_of: Callable[[Any], Any],
        within: Callable[[], Position] | None = None,
    ) -> None:
        self._dataset, self._position, self._items, self._sample_of = dataset, position, items, sample_of
        epoch = position["epoch"]
        # Nothing else counts the pass.
        self._counts = _given_epoch.get() is None and not process.in_worker() and epoch == dataset.next_epoch()
        if self._counts:
            dataset.count_pass(epoch)
        dataset._running_position, dataset._position_within = position, within

    def __next__(self) -> Any:
        for item in self._items:
            self._position["done"] += 1
            sample = self._sample_of(item)
            if sample is not SKIPPED:
                return sample
        if self._counts:
            self._dataset.end_pass()
        raise StopIteration

    def close(self) -> None:
        """Ends the pass and drops what was read ahead. The state stays that after the last sample."""
        if self._dataset._running_position is self._position:
            self._dataset._running_position, self._dataset._position_within = self._dataset._latest_position(), None
        self._items, self._sample_of = iter(()), bool


#: The numbers of a state.
_COUNTS = ("seed", "epoch", "done")


def _checked_count(name: str, value: Any) -> int:
    """Returns the int of a number, which may be one of NumPy."""
    number = operator.index(value) if hasattr(value, "__index__") else -1
    check(name, value, "an int, 0 or more, and less than 2^63", ok=0 <= number < 1 << 63)
    return number


class PassDataset(torch.utils.data.IterableDataset[Sample_co]):
    """An iterable dataset whose passes are divided among ranks and workers, and can be resumed.

    Attributes:
        seed, uneven, on_error: As the arguments of the datasets.
    """

    seed: int = 0
    uneven: Any = None
    _failures: FailurePolicy
    #: The choices for `uneven`.
    _policies: tuple[str, ...] = ("drop", "pad")
    #: Who divides the samples.
    _ranks = SampleRanks()

    def _set_up_passes(self, on_error: OnIterableError, ranks: SampleRanks) -> None:
        self._failures, self._ranks = FailurePolicy(on_error), ranks
        self._epoch, self._rank_passes = SharedEpoch(), RankPasses()
        # Number of passes that this worker has begun.
        self._begun = 0
        self._rank: process.Rank | None = None
        # The position of the iterator that was started last in this process, and what returns the part of it that
        # the iterator does not keep there.
        self._running_position: Position | None = None
        self._position_within: Callable[[], Position] | None = None
        # The start of the next iterator, if it is of that epoch.
        self._loaded_position: Position | None = None

    @property
    def on_error(self) -> Any:
        """Action for a sample that fails."""
        return self._failures.on_error

    @on_error.setter
    def on_error(self, on_error: OnIterableError) -> None:
        # A shallow copy of the dataset has the same policy.
        self._failures = self._failures.replaced(on_error)

    @property
    def failed_samples(self) -> int:
        """Number of samples that failed so far, in this process and its DataLoader workers. The datasets of a mixture
        count their own.
        """
        return self._failures.count

    def prepare(self) -> None:
        """Does what workers inherit. Called by a loader before it starts workers."""

    # It has no `__len__`: torch's loader would round up once rather than for each worker, and Trainers would end the
    # epoch there. Accelerate and Trainers would also take the samples of a rank for those of all ranks.

    def lengths(self, epoch: int, workers: int) -> list[int]:
        """Number of samples that each worker of this rank yields in a pass, if none fails; with `on_error="skip"`, an
        upper bound.

        They are counted from what the pass needs before its first sample: a listing, the footers of Parquet files, or
        the index of tar shards with `uneven`, which a process without other ranks reads if it was not read before.

        Args:
            epoch: The epoch of the pass.
            workers: Number of workers; 0: the process of the loop.

        Raises:
            TypeError: The samples are not counted before they are read, their numbers vary from epoch to epoch, or this
                call would wait for another rank or for a pass that is listing.
            ConfigError: There are no objects, or a setting does not fit them.
            ParquetError: A footer is damaged.
            StoreError: The listing, a footer or an index cannot be read.
        """
        self._check()
        if not self._is_countable():
            raise TypeError(
                f"the samples of this {type(self).__name__} are not counted yet: rank 0 lists for all ranks, or a pass "
                "is listing; call dataset.prepare() before, on all ranks"
            )
        shard, processes = self._shard(), max(1, workers)
        is_divided = self._ranks.within_mixture().is_divided
        shards = [shard._replace(worker=worker, workers=processes) for worker in range(processes)]
        return self._lengths(shards if is_divided else [Shard()] * processes, epoch)

    def _lengths(self, shards: Sequence[Shard], epoch: int) -> list[int]:
        """Number of samples of each of these workers in a pass."""
        raise NotImplementedError

    def _is_countable(self) -> bool:
        """Whether `_lengths` waits for no other rank, and repeats no request of a pass."""
        return True

    def _check(self) -> None:
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"seed={self.seed!r}: must be an int, 0 or more")
        if self.uneven not in (None, *self._policies):
            choices = ", ".join(map(repr, self._policies))
            raise ConfigError(f"uneven={self.uneven!r}: must be {choices} or None")
        if self.uneven and not self._ranks.is_divided:
            raise ConfigError(
                f"uneven={self.uneven!r}: needs enable_sharding=True; without it each rank yields all samples"
            )
        self._failures.check_iterable(even=self.uneven is not None)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the following iterations, until it is called again. With shuffling each epoch has its own
        order.

        It also applies to persistent workers. Without a call, the passes that were begun are counted, so that each has
        the next epoch: by a `torchobj.DataLoader` when its first batch is requested, otherwise when iteration starts.
        All ranks must begin the same passes, but need not finish them; call `set_epoch` where they do not, and for a
        dataset within a wrapper of yours, whose passes loaders do not count. A rank that has begun a pass alone is
        warned of, once it shows: except in workers of loaders of other libraries.

        Args:
            epoch: Number of the epoch; 0 or more.

        Raises:
            ConfigError: `epoch` is negative or not an int.
        """
        number = _checked_count("epoch", epoch)
        self._epoch.set(number)
        for name in ("_running_position", "_loaded_position"):
            if (position := getattr(self, name)) is not None and position["epoch"] != number:
                setattr(self, name, None)

    def next_epoch(self) -> int:
        """The epoch of the pass that starts next."""
        return self._epoch.next()

    def count_pass(self, epoch: int) -> None:
        """Counts a pass that a loader has begun with `in_epoch`."""
        if not self._epoch.is_set:
            self._rank_passes.begin(self, epoch)
        self._epoch.begin(epoch)

    def end_pass(self) -> None:
        """Called at the end of a pass that was counted."""
        self._rank_passes.end()

    def state_dict(self) -> dict[str, Any]:
        """The position of the iterator that was started last in this process, for `load_state_dict`.

        In a DataLoader worker it is the position of the worker; torchdata's `StatefulDataLoader` collects and restores
        these. Under torch.distributed it is valid for all ranks that have yielded the same number of samples.
        """
        position = self._loaded_position or self._latest_position()
        return self.epoch_state() if position is None else position | {"epoch_is_set": self._epoch.is_set}

    def epoch_state(self, epoch: int | None = None) -> Position:
        """The position at the start of an epoch; None: of the next one. Its keys are always the same."""
        epoch = self._epoch.next() if epoch is None else epoch
        return {"seed": self.seed, "epoch": epoch, "done": 0, "shape": {}, "epoch_is_set": self._epoch.is_set}

    def _latest_position(self) -> Position | None:
        if self._running_position is None or self._position_within is None:
            return None if self._running_position is None else {**self._running_position}
        return self._running_position | {"position": self._position_within()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration yield the rest of the epoch, each sample once.

        Also sets seed and epoch; later passes are counted from there, unless the epoch of the state had been set. If
        `set_epoch` then sets another epoch, that epoch starts from its beginning.

        Args:
            state: The return value of `state_dict`.

        Raises:
            ConfigError: `state` is not from `state_dict`. When iteration starts: it is of other objects, ranks or
                workers.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(f"state={type(state)}: must be a dict from state_dict")
        seed, epoch, done = (_checked_count(f"{name} of the state", state.get(name)) for name in _COUNTS)
        shape, position = state.get("shape"), state.get("position")
        if not isinstance(shape, Mapping):
            raise ConfigError(f"shape of the state={shape!r}: must be a dict")
        if position is not None and not isinstance(position, Mapping):
            raise ConfigError(f"position of the state={position!r}: must be a dict")
        is_set = state.get("epoch_is_set", False)
        check("epoch_is_set of the state", is_set, "True or False", ok=isinstance(is_set, bool))
        self._loaded_position = {"seed": seed, "epoch": epoch, "done": done, "shape": {**shape}}
        if position is not None:
            self._loaded_position["position"] = {**position}
        self.seed = seed
        if _given_epoch.get() is None:
            self._epoch.set(epoch, is_set=is_set)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if process.is_pickling_for_spawn() and self._ranks.is_divided:
            # In a spawned worker torch.distributed is not initialised, and the loop is not on the stack.
            state["_rank"] = self._ranks.rank(self._rank)
        # The iterator belongs to this process.
        return state | {"_running_position": self._latest_position(), "_position_within": None}

    def _shard(self) -> Shard:
        """The shard of this rank and worker, read now: torch.distributed may have been initialised since."""
        ranks = self._ranks.within_mixture()
        if not ranks.is_divided:
            return Shard()
        info = torch.utils.data.get_worker_info()
        return Shard(*ranks.rank(self._rank), *((0, 1) if info is None else (info.id, info.num_workers)))

    def _pass_epoch(self) -> int:
        """The epoch of a pass that starts now."""
        given, info = _given_epoch.get(), torch.utils.data.get_worker_info()
        if given == UNCOUNTED or (given is None and self._is_within_wrapper()):
            return self._epoch.get()
        if given is not None:
            return given
        if info is None:
            return self._epoch.next()
        self._begun += 1
        # The seed of a pass, to which torch adds the number of the worker; persistent workers keep it.
        return self._epoch.of_pass(hash((info.seed - info.id, self._begun)) or 1, info.num_workers)

    def _is_within_wrapper(self) -> bool:
        """Whether a loader of another library iterates over a dataset that contains this one."""
        if (info := torch.utils.data.get_worker_info()) is not None:
            return info.dataset is not self
        if _STATEFUL_LOADER not in sys.modules:
            return False
        loaders = [frame.f_locals.get("self") for module, frame in callers() if module == _STATEFUL_LOADER]
        return any(getattr(loader, "_dataset", self) is not self for loader in loaders)

    def _warn_of_repeated_samples(self, name: str) -> None:
        """Warns once if each DataLoader worker yields all samples, which is almost always a mistake."""
        worker = torch.utils.data.get_worker_info()
        # A wrapper of the dataset may divide the samples among the workers.
        if worker is None or worker.num_workers == 1 or self._ranks.is_divided or worker.dataset is not self:
            return
        if worker.id == 0 and self._epoch.is_first("repeated"):
            logger.warning(
                "%s: each of %d DataLoader workers yields all samples, so that every sample is returned %d times; pass "
                "enable_sharding=True to divide them among ranks and workers; with rank=0, world_size=1 among the "
                "workers only",
                name,
                worker.num_workers,
                worker.num_workers,
            )

    def _starting_position(self, shape: dict[str, Any], epoch: int) -> Position:
        """The position at which a pass of this shape starts: the loaded one if that is of this epoch.

        If `objects` is None in `shape` or in that of the state, it is not known yet and is not compared.

        Raises:
            ConfigError: The state is of a pass of another shape.
        """
        loaded, self._loaded_position = self._loaded_position, None
        start = {"seed": self.seed, "epoch": epoch, "done": 0, "shape": shape}
        if loaded is None or loaded["epoch"] != epoch:
            return start
        before = loaded["shape"]
        unknown = {"objects": None} if None in (shape.get("objects", 0), before.get("objects", 0)) else {}
        if loaded["done"] and before | unknown != shape | unknown:
            changed = [name for name in shape if before.get(name) != shape[name]] or list(before)
            shown = ", ".join(f"{name}={before.get(name)!r} (now {shape.get(name)!r})" for name in changed)
            raise ConfigError(
                f"state of {shown}: cannot be resumed: samples would be lost or repeated; use the state's values"
            )
        return loaded | start | {"done": loaded["done"]}
