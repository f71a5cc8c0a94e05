"""A batch sampler that announces its batches, for a DataLoader that somebody else builds. Knows nothing of loaders."""

import functools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch.utils.data

from torchobj.datasets import unannounced
from torchobj.loader.hints import Hints, hints_of
from torchobj.loader.lookahead import Lookahead, check_lookahead

__all__ = ["LookaheadBatchSampler"]

logger = logging.getLogger("torchobj")


class LookaheadBatchSampler(torch.utils.data.BatchSampler):
    """torch's BatchSampler, whose batches are pulled ahead, and their objects read before a worker needs them.

    For `batch_sampler=` of torch's DataLoader. What hands out a part of its batches only, as Accelerate does where
    there are several ranks, would have too much read: there use `torchobj.attach`, which silences this. Under
    `torchobj.DataLoader` it is silent too. The sampler is pulled ahead of the loop: one that looks at what the loop
    does wants `lookahead=0`.

    Args:
        sampler: Yields indices of the dataset.
        batch_size: Indices of a batch.
        drop_last: Leaves out a last batch that is smaller.
        dataset: What the loader reads. None: what the sampler says that it is for (`data_source` or `dataset`, as
            torch's samplers do). Where nothing is known of it nothing is read ahead, which is logged once.
        lookahead: At most so many batches are pulled ahead; 0 for none, None for as many as the budget holds.

    Raises:
        ConfigError: A negative `lookahead`.

    Example:
        >>> import torch, torchobj
        >>> store = torchobj.Store("memory://announced")
        >>> for number in range(5):
        ...     _ = store.put(f"{number}", bytes([number]))
        >>> dataset = torchobj.ObjectMapDataset("memory://announced/", transform=lambda reader: reader.read()[0])
        >>> batches = LookaheadBatchSampler(torch.utils.data.SequentialSampler(dataset), batch_size=2)
        >>> [batch.tolist() for batch in torch.utils.data.DataLoader(dataset, batch_sampler=batches)]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        sampler: Iterable[int],
        batch_size: int,
        drop_last: bool = False,  # noqa: FBT001, FBT002  as torch's
        *,
        dataset: Any = None,
        lookahead: int | None = None,
    ) -> None:
        check_lookahead(lookahead)
        super().__init__(sampler, batch_size, drop_last)
        self.dataset, self.lookahead = dataset, lookahead
        #: False where the loader announces.
        self.announces = True

    def __iter__(self) -> Iterator[list[int]]:
        # Who uses this needs not be told of `attach`.
        unannounced.know()
        hints = self._hints() if self.announces and self.lookahead != 0 else None
        if hints is None:
            return super().__iter__()
        plain = torch.utils.data.BatchSampler(self.sampler, self.batch_size, self.drop_last)
        return iter(Lookahead(plain, hints, self.lookahead))

    def _hints(self) -> Hints | None:
        dataset = _dataset_of(self.sampler) if self.dataset is None else self.dataset
        hints = None if dataset is None else hints_of(dataset)
        if hints is None:
            _say_unknown(type(self.sampler).__name__ if dataset is None else type(dataset).__name__)
        return hints


def _dataset_of(sampler: Any) -> Any:
    """What a sampler says that it yields indices of."""
    source = getattr(sampler, "data_source", None)
    if source is None:
        source = getattr(sampler, "dataset", None)
    # Lightning's DistributedSamplerWrapper shares out what another sampler yields, as if that were a dataset.
    within = getattr(source, "_sampler", None)
    return source if within is None else _dataset_of(within)


@functools.cache
def _say_unknown(name: str) -> None:
    logger.warning(
        "LookaheadBatchSampler: nothing is read ahead, since of %s it is not known which objects the samples are made "
        "of; give it the loader's dataset: LookaheadBatchSampler(sampler, batch_size, dataset=dataset)",
        name,
    )
