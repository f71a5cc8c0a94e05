"""Checkpoints as objects: `torchobj.save`, `torchobj.load`, and `CheckpointManager`.

`archive` is one `.pt` file, `safetensors` files and folders of this format, `state` what a save writes, and `dcp` a
distributed checkpoint. `steps` has the checkpoints of a run. `matching` compares what one has with what is saved, and
`leftovers` sweeps the data of interrupted saves. Modules that need torch are imported at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchobj.checkpoint.dcp.removal import sweep
    from torchobj.checkpoint.dcp.storage import StorageReader, StorageWriter
    from torchobj.checkpoint.leftovers import Leftover
    from torchobj.checkpoint.state.rng import RngState
    from torchobj.checkpoint.steps.folder_checkpoints import FolderCheckpoints
    from torchobj.checkpoint.steps.manager import CheckpointManager
    from torchobj.checkpoint.steps.pending_save import SaveHandle
    from torchobj.checkpoint.steps.retention import KeepBest

#: Public names and their modules.
_LAZY = {
    "CheckpointManager": "torchobj.checkpoint.steps.manager",
    "FolderCheckpoints": "torchobj.checkpoint.steps.folder_checkpoints",
    "KeepBest": "torchobj.checkpoint.steps.retention",
    "Leftover": "torchobj.checkpoint.leftovers",
    "RngState": "torchobj.checkpoint.state.rng",
    "SaveHandle": "torchobj.checkpoint.steps.pending_save",
    "StorageReader": "torchobj.checkpoint.dcp.storage",
    "StorageWriter": "torchobj.checkpoint.dcp.storage",
    "sweep": "torchobj.checkpoint.dcp.removal",
}

__all__ = [
    "CheckpointManager",
    "FolderCheckpoints",
    "KeepBest",
    "Leftover",
    "RngState",
    "SaveHandle",
    "StorageReader",
    "StorageWriter",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'torchobj.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
