"""Checkpoints as objects: `save` and `load`, files over objects (`files`), and the class of s3torchconnector (`s3`).

A `.pt` file is a zip archive (`archive`). Saving plans one without the tensors' bytes (`plan`) and sends these from
where they are. Loading reads its directory (`records`, over `ranges` of an object) and what its pickle holds
(`outline`), then the tensors into their memory, and then unpickles (`pickling`): all of it, some (`selection`), or into
tensors that exist (`filling`). What lies on a device goes through a little memory (`staging`).

Distributed checkpoints are in `dcp`; its `StorageWriter` and `StorageReader` are loaded, with torch, at their first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchobj.checkpoint.dcp.reader import StorageReader
    from torchobj.checkpoint.dcp.writer import StorageWriter

#: What needs torch, and where it lives.
_LAZY = {
    "StorageReader": "torchobj.checkpoint.dcp.reader",
    "StorageWriter": "torchobj.checkpoint.dcp.writer",
}

__all__ = ["StorageReader", "StorageWriter"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'torchobj.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
