"""torch's DataLoader, with objects read ahead in the order of its sampler."""

import contextlib
import functools
import logging
import multiprocessing
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.context import BaseContext
from typing import Any

import torch.utils.data
from typing_extensions import TypeVar

from torchobj.datasets.base import PerObjectDataset
from torchobj.datasets.passes import PassDataset, has_own_samples
from torchobj.datasets.wrappers import manifest_digest, max_in_flight_of, objects_are_known, prepare_workers, prices_of
from torchobj.decode import libraries
from torchobj.exceptions import ConfigError
from torchobj.loader import whole_pass
from torchobj.loader.batch_sampler import LookaheadBatchSampler
from torchobj.loader.iterable_state import TrackedPass, batches_to_replay, iterable_position, start
from torchobj.loader.iterator import LoaderIterator, LoaderPass
from torchobj.loader.killed_worker import not_waiting_for_killed_workers
from torchobj.loader.lookahead import Lookahead, check_lookahead
from torchobj.loader.measure import page
from torchobj.loader.measure.report import report
from torchobj.loader.measure.stats import Meter
from torchobj.loader.measure.timeline import charts
from torchobj.loader.order.position import between_passes, check, drawing_from_a_copy, in_batches
from torchobj.loader.order.sampler import ElasticDistributedSampler
from torchobj.loader.packed_batch import pack_batches
from torchobj.loader.pass_setup import PassSetup
from torchobj.ranks import broadcast
from torchobj.reading import lookahead_warning
from torchobj.stateful import Position, checked
from torchobj.telemetry.table import LoaderStats
from torchobj.warn_once import PROCESS, warn_once
from torchobj.workers import stop_signals
from torchobj.workers.batch_memory import BatchMemory
from torchobj.workers.memory_budget import prefetcher_is_refused

__all__ = ["AnnouncingLoader", "DataLoader"]

logger = logging.getLogger("torchobj")

#: Type parameter of a loader, for type checkers: that of its dataset, as for torch's.
Batch_co = TypeVar("Batch_co", covariant=True, default=Any)

#: Samplers that do not depend on the progress of the training, and are drawn ahead also without workers.
_DRAWN_AHEAD_BY_DEFAULT = (
    torch.utils.data.SequentialSampler,
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
    torch.utils.data.DistributedSampler,
    ElasticDistributedSampler,
)


class AnnouncingLoader(torch.utils.data.DataLoader[Batch_co]):
    """A DataLoader that announces the order of its sampler: that of torchobj, and those to which `attach` was applied.

    Precedes another subclass of torch's DataLoader in the bases of a class. It is a DataLoader itself, because the
    class of an object can only be replaced by one of the same layout.
    """

    #: Maximum number of items drawn ahead. Public, because Lightning rebuilds loaders from their public attributes.
    lookahead: int | None = None
    _ahead: Lookahead | None = None

    @functools.cached_property
    def _meter(self) -> Meter:
        # Created here for a loader that another library rebuilds from its arguments.
        return Meter()

    @property
    def _index_sampler(self) -> Any:
        sampler = super()._index_sampler
        if isinstance(self.dataset, torch.utils.data.IterableDataset):
            return sampler
        if self._ahead is None or self._ahead.sampler is not sampler:
            indexed = self.dataset if self._announces(sampler) else None
            self._ahead = Lookahead(sampler, indexed, self.lookahead, self._meter.loader)
        return self._ahead

    def _announces(self, sampler: Any) -> bool:
        """Whether the sampler is drawn ahead and its objects are announced."""
        if self.lookahead == 0:
            return False
        if not objects_are_known(self.dataset):
            _warn_unknown_objects(type(self.dataset).__name__)
            return False
        _disable_announcements(sampler)
        return True

    @property
    def _start_method(self) -> str:
        context = self.multiprocessing_context
        return multiprocessing.get_start_method() if context is None else context.get_start_method()

    def _import_decoders(self) -> None:
        before_s = libraries.imports.seconds
        libraries.import_for_workers(self._start_method)
        self._meter.imports_s += libraries.imports.seconds - before_s

    def _time_of_start(self) -> float | None:
        """The time at which the next pass begins to import decoders and start workers. Its requests count from now on.

        None if it starts none: without workers, and if those of the previous pass are persistent.
        """
        self._meter.requests.begin()
        if not self.num_workers or self._iterator is not None:
            return None
        started = time.perf_counter()
        self._import_decoders()
        return started

    def _get_iterator(self) -> Any:
        return self._iterator_of(PassSetup(self))

    def _iterator_of(self, setup: PassSetup) -> Any:
        """Returns torch's iterator of a pass, which is measured."""
        whole_pass.note_pass(self)
        # Without batches the collate function converts each sample, which is not measured.
        if self.batch_sampler is not None:
            setup.collate_fn = self._meter.timed(setup.collate_fn, in_worker=self.num_workers > 0)
        # Workers that are started here do not warn about `attach`.
        with lookahead_warning.disabled_in_workers(self.num_workers):
            if not self.num_workers:
                with self._meter.reading(), setup.applied():
                    return super()._get_iterator()
            prepare_workers(self.dataset)
            # Some libraries get an iterator without `iter`.
            self._import_decoders()
            setup.call_in_workers(self._meter.counted_in_worker(), self._meter.started_in_worker())
            if (outlive := stop_signals.prepare_workers(self._start_method)) is not None:
                setup.call_in_workers(outlive)
            with setup.applied(), stop_signals.blocked():
                return not_waiting_for_killed_workers(super()._get_iterator())

    def stats(self) -> LoaderStats:
        """Statistics since the first batch: rates, waiting times, latencies and failures of requests."""
        return self._meter.stats(self.num_workers)

    def log(self, step: int, *, ranks: bool = False) -> dict[str, float]:
        """Figures since the previous call, for TensorBoard, Weights & Biases and others.

        The share of the time for which the loop waited for data is the sum of the shares of its causes: the store, the
        memory budget, decoding, collation, and startup. `docs/metrics.md` has the names and units.

        Args:
            step: The number of training steps so far.
            ranks: Whether to add the figures of the rank that waits for the largest share of its time, and to name it
                in `report()`. With `torch.distributed`, all ranks must make this call, with the same argument: it is a
                collective of the default process group, and blocks until the last rank has made it.

        Returns:
            Plain numbers by name.

        Example:
            ```python
            for step, batch in enumerate(loader, 1):
                train(batch)
                if step % 100 == 0:
                    wandb.log(loader.log(step), step=step)
            ```
        """
        return self._meter.log(step, self.num_workers, ranks=ranks)

    def report(self, path: str | os.PathLike[str] | None = None) -> str:
        """Short sentences, each on a line: what was done, what limits the loader, and what to change.

        Args:
            path: A local file that receives them with charts of the run, from at most 500 samples: waiting, throughput,
                requests, memory and latency over the time within epochs, from the first batch on. `.html` is a page
                that loads nothing else, `.png` a picture, which needs matplotlib. An existing file is replaced. None:
                no file.

        Raises:
            ConfigError: Another ending, or matplotlib is not installed.
            OSError: The file cannot be written.
        """
        sampler = self._index_sampler
        unread = None
        if prefetcher_is_refused():
            unread = "the system refused the shared memory for it (see the log)"
        elif isinstance(sampler, Lookahead) and sampler.indexed is None:
            unread = self._reason_unread(sampler.sampler)
        text = report(
            self.stats(),
            unread,
            max_in_flight_of(self.dataset),
            self._meter.requests.latest(),
            prices_of(self.dataset),
            start_method=self._start_method,
            persistent_workers=self.persistent_workers,
            slowest=self._meter.slowest,
        )
        if path is not None:
            page.write(path, f"Loader of {type(self.dataset).__name__}", text, charts(self._meter.timeline.samples))
        return text

    def _reason_unread(self, sampler: Any) -> str:
        """The reason why the samples of `sampler` are not read ahead."""
        if self.lookahead == 0:
            return "lookahead=0 is set"
        if not objects_are_known(self.dataset):
            return f"torchobj does not know which objects the samples of {type(self.dataset).__name__} consist of"
        return f"{type(sampler).__name__} may not allow its indices to be drawn ahead"

    def __getstate__(self) -> dict[str, Any]:
        # Created again on demand; its iterators may not be picklable.
        return {name: value for name, value in self.__dict__.items() if name != "_ahead"}


class DataLoader(AnnouncingLoader[Batch_co]):
    """A `torch.utils.data.DataLoader` whose objects are read before a worker needs them.

    Samples and their order are the same as torch's, seed for seed. The sampler is drawn ahead within the memory budget
    (`torchobj.set_memory_budget`). This process reads the objects of its samples for all workers; the workers only
    decode.

    Workers build batches in shared memory, which is reused after all tensors and arrays that view a batch are deleted.
    Keeping one row keeps the tensors of its batch that are larger than 4 KiB: keep `row.clone()`. Batches are writable.
    torch does not know that they are shared: `is_shared()` returns False, and a queue of torch.multiprocessing sends a
    copy.

    Args:
        dataset: A dataset of torchobj, or a `Subset`, `ConcatDataset`, `StackDataset` or `random_split` of one. Other
            datasets work, but nothing is read ahead for them.
        batch_size: Number of samples per batch. None: samples are returned one by one.
        shuffle: Whether to draw a new order for each epoch.
        sampler: Yields the indices of samples; excludes `shuffle`.
        batch_sampler: Yields a list of indices per batch; excludes `batch_size`, `shuffle`, `sampler` and `drop_last`.
        num_workers: Number of worker processes. 0: this process builds the samples.
        collate_fn: Combines a list of samples into a batch. None: torch's `default_collate`, which stacks tensors in
            this shared memory, also if a collate function calls it. Other tensors are copied there;
            `torchobj.collate.empty` saves the copy.
        pin_memory: Whether a thread of this process copies tensors into torch's pinned memory. The shared memory of
            batches is not pinned: torch tracks the streams that read pinned memory only for its own.
        drop_last: Whether to drop a smaller last batch.
        timeout: Seconds to wait for a batch of a worker. 0: no limit.
        worker_init_fn: Called in each worker with its number.
        multiprocessing_context: How workers are started: `fork`, `spawn`, `forkserver`, or a context.
        generator: Random number generator of the order. None: torch's default generator.
        prefetch_factor: Number of batches that each worker prepares in advance; None: 2. The look-ahead does not depend
            on it.
        persistent_workers: Whether to keep the workers between epochs.
        pin_memory_device: As for torch, which ignores it in newer versions.
        in_order: Whether batches are returned in the order of the sampler. False: as soon as they are ready.
        lookahead: Maximum number of batches that are drawn ahead (samples, if `batch_size=None`). 0: the sampler is
            drawn exactly when torch draws it. None: as many as fit the memory budget, but 0 for a sampler that is not
            torch's if there are no workers, because it may depend on the progress of the loop.

    Raises:
        ConfigError: A negative `lookahead`.
        ValueError: As for torch: arguments that exclude each other.

    Example:
        >>> import torchobj
        >>> store = torchobj.Store("memory://loaded")
        >>> for number in range(5):
        ...     _ = store.put(f"{number}", bytes([number]))
        >>> dataset = torchobj.ObjectMapDataset("memory://loaded/", transform=lambda reader: reader.read()[0])
        >>> [batch.tolist() for batch in DataLoader(dataset, batch_size=2)]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(  # noqa: PLR0917  torch's signature
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,  # noqa: FBT001  torch's signature
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,  # noqa: FBT001, FBT002  torch's signature
        drop_last: bool = False,  # noqa: FBT001, FBT002  torch's signature
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: BaseContext | str | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        lookahead: int | None = None,
    ) -> None:
        check_lookahead(lookahead)
        self.lookahead = lookahead
        # The pass that was started last, and that of an iterable dataset, with the positions of its processes.
        self._pass: LoaderPass | None = None
        self._tracked: TrackedPass | None = None
        # The state that was loaded last.
        self._loaded: Position | None = None
        self._meter = Meter()
        # Passed only if given, because older versions of torch do not have it.
        newer: dict[str, Any] = {} if in_order else {"in_order": in_order}
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **newer,
        )

    def __repr__(self) -> str:
        # The repr of other datasets may be as long as their contents.
        dataset = repr(self.dataset) if isinstance(self.dataset, PerObjectDataset) else type(self.dataset).__name__
        shape = f"batch_size={self.batch_size}, num_workers={self.num_workers}, lookahead={self.lookahead}"
        batches = 0 if self._pass is None else self._pass.batches
        return f"<{type(self).__name__} of {dataset}, {shape}, {batches} batches returned>"

    def __len__(self) -> int:
        """Number of batches of a whole pass: for an iterable dataset of torchobj, of this rank, with the smaller last
        batch of each worker, in the pass that has started and not ended, otherwise in the next one.

        Raises:
            TypeError: The samples of the dataset are not counted before they are read, or their number varies from
                epoch to epoch; the ranks of a job have not listed them yet; a subclass has its own `__iter__`.
            ConfigError: There are no objects, or a setting does not fit them.
            ParquetError: A footer that is read to count is damaged.
            StoreError: What is read to count cannot be read.
        """
        dataset = self.dataset
        if not isinstance(dataset, PassDataset) or has_own_samples(dataset):
            # torch warns of an iterable dataset that yields more than it says, also of batches that are skipped.
            return super().__len__()
        running = None if self._pass is None or self._pass.ended or self._tracked is None else self._tracked.epoch
        lengths = dataset.lengths(dataset.next_epoch() if running is None else running.get(), self.num_workers)
        if self.batch_size is None:
            return sum(lengths)
        return sum(
            (samples if self.drop_last else samples + self.batch_size - 1) // self.batch_size for samples in lengths
        )

    def _announces(self, sampler: Any) -> bool:
        if self.lookahead is None and self.num_workers == 0 and not _is_drawn_ahead_by_default(sampler):
            return False
        return super()._announces(sampler)

    def __iter__(self) -> LoaderIterator:  # type: ignore[override]  # torch's iterator, within
        broadcast.confirm()
        loaded = self._pending()
        sampler = self._index_sampler
        replayed = 0
        if isinstance(sampler, Lookahead):
            current = LoaderPass(between_passes(sampler.sampler) if loaded is None else loaded)
            sampler.loader_pass = current
        else:
            current = LoaderPass(between_passes(None) if loaded is None else loaded)
            self._begin_iterable(loaded)
            replayed = batches_to_replay(self.dataset, loaded)
        started = self._time_of_start()
        # torch draws a number when it creates an iterator. For this pass it did so before the state was saved, or it
        # would not have: persistent workers keep their iterator.
        has_drawn = loaded is not None and (loaded["within_epoch"] or _workers_stay(loaded))
        with drawing_from_a_copy(self) if has_drawn else contextlib.nullcontext():
            found = super().__iter__()
        self._pass = current
        return LoaderIterator(found, self, current, started=started, tracked=self._tracked, replayed=replayed)

    def _begin_iterable(self, loaded: Position | None) -> None:
        if isinstance(self.dataset, torch.utils.data.IterDataPipe):
            # torch's iterator checks for this type.
            return
        if loaded is not None:
            # Persistent workers have their dataset already: a loaded state needs new workers.
            self._iterator = None
        if self._tracked is not None and self.persistent_workers and self._iterator is not None:
            self._tracked.restart()
        else:
            self._tracked = TrackedPass(self, loaded)

    def _get_iterator(self) -> Any:
        setup = PassSetup(self)
        if self._tracked is not None:
            self._tracked.track(setup)
        memory = BatchMemory.start() if self.num_workers else None
        if memory is not None:
            pack_batches(setup, memory)
        iterator = self._iterator_of(setup)
        if memory is not None:
            weakref.finalize(iterator, memory.reclaim, iterator._workers).atexit = False
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop: after the last batch that was returned, regardless of what was read ahead.

        Before the first epoch, and after the loop has seen the end of an epoch, it is the start of the next epoch. The
        state contains torch's order, and no random numbers of workers. With `in_order=False` and several workers, the
        state counts the returned batches, which may not be the first ones: a resumed epoch of a map-style dataset loses
        and repeats samples, which is logged.

        Returns:
            A picklable dict of plain values and bytes.

        Raises:
            TorchobjError: The `state_dict` of the sampler or dataset raised at this position, or returned what cannot
                be copied or pickled.
        """
        loaded = self._pending()
        stay = self._iterator is not None if loaded is None else _workers_stay(loaded)
        # Negative if the next pass has the persistent workers of this one. Not a key of its own: those of a sharded
        # checkpoint do not change.
        state = self._position() | {"num_workers": -self.num_workers if stay else self.num_workers}
        checked(state["sampler"])
        if self._is_inexact(state):
            _warn_inexact("saved")
        digest = manifest_digest(self.dataset)
        # Otherwise absent, because a sharded checkpoint must have the keys of the state that it is loaded into.
        return state if digest is None else state | {"manifest": digest}

    def _is_inexact(self, state: Mapping[str, Any]) -> bool:
        """Whether the batches before a state may not be those that were returned."""
        # What workers return of an iterable dataset is in order for each of them, and so are their states.
        is_exact = isinstance(self.dataset, torch.utils.data.IterableDataset) and state["sampler"] is not None
        is_in_order = self.num_workers < 2 or getattr(self, "in_order", True)
        return bool(state["within_epoch"] and state["batches"] and not is_in_order and not is_exact)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has returned no batch; a loaded state still applies.
        return super().__getstate__() | {"_pass": None, "_tracked": None}

    def _pending(self) -> Position | None:
        """The loaded state until a pass has started with it: some loops create an iterator that they never use."""
        if self._pass is not None and self._pass.requested:
            self._loaded = None
        return self._loaded

    def _position(self) -> Position:
        if (loaded := self._pending()) is not None:
            return loaded
        current = None if self._pass is None or self._pass.ended else self._pass
        if isinstance(sampler := self._index_sampler, Lookahead):
            return between_passes(sampler.sampler) if current is None else current.position()
        batches = 0 if current is None else current.batches
        position = between_passes(None) | {"within_epoch": batches > 0, "batches": batches}
        return position | iterable_position(self, self._tracked, within_epoch=batches > 0)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next iterator continue after the position of `state_dict`.

        The number of workers may change, except for iterable datasets.

        The samples of this and of the following epochs are those of a run that was not interrupted, provided that the
        random numbers are the same: save and restore torch's default generator too. With an
        `ElasticDistributedSampler` the number of ranks and the batch size may change; the state of any rank is valid
        for all. A sampler with its own `state_dict` and `load_state_dict` is restored by them. Any other order is drawn
        again, and the samples that were already returned are skipped without being read.

        An iterable dataset with `state_dict` and `load_state_dict`, as torchobj's have, or with such an iterator, is
        restored by them. Each worker gets its own state, therefore the number of workers and the batch size must not
        change. For other iterable datasets, the batches that were already returned are read again and dropped.

        Raises:
            ConfigError: It is not a state, or of another sampler or manifest; names the field. At the first batch: the
                dataset or sampler ends before the saved position.
        """
        check(state_dict)
        if self._is_inexact(state_dict):
            _warn_inexact("loaded")
        _check_manifest(state_dict.get("manifest"), self.dataset)
        sampler = self._index_sampler
        state = dict(state_dict)
        if isinstance(sampler, Lookahead):
            sampler.start(state)
        else:
            start(self, state)
        self._loaded, self._pass = state, None


def _workers_stay(state: Mapping[str, Any]) -> bool:
    return int(state.get("num_workers") or 0) < 0


def _check_manifest(saved: object, dataset: Any) -> None:
    """Checks that a dataset has the manifest of a state; other states have None."""
    if saved is not None and saved != (now := manifest_digest(dataset)):
        raise ConfigError(
            f"manifest={saved!r}: digest in the state; that of the dataset now is {now!r}, so that samples would be "
            "lost or repeated: resume with the manifest that the state was saved with"
        )


def _is_drawn_ahead_by_default(sampler: Any) -> bool:
    inner = in_batches(sampler)
    return type(inner) in _DRAWN_AHEAD_BY_DEFAULT if inner is sampler else _is_drawn_ahead_by_default(inner)


def _warn_inexact(how: str) -> None:
    warn_once(
        PROCESS,
        "in_order=False: a state of the middle of an epoch was %s; it counts the batches that were returned, which are "
        "not always the first ones, so that the resumed epoch loses some samples and repeats others; pass "
        "in_order=True, or save between epochs",
        how,
    )


def _warn_unknown_objects(name: str) -> None:
    warn_once(
        PROCESS,
        "%s: nothing is read ahead, because torchobj does not know which objects its samples consist of. Use a dataset "
        "of torchobj that does not override __getitem__, torch's Subset, ConcatDataset or StackDataset of one, or a "
        "subclass of torchobj.ObjectDataset. Pass lookahead=0 to silence this warning.",
        name,
    )


def _disable_announcements(sampler: Any) -> None:
    """Leaves announcing to the loader, because a wrapper of a batch sampler may use only some of its batches."""
    while sampler is not None:
        if isinstance(sampler, LookaheadBatchSampler):
            sampler.announces = False
        # Accelerate's BatchSamplerShard and SkipBatchSampler hold theirs by this name.
        sampler = getattr(sampler, "batch_sampler", None)
