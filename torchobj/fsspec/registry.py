"""Registers the file systems with fsspec: `register`. Does not import torch."""

import importlib.util
from typing import Any

import fsspec as package  # type: ignore[import-untyped]
from fsspec.registry import known_implementations  # type: ignore[import-untyped]

from torchobj.config import StoreConfig, store_config
from torchobj.config.checks import check
from torchobj.fsspec.file_system import GCSFileSystem, ObjectFileSystem
from torchobj.fsspec.instances import set_default_config

__all__ = ["register"]

#: The classes, by scheme.
_CLASSES: dict[str, type] = {"s3": ObjectFileSystem, "gs": GCSFileSystem}

#: Names that fsspec knows for a scheme.
_NAMES = {"gs": ("gs", "gcs")}


def register(
    *,
    config: StoreConfig | None = None,
    replace: bool = True,
    schemes: tuple[str, ...] = ("s3", "gs"),
) -> bool:
    """Makes fsspec open `s3://`, `gs://` and `gcs://` with torchobj in this process, and `tobj+s3://` and `tobj+gs://`.

    s3fs and gcsfs remain available by their own names. pyarrow opens URLs with clients of its own: pass
    `filesystem=torchobj.fsspec.ObjectFileSystem()` to its functions, and paths without a scheme.

    Args:
        config: Default for file systems that are created without a configuration. None: that of an earlier call
            is kept.
        replace: Whether to replace other implementations that are registered or installed for a scheme.
        schemes: `s3`, or `gs`, or both; `gs` includes `gcs`. None of them, `()`, leaves their implementations alone.

    Returns:
        Whether torchobj now serves all `schemes`.

    Example:
        ```python
        import pandas, torchobj.fsspec

        s3 = torchobj.S3Options(endpoint_url="http://localhost:9000")
        torchobj.fsspec.register(config=torchobj.StoreConfig(s3=s3))
        metrics = pandas.read_parquet("s3://bucket/metrics.parquet", storage_options={"profile": "minio"})
        ```
    """
    ok = isinstance(schemes, tuple) and set(schemes) <= _CLASSES.keys()
    check("schemes", schemes, "a tuple of s3 and gs", ok=ok)
    served = _register_classes(schemes, replace=replace)
    if (served or not schemes) and config is not None:
        set_default_config(store_config(config))
    return served == set(schemes)


def _register_classes(schemes: tuple[str, ...], *, replace: bool) -> set[str]:
    """Makes fsspec open URLs with the classes. Returns those of `schemes` that it opens with them."""
    for scheme, kind in _CLASSES.items():
        package.register_implementation(f"tobj+{scheme}", kind, clobber=True)
    for scheme in schemes:
        names = _NAMES.get(scheme, (scheme,))
        if replace or not any(_is_served_by_another(name, _CLASSES[scheme]) for name in names):
            for name in names:
                package.register_implementation(name, _CLASSES[scheme], clobber=True)
    return {scheme for scheme in schemes if package.registry.get(scheme) is _CLASSES[scheme]}


def _is_served_by_another(name: str, kind: Any) -> bool:
    present = package.registry.get(name)
    if present is not None:
        return present is not kind
    return importlib.util.find_spec(known_implementations[name]["class"].partition(".")[0]) is not None
