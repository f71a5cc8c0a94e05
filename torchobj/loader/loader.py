"""torch's DataLoader, with objects read ahead in the order of its sampler."""

import contextlib
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.utils.data
from torch.utils.data import default_collate

from torchobj.datasets import source
from torchobj.loader.batches import Batches, Progress, samples_in
from torchobj.loader.hints import Hints, failed_samples, hints_of, max_in_flight_of
from torchobj.loader.iterables import IterablePass, place_of, replayed, resume
from torchobj.loader.lookahead import Lookahead, check_lookahead
from torchobj.loader.mixin import Batch_co, LookaheadMixin
from torchobj.loader.nested import in_batches
from torchobj.loader.report import report
from torchobj.loader.sampler import ElasticDistributedSampler
from torchobj.loader.state import between, check, generator_of, state_of, undrawn, upgraded
from torchobj.loader.stats import LoaderStats, Meter

__all__ = ["DataLoader"]

#: Samplers that read nothing of the training's state, and may be pulled at any time.
_KNOWN = (
    torch.utils.data.SequentialSampler,
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
    torch.utils.data.DistributedSampler,
    ElasticDistributedSampler,
)


class DataLoader(LookaheadMixin[Batch_co]):
    """A `torch.utils.data.DataLoader` whose objects are read before a worker needs them.

    Samples and their order are those of torch's, seed for seed. The sampler is pulled ahead, as far as the budget of
    memory goes (`torchobj.set_budget`), and this process reads what it yields, for all workers; they only decode.

    Args:
        dataset: One of torchobj, or `Subset`, `ConcatDataset`, `StackDataset` and `random_split` of such. Of any other
            dataset nothing is known, and nothing is read ahead.
        args: As torch's.
        lookahead: At most so many batches are pulled ahead (samples, with `batch_size=None`); 0 pulls from the sampler
            exactly when torch does. None: as many as the budget holds; but 0 for a sampler that is not torch's where
            there are no workers, since it may look at what the loop does.
        kwargs: As torch's.

    Raises:
        ConfigError: A negative `lookahead`.
    """

    def __init__(self, dataset: Any, *args: Any, lookahead: int | None = None, **kwargs: Any) -> None:
        check_lookahead(lookahead)
        self.lookahead = lookahead
        # Of the pass that was begun last.
        self._progress: Progress | None = None
        # Of an iterable dataset.
        self._iterable: IterablePass | None = None
        # What was loaded last.
        self._loaded: dict[str, Any] | None = None
        self._meter = Meter()
        super().__init__(dataset, *args, **kwargs)

    def _hints(self, sampler: Any) -> Hints | None:
        if self.lookahead is None and self.num_workers == 0 and not _known(sampler):
            return None
        return super()._hints(sampler)

    def __iter__(self) -> Batches:  # type: ignore[override]  # torch's iterator, within
        loaded = self._pending()
        within = loaded is not None and loaded["within_epoch"]
        sampler = self._index_sampler
        inner = sampler.sampler if isinstance(sampler, Lookahead) else None
        progress = Progress(between(inner) if loaded is None else loaded)
        progress.batches = loaded["batches"] if loaded is not None else 0
        if isinstance(sampler, Lookahead):
            sampler.progress = progress
        else:
            self._begin_iterable(loaded)
        self._meter.begin()
        # Workers that stay from the pass before are there already.
        started = time.perf_counter() if self.num_workers and self._iterator is None else None
        # torch draws a number when it makes an iterator. For this pass it did so before the state was saved.
        apart = within and (self.generator is None or self.generator is not generator_of(inner))
        with contextlib.ExitStack() as stack:
            if apart:
                stack.enter_context(undrawn(self.generator))
                if self._iterable is not None and not self.num_workers:
                    # A state of the dataset may set the generator, and torch has drawn when the dataset begins.
                    self._iterable.tracked.before_begin = stack.close
            found = super().__iter__()
        self._progress = progress
        return Batches(
            found,
            progress,
            self._meter,
            samples_in=partial(
                samples_in, batch_size=self.batch_size, collated_by_default=self.collate_fn is default_collate
            ),
            started=started,
            iterable=self._iterable,
            replayed=0 if inner is not None else replayed(self.dataset, loaded),
        )

    def _begin_iterable(self, loaded: dict[str, Any] | None) -> None:
        if isinstance(self.dataset, torch.utils.data.IterDataPipe):
            # torch's iterator looks for it.
            return
        if loaded is not None:
            # Workers that stay have their dataset already: what was loaded goes to new ones.
            self._iterator = None
        stays = self.persistent_workers and self._iterator is not None
        self._iterable = IterablePass.begin(self, loaded, self._iterable if stays else None)

    def _get_iterator(self) -> Any:
        if self._iterable is None:
            return super()._get_iterator()
        return super(DataLoader, self._iterable.loader_of(self))._get_iterator()

    def stats(self) -> LoaderStats:
        """What was done since the first batch: rates, the share of time that the loop waited, what reading met."""
        return self._meter.stats(self.num_workers, failed_samples(self.dataset))

    def report(self) -> str:
        """One paragraph: what was done, what held it back, and what to change."""
        sampler = self._index_sampler
        unread = None
        if source.is_refused():
            unread = "the system refused the shared memory for it (see the log)"
        elif isinstance(sampler, Lookahead) and sampler.hints is None:
            unread = self._why_unread(sampler.sampler)
        return report(self.stats(), unread, max_in_flight_of(self.dataset))

    def _why_unread(self, sampler: Any) -> str:
        """Why nothing of what `sampler` yields is read ahead."""
        if self.lookahead == 0:
            return "lookahead=0 was said"
        if hints_of(self.dataset) is None:
            return f"of {type(self.dataset).__name__} it is not known what its samples are made of"
        return f"of {type(sampler).__name__} it is not known whether it may be pulled ahead"

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: behind the last batch that it was given, whatever was read or sent to workers ahead.

        At the end of an epoch, when the loop has seen it, and before the first: where the next epoch begins. The state
        is that of torch's order and holds nothing of the workers' random numbers. `in_order=False` hands out batches in
        an order that no state knows; what was handed out is counted then.

        Returns:
            A dict of plain values and tensors of a generator's state, to be pickled.
        """
        return self._place() | {"num_workers": self.num_workers}

    def __getstate__(self) -> dict[str, Any]:
        # A copy has handed out nothing; what was loaded is still to come.
        return super().__getstate__() | {"_progress": None, "_iterable": None, "_meter": Meter()}

    def _pending(self) -> dict[str, Any] | None:
        """What was loaded, until a pass has begun with it: some loops make an iterator that they never use."""
        if self._progress is not None and self._progress.asked:
            self._loaded = None
        return self._loaded

    def _place(self) -> dict[str, Any]:
        if (loaded := self._pending()) is not None:
            return loaded
        progress, sampler = self._progress, self._index_sampler
        if not isinstance(sampler, Lookahead):
            within = progress is not None and not progress.ended and progress.batches > 0
            place = between(None) | {"within_epoch": within, "batches": progress.batches if progress and within else 0}
            return place | place_of(self, self._iterable, within_epoch=within)
        if progress is None or progress.ended:
            return between(sampler.sampler)
        return progress.initial if progress.mark is None else state_of(progress.mark, sampler.sampler)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next iterator goes on where `state_dict` stood, with whatever number of workers.

        Samples, those of the epochs behind too, are those of a run that was not interrupted, if it has the same random
        numbers to draw from: torch's default ones are the training's to save. With an `ElasticDistributedSampler` the
        number of ranks and the batch size may be others: the state of any one rank is that of all. A sampler with
        `state_dict` and `load_state_dict` of its own is asked for its state. The order of any other is drawn again, and
        what was handed out is passed over, unread.

        An iterable dataset with `state_dict` and `load_state_dict`, as torchobj's have, or whose iterator has them,
        goes on by its own state: with workers each by that of the same worker, so their number and the batch size must
        be those of then. Of any other dataset the batches that were handed out are read again and dropped.

        Raises:
            ConfigError: The state is none, or of another sampler; names the field. By the first batch: the dataset or
                sampler ends before the place of the state.
        """
        check(state_dict)
        sampler = self._index_sampler
        if isinstance(sampler, Lookahead):
            state = upgraded(state_dict, sampler.sampler)
            sampler.resume(state)
        else:
            state = resume(self, upgraded(state_dict, None))
        self._loaded, self._progress = state, None


def _known(sampler: Any) -> bool:
    inner = in_batches(sampler)
    return type(inner) in _KNOWN if inner is sampler else _known(inner)
