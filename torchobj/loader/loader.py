"""torch's DataLoader, with objects read ahead in the order of its sampler."""

from typing import Any

import torch.utils.data

from torchobj.exceptions import ConfigError
from torchobj.loader.hints import Hints
from torchobj.loader.mixin import LookaheadMixin

__all__ = ["DataLoader"]

#: Samplers that read nothing of the training's state, and may be pulled at any time.
_KNOWN = (
    torch.utils.data.SequentialSampler,
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
    torch.utils.data.DistributedSampler,
)


class DataLoader(LookaheadMixin):
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
        self.lookahead = lookahead
        super().__init__(dataset, *args, **kwargs)

    def _hints(self, sampler: Any) -> Hints | None:
        if self.lookahead is None and self.num_workers == 0 and not _known(sampler):
            return None
        return super()._hints(sampler)


def _known(sampler: Any) -> bool:
    if type(sampler) is torch.utils.data.BatchSampler:
        return _known(sampler.sampler)
    return type(sampler) in _KNOWN
