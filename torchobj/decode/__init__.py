"""Decodes objects: images, arrays, JSON, text, tensors. The libraries of a function are imported at the first access to
it, as in `torchobj.decode.image`, and forked workers inherit them. If only workers access it, the first ones import
them, and the loader before it forks the next ones; a forkserver imports what the script has accessed before it starts.

The functions can be pickled, and take what datasets pass on: a reader, a `Buffer`, any object with the buffer protocol,
or the dict of `bytes` and `path` that a column of images or audio of Hugging Face datasets has. A reader is decoded
from its start, regardless of its position. Nothing here reads a bucket by itself.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchobj.decode import libraries

if TYPE_CHECKING:
    from torchobj.decode.arrays import npy, npz
    from torchobj.decode.images import image, pil
    from torchobj.decode.tensors import pt, safetensors
    from torchobj.decode.texts import json, text

__all__ = ["image", "json", "npy", "npz", "pil", "pt", "safetensors", "text"]

_MODULES = {
    "image": "images",
    "json": "texts",
    "npy": "arrays",
    "npz": "arrays",
    "pil": "images",
    "pt": "tensors",
    "safetensors": "tensors",
    "text": "texts",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    within = importlib.import_module(f"torchobj.decode.{_MODULES[name]}")
    libraries.import_all(libraries.LIBRARIES[name])
    if name == "image" and (native := within.native_decoder()) is not None:
        libraries.import_all([native.module])
    function = globals()[name] = getattr(within, name)
    # What unpickles it accesses it here, and so imports its libraries.
    function.__module__ = __name__
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
