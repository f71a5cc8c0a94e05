"""Look-ahead for the Trainer of transformers, which builds its loaders itself. Needs transformers installed."""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch.utils.data

from torchobj.datasets import lookahead_warning
from torchobj.exceptions import ConfigError
from torchobj.loader import unwrap
from torchobj.loader._attach import attach, torch_loader_of
from torchobj.loader.lookahead import Lookahead, LookaheadIterator
from torchobj.loader.sample_objects import object_finder

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        f"torchobj.LookaheadCallback needs transformers ({error}): pip install 'torchobj[transformers]'"
    ) from error

__all__ = ["LookaheadCallback"]

logger = logging.getLogger("torchobj")


class LookaheadCallback(TrainerCallback):
    """Attaches the loaders of a `transformers.Trainer`: `Trainer(..., callbacks=[torchobj.LookaheadCallback()])`.

    The training loader is attached when `train()` starts. The loader of an evaluation becomes visible with its first
    batch; the rest of its order is announced from there on, and a loader that is reused
    (`dataloader_persistent_workers`) is attached for later evaluations. The first epoch of a resumed training is not
    read ahead, because no callback receives the loader that the Trainer builds for it.

    Loaders of unknown datasets are not changed; for the training loader this is logged.

    Example:
        >>> import transformers
        >>> isinstance(LookaheadCallback(), transformers.TrainerCallback)
        True
    """

    def __init__(self) -> None:
        # The warning about `attach` is not needed here.
        lookahead_warning.disable()
        #: The loader of the current evaluation, and the rest of its order.
        self._evaluated: Any = None
        self._rest: Iterator[Any] = iter(())

    def on_train_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        """Attaches the loader of this training."""
        if not isinstance(torch_loader_of(train_dataloader).dataset, torch.utils.data.IterableDataset):
            try:
                attach(train_dataloader)
            except ConfigError as error:
                logger.warning("LookaheadCallback: %s", error)

    def on_prediction_step(self, *_: Any, eval_dataloader: Any = None, **__: Any) -> None:
        """Announces the rest of an evaluation at its first batch, then batch by batch."""
        if self._evaluated is not eval_dataloader:
            self._evaluated, self._rest = eval_dataloader, _rest_of(torch_loader_of(eval_dataloader))
        next(self._rest, None)

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Releases the loader of the evaluation, which has ended."""
        self._evaluated, self._rest = None, iter(())

    def on_predict(self, *_: Any, **__: Any) -> None:
        """Releases the loader of the prediction, which has ended."""
        self._evaluated, self._rest = None, iter(())


def _rest_of(loader: Any) -> Iterator[Any]:
    """The batches that a loader will request after its first one. Drawing from the result announces them."""
    find_objects = (
        None if isinstance(loader.dataset, torch.utils.data.IterableDataset) else object_finder(loader.dataset)
    )
    if find_objects is None or isinstance(getattr(loader, "_ahead", None), Lookahead):
        return iter(())
    attach(loader)
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(unwrap.innermost(batches)) is not torch.utils.data.SequentialSampler:
        # Its order cannot be drawn a second time.
        return iter(())
    # The batch that was returned, the one that Accelerate holds back, and those that workers have.
    begun = 2 + loader.num_workers * (loader.prefetch_factor or 0)
    return LookaheadIterator(Lookahead(_Later(batches, begun), find_objects, loader=loader._meter.loader))


class _Later:
    """A sampler without its first items."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler, self._skipped = sampler, skipped

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._sampler, self._skipped, None)
