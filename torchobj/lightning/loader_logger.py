"""A callback of Lightning's Trainer that logs how long the loop waited for data. The loader measures it."""

import logging
import sys
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_leaves

from torchobj.loader.loader import AnnouncingLoader

if TYPE_CHECKING:
    from lightning.pytorch import Callback
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

__all__ = ["LoaderLogger"]

logger = logging.getLogger("torchobj")


class LoaderLogger(Callback):
    """Logs the figures of `DataLoader.log` for the training loader, to all loggers of the Trainer.

    It is a callback of `pytorch_lightning` if only that package is imported when this class is first used. Of several
    training loaders, it logs the first one of torchobj.

    Args:
        every_n_steps: Number of training steps between two records; None: `log_every_n_steps` of the Trainer.
        ranks: As for `DataLoader.log`: all ranks compare their waiting time in each record.

    Example:
        ```python
        trainer = Trainer(callbacks=[torchobj.lightning.LoaderLogger()])
        ```
    """

    def __init__(self, every_n_steps: int | None = None, *, ranks: bool = False) -> None:
        super().__init__()
        self._every_n_steps, self._ranks = every_n_steps, ranks
        #: The step of the last record: with accumulated gradients, several batches have the same step.
        self._logged = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  Lightning's signature
        """Warns of a training without a loader of torchobj."""
        if _loader_of(trainer) is None:
            logger.warning(
                "LoaderLogger: no training loader is one of torchobj, so nothing is logged: use torchobj.DataLoader "
                "or torchobj.attach(loader)"
            )

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Logs the figures since the previous record."""
        step, every = trainer.global_step, self._every_n_steps or trainer.log_every_n_steps
        loader = _loader_of(trainer)
        if loader is None or not every or step == self._logged or step % every:
            return
        self._logged = step
        values = loader.log(step, ranks=self._ranks)
        for each in trainer.loggers:
            each.log_metrics(values, step)


def _loader_of(trainer: Any) -> AnnouncingLoader[Any] | None:
    """The first training loader that is measured."""
    loaders = tree_leaves(trainer.train_dataloader)
    return next((loader for loader in loaders if isinstance(loader, AnnouncingLoader)), None)
