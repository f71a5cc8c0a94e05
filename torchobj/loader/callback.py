"""Look-ahead for the Trainer of transformers, which builds its loaders itself. Needs transformers installed."""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch.utils.data
from transformers import TrainerCallback

from torchobj.datasets import unannounced
from torchobj.exceptions import ConfigError
from torchobj.loader import nested
from torchobj.loader.attaching import attach, innermost
from torchobj.loader.hints import hints_of
from torchobj.loader.lookahead import Ahead, Lookahead

__all__ = ["LookaheadCallback"]

logger = logging.getLogger("torchobj")


class LookaheadCallback(TrainerCallback):
    """Attaches the loaders of a `transformers.Trainer`: `Trainer(..., callbacks=[torchobj.LookaheadCallback()])`.

    The loader of the training is attached as each `train()` begins. One of an evaluation is first seen with its first
    batch; the order of the rest is announced from there on, and a loader that is kept (`dataloader_persistent_workers`)
    is attached for the evaluations to come. The epoch that a resumed training begins in is not read ahead: no callback
    sees the loader which the Trainer makes for the rest of it.

    A dataset of which nothing is known is left alone; of the training's it is logged.

    Example:
        >>> import transformers
        >>> isinstance(LookaheadCallback(), transformers.TrainerCallback)
        True
    """

    def __init__(self) -> None:
        # Who uses this needs not be told of `attach`.
        unannounced.know()
        #: The loader of the evaluation that goes on, and what is still to be announced of it.
        self._evaluated: Any = None
        self._rest: Iterator[Any] = iter(())

    def on_train_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        """Attaches the loader of this training."""
        if not isinstance(innermost(train_dataloader).dataset, torch.utils.data.IterableDataset):
            try:
                attach(train_dataloader)
            except ConfigError as error:
                logger.warning("LookaheadCallback: %s", error)

    def on_prediction_step(self, *_: Any, eval_dataloader: Any = None, **__: Any) -> None:
        """Announces what comes, at the first batch of an evaluation and then batch by batch."""
        if self._evaluated is not eval_dataloader:
            self._evaluated, self._rest = eval_dataloader, _rest_of(innermost(eval_dataloader))
        next(self._rest, None)

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Forgets the loader of the evaluation, which has ended."""
        self._evaluated, self._rest = None, iter(())

    def on_predict(self, *_: Any, **__: Any) -> None:
        """Forgets the loader of the prediction, which has ended."""
        self._evaluated, self._rest = None, iter(())


def _rest_of(loader: Any) -> Iterator[Any]:
    """The batches that a loader which has handed out the first will ask for, announced ahead of who pulls this."""
    hints = None if isinstance(loader.dataset, torch.utils.data.IterableDataset) else hints_of(loader.dataset)
    if hints is None or isinstance(getattr(loader, "_ahead", None), Lookahead):
        return iter(())
    attach(loader)
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(nested.innermost(batches)) is not torch.utils.data.SequentialSampler:
        # It cannot be asked twice for the same order.
        return iter(())
    # The batch that is handed out, the one that Accelerate holds back, and those that workers have.
    begun = 2 + loader.num_workers * (loader.prefetch_factor or 0)
    return Ahead(Lookahead(_Later(batches, begun), hints))


class _Later:
    """A sampler without its first items."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler, self._skipped = sampler, skipped

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._sampler, self._skipped, None)
