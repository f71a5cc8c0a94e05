"""Callbacks of the Trainer of transformers: look-ahead for its loaders, and logs of their waiting times."""

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.utils.data

from torchobj.datasets.wrappers import objects_are_known
from torchobj.exceptions import ConfigError
from torchobj.loader._attach import attach_torch_loader, torch_loader_of
from torchobj.loader.loader import AnnouncingLoader
from torchobj.loader.lookahead import Lookahead
from torchobj.loader.order.position import innermost
from torchobj.reading import lookahead_warning
from torchobj.urls import shown_url
from torchobj.warn_once import Once, warn_once

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        f"torchobj.transformers.LookaheadCallback needs transformers, as all of torchobj.transformers does ({error}): "
        "pip install 'torchobj[transformers]'"
    ) from error

__all__ = ["LoaderLogCallback", "LookaheadCallback", "warn_of_output_dir"]

logger = logging.getLogger("torchobj")


class LookaheadCallback(TrainerCallback):
    """Attaches the loaders of a `transformers.Trainer`, as one of its `callbacks`.

    The training loader is attached when `train()` starts. The loader of an evaluation becomes visible with its first
    batch; the rest of its order is announced from there on, and a loader that is reused
    (`dataloader_persistent_workers`) is attached for later evaluations. The first epoch of a resumed training is not
    read ahead, because no callback receives the loader that the Trainer builds for it.

    Loaders of unknown datasets are not changed; for the training loader this is logged.

    The Trainer writes local files only: `output_dir="s3://bucket/run"` makes a folder `s3:` on this machine, which is
    logged once. Pass a local folder, and a `CheckpointCallback` with the URL.

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
        self._once = Once()

    def on_init_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Warns of an output folder that is not local."""
        warn_of_output_dir("LookaheadCallback", self._once, args, state)

    def on_train_begin(self, args: Any, state: Any, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        """Attaches the loader of this training."""
        # A callback that is added to a Trainer later does not see the end of its initialization.
        self.on_init_end(args, state)
        if not isinstance(torch_loader_of(train_dataloader).dataset, torch.utils.data.IterableDataset):
            try:
                attach_torch_loader(train_dataloader)
            except ConfigError as error:
                logger.warning("LookaheadCallback: %s", error)

    def on_prediction_step(self, *_: Any, eval_dataloader: Any = None, **__: Any) -> None:
        """Announces the rest of an evaluation at its first batch, then batch by batch."""
        if self._evaluated is not eval_dataloader:
            self._evaluated, self._rest = eval_dataloader, _rest_of(torch_loader_of(eval_dataloader))
        next(self._rest, None)

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Releases the loader of the evaluation or prediction, which has ended."""
        self._evaluated, self._rest = None, iter(())

    on_predict = on_evaluate


class LoaderLogCallback(TrainerCallback):
    """Logs the figures of `DataLoader.log` for the training loader, whenever the Trainer logs.

    The loader must be attached: add it after a `LookaheadCallback`.

    Args:
        trainer: The Trainer, whose `log` reports to its log history and to TensorBoard, Weights & Biases and others.
        ranks: As for `DataLoader.log`: all ranks compare their waiting time in each record.

    Example:
        ```python
        trainer = Trainer(..., callbacks=[LookaheadCallback()])
        trainer.add_callback(LoaderLogCallback(trainer))
        ```
    """

    def __init__(self, trainer: Any = None, *, ranks: bool = False) -> None:
        if not callable(getattr(trainer, "log", None)):
            given = "" if trainer is None else f"{trainer!r}"
            raise TypeError(
                f"LoaderLogCallback({given}): must have the Trainer, whose log it calls; create it after the Trainer: "
                "trainer.add_callback(LoaderLogCallback(trainer))"
            )
        self._trainer, self._ranks = trainer, ranks

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:  # noqa: ARG002  transformers' signature
        """Logs the figures since the previous record."""
        if control.should_log and isinstance(loader := torch_loader_of(train_dataloader), AnnouncingLoader):
            self._trainer.log(loader.log(state.global_step, ranks=self._ranks))


def warn_of_output_dir(callback: str, once: Once, args: Any, state: Any) -> None:
    """Warns once that a Trainer writes to a folder of this machine although `output_dir` is a URL."""
    folder = str(getattr(args, "output_dir", ""))
    if "://" in folder and state.is_world_process_zero:
        warn_once(
            once,
            "%s: output_dir=%r: the Trainer writes local files only, here to the folder %s; pass a local folder, and "
            "the URL to torchobj.transformers.CheckpointCallback",
            callback,
            shown_url(folder),
            Path(shown_url(folder)),
            key="output_dir",
        )


def _rest_of(loader: Any) -> Iterator[Any]:
    """The batches that a loader will request after its first one. Drawing from the result announces them."""
    if not objects_are_known(loader.dataset) or isinstance(getattr(loader, "_ahead", None), Lookahead):
        return iter(())
    attach_torch_loader(loader)
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(innermost(batches)) is not torch.utils.data.SequentialSampler:
        # Its order cannot be drawn a second time.
        return iter(())
    # The batch that was returned, the one that Accelerate holds back, and those that workers have.
    begun = 2 + loader.num_workers * (loader.prefetch_factor or 0)
    return iter(Lookahead(_Later(batches, begun), loader.dataset, loader=loader._meter.loader))


class _Later:
    """A sampler without its first items."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler, self._skipped = sampler, skipped

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._sampler, self._skipped, None)
