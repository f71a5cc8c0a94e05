"""Checkpoints as objects: files to write and read them with (`files`), and the class of s3torchconnector (`s3`);
`manager` keeps them by step. What needs torch is loaded at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchobj.checkpoint.handle import SaveHandle
    from torchobj.checkpoint.manager import CheckpointManager
    from torchobj.checkpoint.retention import KeepBest
    from torchobj.checkpoint.rng import RngState
    from torchobj.checkpoint.sweep import Leftover

#: Public names, and where they live.
_LAZY = {
    "CheckpointManager": "torchobj.checkpoint.manager",
    "KeepBest": "torchobj.checkpoint.retention",
    "Leftover": "torchobj.checkpoint.sweep",
    "RngState": "torchobj.checkpoint.rng",
    "SaveHandle": "torchobj.checkpoint.handle",
}

__all__ = ["CheckpointManager", "KeepBest", "Leftover", "RngState", "SaveHandle"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'torchobj.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
