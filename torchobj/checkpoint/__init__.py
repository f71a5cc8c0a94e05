"""Checkpoints as objects: `save` and `load`, files over objects (`files`), the class of s3torchconnector (`s3`), and
`CheckpointManager`, which keeps them by step (`manager`).

A `.pt` file is a zip archive (`archive`). Saving plans one without the tensors' bytes (`plan`) and sends these from
where they are. Loading reads its directory (`records`, over `ranges` of an object) and what its pickle holds
(`outline`), then the tensors into their memory, and then unpickles (`pickling`): all of it, some (`selection`), or into
tensors that exist (`filling`). What lies on a device goes through a little memory (`staging`).

Distributed checkpoints are in `dcp`. What needs torch is loaded at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchobj.checkpoint.dcp.reader import StorageReader
    from torchobj.checkpoint.dcp.sweeping import sweep
    from torchobj.checkpoint.dcp.writer import StorageWriter
    from torchobj.checkpoint.handle import SaveHandle
    from torchobj.checkpoint.leftovers import Leftover
    from torchobj.checkpoint.manager import CheckpointManager
    from torchobj.checkpoint.retention import KeepBest
    from torchobj.checkpoint.rng import RngState

#: Public names, and where they live.
_LAZY = {
    "CheckpointManager": "torchobj.checkpoint.manager",
    "KeepBest": "torchobj.checkpoint.retention",
    "Leftover": "torchobj.checkpoint.leftovers",
    "RngState": "torchobj.checkpoint.rng",
    "SaveHandle": "torchobj.checkpoint.handle",
    "StorageReader": "torchobj.checkpoint.dcp.reader",
    "StorageWriter": "torchobj.checkpoint.dcp.writer",
    "sweep": "torchobj.checkpoint.dcp.sweeping",
}

__all__ = [
    "CheckpointManager",
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
