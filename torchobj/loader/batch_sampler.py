"""A batch sampler that announces its batches, for DataLoaders that other libraries build."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch.utils.data

from torchobj.datasets.wrappers import objects_are_known, prepare_workers
from torchobj.loader.lookahead import Lookahead, check_lookahead
from torchobj.reading import lookahead_warning
from torchobj.warn_once import PROCESS, warn_once

__all__ = ["LookaheadBatchSampler"]


class LookaheadBatchSampler(torch.utils.data.BatchSampler):
    """torch's BatchSampler, drawn ahead so that objects are read before a worker needs them.

    For the `batch_sampler=` argument of torch's DataLoader. If a wrapper uses only some of the batches, as Accelerate
    does with several ranks, too much would be read: use `torchobj.attach` there, which disables the announcements of
    this class, as `torchobj.DataLoader` does. The sampler is drawn ahead of the loop; pass `lookahead=0` for a sampler
    that depends on the progress of the loop.

    Args:
        sampler: Yields indices of the dataset.
        batch_size: Number of indices per batch.
        drop_last: Whether to drop a smaller last batch.
        dataset: The dataset of the loader. None: the sampler's `data_source` or `dataset`, as torch's samplers have. If
            its objects are not known, nothing is read ahead, and a warning is logged once.
        lookahead: Maximum number of batches that are drawn ahead; 0 for none, None for as many as fit the memory
            budget.

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
        #: False if the loader announces.
        self.announces = True

    def __repr__(self) -> str:
        shape = f"batch_size={self.batch_size}, drop_last={self.drop_last}, lookahead={self.lookahead}"
        return f"<{type(self).__name__} of {type(self.sampler).__name__}, {shape}>"

    def __iter__(self) -> Iterator[list[int]]:
        # The warning about `attach` is not needed here.
        lookahead_warning.disable()
        dataset = self._known_dataset() if self.announces and self.lookahead != 0 else None
        if dataset is None:
            return super().__iter__()
        plain = torch.utils.data.BatchSampler(self.sampler, self.batch_size, self.drop_last)
        return iter(Lookahead(plain, dataset, self.lookahead))

    def _known_dataset(self) -> Any:
        """The dataset, if its objects are known, once it is prepared; otherwise None."""
        dataset = _dataset_of(self.sampler) if self.dataset is None else self.dataset
        if dataset is not None and objects_are_known(dataset):
            # This is called before workers are started.
            prepare_workers(dataset)
            return dataset
        _warn_unknown_objects(type(self.sampler).__name__ if dataset is None else type(dataset).__name__)
        return None


def _dataset_of(sampler: Any) -> Any:
    """The dataset that a sampler yields indices of, by its own attributes."""
    source = getattr(sampler, "data_source", None)
    if source is None:
        source = getattr(sampler, "dataset", None)
    # Lightning's DistributedSamplerWrapper treats another sampler as its dataset.
    within = getattr(source, "_sampler", None)
    return source if within is None else _dataset_of(within)


def _warn_unknown_objects(name: str) -> None:
    warn_once(
        PROCESS,
        "LookaheadBatchSampler: nothing is read ahead, because torchobj does not know which objects the samples of %s "
        "consist of. Pass the dataset of the loader: LookaheadBatchSampler(sampler, batch_size, dataset=dataset).",
        name,
    )
