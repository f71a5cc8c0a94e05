"""A mixin that makes torch's DataLoader announce the order of its sampler; used by `loader` and `attach`."""

import functools
import logging
import multiprocessing
import time
from typing import Any

import torch.utils.data
from typing_extensions import TypeVar

from torchobj.datasets import lookahead_warning, prefetch_source
from torchobj.datasets.decoders import import_decoders
from torchobj.datasets.ordered_samples import prepare_workers
from torchobj.loader.batch_sampler import LookaheadBatchSampler
from torchobj.loader.lookahead import Lookahead
from torchobj.loader.report import report
from torchobj.loader.sample_objects import ObjectFinder, max_in_flight_of, object_finder
from torchobj.loader.stats import LoaderStats, Meter

__all__ = ["Batch_co", "LookaheadMixin"]

logger = logging.getLogger("torchobj")

#: Type parameter of a loader, for type checkers: that of its dataset, as for torch's.
Batch_co = TypeVar("Batch_co", covariant=True, default=Any)


class LookaheadMixin(torch.utils.data.DataLoader[Batch_co]):
    """Precedes another subclass of torch's DataLoader in the bases of a class.

    It is a DataLoader itself, because the class of an object can only be replaced by one of the same layout.
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
            self._ahead = Lookahead(sampler, self._find_objects(sampler), self.lookahead, self._meter.loader)
        return self._ahead

    def _find_objects(self, sampler: Any) -> ObjectFinder | None:
        """The function that finds the objects to announce; None if nothing is announced and the sampler is not drawn
        ahead.
        """
        if self.lookahead == 0:
            return None
        find_objects = object_finder(self.dataset)
        if find_objects is None:
            _warn_unknown_objects(type(self.dataset).__name__)
        else:
            _disable_announcements(sampler)
        return find_objects

    @property
    def _start_method(self) -> str:
        context = self.multiprocessing_context
        return multiprocessing.get_start_method() if context is None else context.get_start_method()

    def _import_decoders(self) -> None:
        import_decoders([self.dataset, self.collate_fn], self._start_method)

    def _time_of_start(self) -> float | None:
        """The time at which the next pass begins to start workers, after the imports of decoders, which are made once.

        None if it starts none: without workers, and if those of the previous pass are persistent.
        """
        if not self.num_workers or self._iterator is not None:
            return None
        self._import_decoders()
        return time.perf_counter()

    def _get_iterator(self) -> Any:
        # Workers that are started here do not warn about `attach`.
        with lookahead_warning.disabled_in_workers(self.num_workers):
            if not self.num_workers:
                with self._meter.reading():
                    return super()._get_iterator()
            prepare_workers(self.dataset)
            # Some libraries get an iterator without `iter`.
            self._import_decoders()
            init_fn = self.worker_init_fn
            self.worker_init_fn = self._meter.counted_in_worker(init_fn)
            try:
                return super()._get_iterator()
            finally:
                self.worker_init_fn = init_fn

    def stats(self) -> LoaderStats:
        """Statistics since the first batch: rates, waiting times, latencies and failures of requests."""
        return self._meter.stats(self.num_workers)

    def report(self) -> str:
        """One paragraph: what was done, what limits the loader, and what to change."""
        sampler = self._index_sampler
        unread = None
        if prefetch_source.is_refused():
            unread = "the system refused the shared memory for it (see the log)"
        elif isinstance(sampler, Lookahead) and sampler.find_objects is None:
            unread = self._reason_unread(sampler.sampler)
        return report(
            self.stats(),
            unread,
            max_in_flight_of(self.dataset),
            start_method=self._start_method,
            persistent_workers=self.persistent_workers,
        )

    def _reason_unread(self, sampler: Any) -> str:
        """The reason why the samples of `sampler` are not read ahead."""
        if self.lookahead == 0:
            return "lookahead=0 is set"
        if object_finder(self.dataset) is None:
            return f"torchobj does not know which objects the samples of {type(self.dataset).__name__} consist of"
        return f"{type(sampler).__name__} may not allow its indices to be drawn ahead"

    def __getstate__(self) -> dict[str, Any]:
        # Created again on demand; `find_objects` may not be picklable.
        return {name: value for name, value in self.__dict__.items() if name != "_ahead"}


@functools.cache
def _warn_unknown_objects(name: str) -> None:
    logger.warning(
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
