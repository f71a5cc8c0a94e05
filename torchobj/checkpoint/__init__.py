"""Checkpoints as objects: files to write and read them with (`files`), the class of s3torchconnector (`s3`), and
distributed checkpoints (`dcp`), whose `StorageWriter` and `StorageReader` are loaded, with torch, at their first use.
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
