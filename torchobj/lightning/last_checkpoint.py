"""A callback of Lightning's Trainer by which `ckpt_path="last"` finds checkpoints in a bucket."""

import sys
from typing import TYPE_CHECKING, Any

from torchobj.lightning.checkpoint_io import ObjectCheckpointIO

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import OnExceptionCheckpoint
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning.callbacks import OnExceptionCheckpoint
else:
    try:
        from lightning.pytorch.callbacks import OnExceptionCheckpoint
    except ImportError:
        from pytorch_lightning.callbacks import OnExceptionCheckpoint

__all__ = ["LastCheckpoint"]


class LastCheckpoint(OnExceptionCheckpoint):
    """Makes `ckpt_path="last"` resume from the newest checkpoint below a folder, and saves one at an exception.

    It is Lightning's `OnExceptionCheckpoint`, whose checkpoint is a candidate for `"last"` also in a bucket: those of a
    `ModelCheckpoint` are not, because Lightning looks for them on the local disk. Any exception that ends the training
    is followed by a save, which a training that ends normally deletes. SIGTERM is such an exception: Lightning raises
    it after the batch.

    It is a callback of `pytorch_lightning` if only that package is imported when this class is first used.

    Args:
        plugin: The plugin of the Trainer.
        dirpath: The folder: the `default_root_dir` of the Trainer, or the `dirpath` of a `ModelCheckpoint`.
        filename: Name of the checkpoint that is saved at an exception, without `.ckpt`.

    Example:
        ```python
        plugin = ObjectCheckpointIO()
        last = torchobj.lightning.LastCheckpoint(plugin, "s3://bucket/run")
        trainer = Trainer(default_root_dir="s3://bucket/run", plugins=[plugin], callbacks=[last])
        trainer.fit(model, ckpt_path="last")
        ```
    """

    def __init__(self, plugin: ObjectCheckpointIO, dirpath: str, filename: str = "on_exception") -> None:
        super().__init__(dirpath, filename)
        self._plugin = plugin

    @property
    def ckpt_path(self) -> str:
        """The newest checkpoint below the folder, as `ObjectCheckpointIO.newest`; that of an exception without one."""
        return self._plugin.newest(str(self.dirpath)) or super().ckpt_path

    def on_exception(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Saves a checkpoint."""
        trainer.save_checkpoint(super().ckpt_path)

    def teardown(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Deletes that checkpoint."""
        trainer.strategy.remove_checkpoint(super().ckpt_path)
