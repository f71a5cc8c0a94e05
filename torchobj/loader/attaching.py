"""Look-ahead for DataLoaders that somebody else built."""

import functools
from typing import Any, TypeVar

import torch.utils.data

from torchobj.exceptions import ConfigError
from torchobj.loader.hints import hints_of
from torchobj.loader.lookahead import check_lookahead
from torchobj.loader.mixin import LookaheadMixin

__all__ = ["attach"]

_Loader = TypeVar("_Loader")


def attach(loader: _Loader, *, lookahead: int | None = None) -> _Loader:
    """Has a DataLoader announce the order of its samples, so that objects are read before a worker needs them.

    For loaders that are not a `torchobj.DataLoader`: torch's, torchdata's `StatefulDataLoader`, and what `prepare` of
    Accelerate returns, whose ranks announce their own batches only. Samples, their order and the loader's state stay
    what they are. It counts for passes that begin from now on: a `StatefulDataLoader` begins its first when it is asked
    for its state, as `prepare` of Accelerate does. To attach again changes nothing.

    Args:
        loader: It is changed, not copied: its class becomes a subclass of what it is.
        lookahead: As for `torchobj.DataLoader`; but None pulls any sampler ahead, also where there are no workers.

    Returns:
        The loader.

    Raises:
        TypeError: It is no DataLoader of torch, and holds none.
        ConfigError: It is not known which objects the samples of its dataset are made of, or `lookahead` is negative.

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
    check_lookahead(lookahead)
    within = innermost(loader)
    if isinstance(within, LookaheadMixin):
        return loader
    if hints_of(within.dataset) is None:
        raise ConfigError(
            f"attach: it is not known which objects the samples of a {type(within.dataset).__name__} are made of; "
            "known are torchobj's datasets with a length, and torch's Subset, ConcatDataset and StackDataset of them"
        )
    kind: Any = type(within)
    within.__class__ = _attached(kind)
    within.lookahead = lookahead
    if within._iterator is not None:
        # Kept with persistent workers: it takes the sampler from here at its next epoch.
        within._iterator._index_sampler = within._index_sampler
    return loader


def innermost(loader: Any) -> Any:
    """The DataLoader of torch that a loader is, or holds.

    Raises:
        TypeError: There is none.
    """
    found = loader
    # Accelerate's loaders say that their class is that of the loader which they hold: only type() tells.
    while not issubclass(type(found), torch.utils.data.DataLoader):
        found = getattr(found, "base_dataloader", None)
        if found is None:
            raise TypeError(f"attach: a {type(loader).__name__} is no DataLoader of torch, and has no base_dataloader")
    return found


@functools.cache
def _attached(kind: Any) -> type:
    def reduce(self: LookaheadMixin) -> tuple[Any, ...]:
        return _restored, (kind,), self.__getstate__()

    return type(kind.__name__, (LookaheadMixin, kind), {"__reduce__": reduce, "__module__": kind.__module__})


def _restored(kind: Any) -> Any:
    return object.__new__(_attached(kind))
