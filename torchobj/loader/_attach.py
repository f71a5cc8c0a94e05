"""Look-ahead for DataLoaders that other libraries build."""

import functools
from collections import deque
from typing import Any, TypeVar

import torch.utils.data

from torchobj.datasets.wrappers import objects_are_known
from torchobj.exceptions import ConfigError
from torchobj.loader.iterator import MeteredIterator
from torchobj.loader.loader import AnnouncingLoader
from torchobj.loader.lookahead import check_lookahead
from torchobj.warn_once import PROCESS, warn_once
from torchobj.workers import process

__all__ = ["attach"]

_Loader = TypeVar("_Loader")


def attach(loader: _Loader, *, lookahead: int | None = None) -> _Loader:
    """Makes a DataLoader announce the order of its samples, so that objects are read before a worker needs them.

    For loaders that are not a `torchobj.DataLoader`: torch's, torchdata's `StatefulDataLoader`, and the loader that
    Accelerate's `prepare` returns, whose ranks announce only their own batches. Samples, their order and the loader's
    state do not change. It applies to passes that start after the call; a `StatefulDataLoader` starts its first pass
    when its state is requested, which Accelerate's `prepare` does. Attaching again has no effect. The loader then has
    `stats()` and `report()` of a `torchobj.DataLoader`.

    Accelerate writes local files only: `accelerator.save_state("s3://bucket/run")`, or such a `project_dir`, makes a
    folder `s3:` on this machine. Save to a local folder and call `torchobj.files.upload(folder, url)`, or save with
    `torchobj.checkpoint.CheckpointManager`. Rank 0 logs this once where the loader is one of Accelerate.

    Args:
        loader: Modified in place: its class is replaced by a subclass.
        lookahead: As for `torchobj.DataLoader`, except that None draws any sampler ahead, also without workers.

    Returns:
        The loader.

    Raises:
        TypeError: `loader` is not a DataLoader of torch, and does not contain one.
        ConfigError: The objects of the samples of its dataset are not known, or `lookahead` is negative.

    Example:
        >>> import torch, torchobj
        >>> store = torchobj.Store("memory://attached")
        >>> for number in range(5):
        ...     _ = store.put(f"{number}", bytes([number]))
        >>> dataset = torchobj.ObjectMapDataset("memory://attached/", transform=lambda reader: reader.read()[0])
        >>> loader = attach(torch.utils.data.DataLoader(dataset, batch_size=2))
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """
    attach_torch_loader(loader, lookahead)
    if torch_loader_of(loader) is not loader and process.rank(None).number == 0:
        _warn_of_local_folders()
    return loader


def _warn_of_local_folders() -> None:
    warn_once(
        PROCESS,
        'attach: Accelerate writes local files only: accelerator.save_state("s3://bucket/run"), or such a project_dir, '
        "makes a folder s3: on this machine; save to a local folder and call torchobj.files.upload(folder, url), or "
        "save with torchobj.checkpoint.CheckpointManager",
    )


def attach_torch_loader(loader: Any, lookahead: int | None = None) -> None:
    """As `attach`, for any program."""
    check_lookahead(lookahead)
    within = torch_loader_of(loader)
    if isinstance(within, AnnouncingLoader):
        return
    if not objects_are_known(within.dataset):
        raise ConfigError(
            f"attach: torchobj does not know which objects the samples of {type(within.dataset).__name__} consist of; "
            "use a dataset of torchobj with a length, or torch's Subset, ConcatDataset or StackDataset of one"
        )
    kind: Any = type(within)
    within.__class__ = _attached(kind)
    within.lookahead = lookahead
    if within._iterator is not None:
        # Kept for persistent workers: its next epoch uses this sampler.
        within._iterator._index_sampler = within._index_sampler


def torch_loader_of(loader: Any) -> Any:
    """The DataLoader of torch that a loader is or contains.

    Raises:
        TypeError: There is none.
    """
    found = loader
    # Accelerate's loaders override __class__ with that of the loader they contain; type() does not.
    while not issubclass(type(found), torch.utils.data.DataLoader):
        found = getattr(found, "base_dataloader", None)
        if found is None:
            raise TypeError(f"attach: {type(loader).__name__} is not a DataLoader of torch, and has no base_dataloader")
    return found


class _AttachedMixin(AnnouncingLoader[Any]):
    """Counts the batches of a loader that another library built."""

    @property
    def _index_sampler(self) -> Any:
        sampler = super()._index_sampler
        if sampler.requested is None and self.batch_sampler is not None:
            sampler.requested = deque()
        return sampler

    def __iter__(self) -> Any:
        started = self._time_of_start()
        # Created before torch's iterator, which may be of a copy of the loader.
        _ = self._meter
        return _AttachedIterator(super().__iter__(), self, started=started)


class _AttachedIterator(MeteredIterator):
    """The batches of one pass, each with as many samples as the sampler yielded indices for it."""

    def __init__(self, inner: Any, loader: Any, *, started: float | None) -> None:
        super().__init__(inner, loader, started=started)
        self._sampler = loader._index_sampler

    def _next(self) -> Any:
        try:
            return super()._next()
        except StopIteration:
            raise
        except Exception:
            self._requested_samples()
            raise

    def _count(self, batch: Any) -> int:
        samples = self._requested_samples()
        return super()._count(batch) if samples is None else samples

    def _requested_samples(self) -> int | None:
        """The number of indices of the batch that arrived; None if it was requested before the loader was attached."""
        requested = self._sampler.requested
        return requested.popleft() if requested else None


@functools.cache
def _attached(kind: Any) -> type:
    def reduce(self: AnnouncingLoader) -> tuple[Any, ...]:
        return _restored, (kind,), self.__getstate__()

    return type(kind.__name__, (_AttachedMixin, kind), {"__reduce__": reduce, "__module__": kind.__module__})


def _restored(kind: Any) -> Any:
    return object.__new__(_attached(kind))
