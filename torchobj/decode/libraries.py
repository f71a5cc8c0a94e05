"""Imports the libraries of decoders in the process that starts workers, where it is known which ones they need.

Otherwise each worker would import them, in each epoch: torchvision alone takes two seconds.
"""

import contextlib
import importlib
import multiprocessing
import multiprocessing.forkserver
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from torchobj.exceptions import ConfigError
from torchobj.warn_once import FORKED

#: The modules that functions import; `image` also imports that of its native decoder.
LIBRARIES = {
    "image": ("torch", "numpy", "PIL.Image", "PIL.ImageOps"),
    "json": (),
    "npy": ("numpy", "numpy.lib.format"),
    # The encoding is that of names in zip archives.
    "npz": ("numpy", "numpy.lib.format", "encodings.cp437"),
    "pil": ("PIL.Image", "PIL.ImageOps"),
    "pt": ("torch", "torch.utils.serialization.config"),
    "safetensors": ("safetensors.torch",),
    "text": (),
}

#: The modules of the native decoders of `image`, in the order in which they are tried.
TORCHCODEC, TORCHVISION = "torchcodec.decoders", "torchvision.io"

_ALL = dict.fromkeys(name for names in (*LIBRARIES.values(), (TORCHCODEC, TORCHVISION)) for name in names)

#: The modules that decoders have used in this process, and in those that forked it.
_used: set[str] = set()

#: The modules that `import_all` has imported in this process.
_imported: dict[str, None] = {}


class _Imports(threading.local):
    """The time that this thread has spent on imports of libraries."""

    seconds = 0.0
    is_measuring = False


imports = _Imports()


def library(name: str) -> Any:
    """A module. Its first use in a process sets a flag that the process which has forked this one sees."""
    # The usual case: every decoded sample calls this.
    if name in _used and name in sys.modules:
        return importlib.import_module(name)
    _used.add(name)
    FORKED.is_first(_flag(name))
    began, imports.is_measuring = time.perf_counter(), True
    try:
        return importlib.import_module(name)
    finally:
        imports.is_measuring = False
        imports.seconds += time.perf_counter() - began


def required(name: str, package: str, function: str) -> Any:
    """A module of a package that a function of `torchobj.decode` needs.

    Raises:
        ConfigError: It cannot be imported.
    """
    try:
        return library(name)
    except ImportError as error:
        raise ConfigError(f"torchobj.decode.{function} needs {package} ({error}): pip install {package}") from error


def import_all(names: Iterable[str]) -> None:
    """Imports modules, as far as they are installed."""
    for name in names:
        # Otherwise the call of the decoder fails, with its own error.
        with contextlib.suppress(Exception):
            found = library(name)
            if name == "PIL.Image" and name not in _imported:
                # The modules of its formats, in the order in which images that it does not recognise import them.
                found.preinit()
                found.init()
            _imported[name] = None


def import_for_workers(start_method: str) -> None:
    """Imports what decoders need before workers are started, where these inherit it.

    Args:
        start_method: How workers are started. For `fork` these are the modules that workers of earlier passes used; a
            `forkserver`, unless it runs already, imports what this process has imported at the first access to a
            decoder; workers that are spawned inherit nothing.
    """
    if start_method == "fork":
        import_all(name for name in _ALL if FORKED.has(_flag(name)))
    elif start_method == "forkserver" and _imported:
        # A failing import would end the server: these succeeded here.
        before = multiprocessing.forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
        multiprocessing.set_forkserver_preload([*before, *(name for name in list(_imported) if name not in before)])


def _flag(name: str) -> str:
    return f"import of {name}"
