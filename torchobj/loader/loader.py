"""torch's DataLoader, with objects read ahead in the order of its sampler."""

from typing import Any

import torch.utils.data

from torchobj.datasets.iterable import ObjectIterableDataset
from torchobj.exceptions import ConfigError
from torchobj.loader.hints import hints_of
from torchobj.loader.lookahead import Lookahead

__all__ = ["DataLoader"]

#: Samplers that read nothing of the training's state, and may be pulled at any time.
_KNOWN = (
    torch.utils.data.SequentialSampler,
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
    torch.utils.data.DistributedSampler,
)


class DataLoader(torch.utils.data.DataLoader[Any]):
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
        if lookahead is not None and lookahead < 0:
            raise ConfigError(f"lookahead={lookahead!r}: must be 0 or more, or None")
        self._lookahead = lookahead
        self._ahead: Lookahead | None = None
        super().__init__(dataset, *args, **kwargs)

    @property
    def _index_sampler(self) -> Any:
        sampler = super()._index_sampler
        if isinstance(self.dataset, ObjectIterableDataset) and self.num_workers:
            # Lists what is not listed yet, before workers are started: they inherit it, and announce for themselves.
            self.dataset.manifest  # noqa: B018
        if self._lookahead == 0 or isinstance(self.dataset, torch.utils.data.IterableDataset):
            return sampler
        if self._lookahead is None and self.num_workers == 0 and not _known(sampler):
            return sampler
        if self._ahead is None or self._ahead.sampler is not sampler:
            hints = hints_of(self.dataset)
            if hints is None:
                return sampler
            self._ahead = Lookahead(sampler, hints, self._lookahead)
        return self._ahead


def _known(sampler: Any) -> bool:
    if type(sampler) is torch.utils.data.BatchSampler:
        return _known(sampler.sampler)
    return type(sampler) in _KNOWN
