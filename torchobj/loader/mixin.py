"""What makes a DataLoader of torch announce the order of its sampler; mixed into classes by `loader` and `attach`."""

import functools
import logging
from typing import Any

import torch.utils.data
from typing_extensions import TypeVar

from torchobj.datasets import unannounced
from torchobj.datasets.iterable import ObjectIterableDataset
from torchobj.loader.batch_sampler import LookaheadBatchSampler
from torchobj.loader.hints import Hints, hints_of
from torchobj.loader.lookahead import Lookahead

__all__ = ["Batch_co", "LookaheadMixin"]

logger = logging.getLogger("torchobj")

#: What a loader is said to be of, for type checkers: as torch's, whose parameter is that of its dataset.
Batch_co = TypeVar("Batch_co", covariant=True, default=Any)


class LookaheadMixin(torch.utils.data.DataLoader[Batch_co]):
    """To stand before another subclass of torch's DataLoader among the bases of a class.

    It is one itself: an object's class can become only one whose first base has the same layout.
    """

    #: At most so many items ahead. Public: Lightning builds a loader anew from its public attributes.
    lookahead: int | None = None
    _ahead: Lookahead | None = None

    @property
    def _index_sampler(self) -> Any:
        sampler = super()._index_sampler
        if isinstance(self.dataset, torch.utils.data.IterableDataset):
            if isinstance(self.dataset, ObjectIterableDataset) and self.num_workers:
                # Lists before workers are started: they inherit it, and announce for themselves.
                len(self.dataset.manifest)
            return sampler
        if self._ahead is None or self._ahead.sampler is not sampler:
            self._ahead = Lookahead(sampler, self._hints(sampler), self.lookahead)
        return self._ahead

    def _hints(self, sampler: Any) -> Hints | None:
        """What is announced of what a sampler yields; None for nothing, and then it is pulled when torch pulls it."""
        if self.lookahead == 0:
            return None
        hints = hints_of(self.dataset)
        if hints is None:
            _say_unknown(type(self.dataset).__name__)
        else:
            _silence(sampler)
        return hints

    def _get_iterator(self) -> Any:
        # Workers that are started here know that they need not tell of `attach`.
        with unannounced.known(self.num_workers):
            return super()._get_iterator()

    def __getstate__(self) -> dict[str, Any]:
        # Made anew where it is needed; hints may be what cannot be pickled.
        return {name: value for name, value in self.__dict__.items() if name != "_ahead"}


@functools.cache
def _say_unknown(name: str) -> None:
    logger.warning(
        "%s: it is not known which objects its samples are made of, and nothing is read ahead; known are torchobj's "
        "datasets whose __getitem__ is their own, and torch's Subset, ConcatDataset and StackDataset of them: see "
        "torchobj.ObjectDataset; lookahead=0 says that this is meant",
        name,
    )


def _silence(sampler: Any) -> None:
    """Leaves announcing to the loader: what wraps a batch sampler may hand out some of its batches only."""
    while sampler is not None:
        if isinstance(sampler, LookaheadBatchSampler):
            sampler.announces = False
        # Accelerate's BatchSamplerShard and SkipBatchSampler hold theirs by this name.
        sampler = getattr(sampler, "batch_sampler", None)
