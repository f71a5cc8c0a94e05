"""Integration of `lightning` or `pytorch_lightning`: checkpoints in object storage, and logs of waiting times.

Importing this package imports neither of them. The callbacks import one when their names are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchobj.lightning.checkpoint_io import ObjectCheckpointIO

if TYPE_CHECKING:
    from torchobj.lightning.last_checkpoint import LastCheckpoint
    from torchobj.lightning.loader_logger import LoaderLogger

#: The callbacks, and their modules.
_LAZY = {"LastCheckpoint": "torchobj.lightning.last_checkpoint", "LoaderLogger": "torchobj.lightning.loader_logger"}

__all__ = ["LastCheckpoint", "LoaderLogger", "ObjectCheckpointIO"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'torchobj.lightning' has no attribute {name!r}")
