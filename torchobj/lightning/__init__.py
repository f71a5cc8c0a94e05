"""Integration of `lightning` or `pytorch_lightning`: checkpoints in object storage, and logs of waiting times.

Importing this package imports neither of them. The callback imports one when its name is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchobj.lightning.checkpoint_io import ObjectCheckpointIO

if TYPE_CHECKING:
    from torchobj.lightning.loader_logger import LoaderLogger

__all__ = ["LoaderLogger", "ObjectCheckpointIO"]


def __getattr__(name: str) -> Any:
    if name == "LoaderLogger":
        return importlib.import_module("torchobj.lightning.loader_logger").LoaderLogger
    raise AttributeError(f"module 'torchobj.lightning' has no attribute {name!r}")
