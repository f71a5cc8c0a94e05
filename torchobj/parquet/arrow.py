"""Imports pyarrow when it is needed."""

import functools
import importlib
from typing import Any

from torchobj.exceptions import ConfigError

__all__ = ["import_arrow"]


@functools.cache
def import_arrow(module: str = "pyarrow") -> Any:
    """Imports pyarrow, or a module of it.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"tables and Parquet files need pyarrow ({error}): pip install torchobj[manifest]") from error
