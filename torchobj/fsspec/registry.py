"""Registers classes of file systems with fsspec. Does not import torch."""

import importlib.util
from collections.abc import Mapping
from typing import Any

import fsspec as package  # type: ignore[import-untyped]
from fsspec.registry import known_implementations  # type: ignore[import-untyped]

__all__ = ["register_classes", "serves"]

#: Names that fsspec knows for a scheme.
_NAMES = {"gs": ("gs", "gcs")}


def register_classes(classes: Mapping[str, type], schemes: tuple[str, ...], *, replace: bool) -> set[str]:
    """Makes fsspec open URLs with the classes, by scheme. Returns those of `schemes` that it opens with them.

    Args:
        classes: All classes, which are also registered as `tobj+` and the scheme.
        schemes: Schemes to register without `tobj+`.
        replace: Whether to replace other implementations of these.
    """
    for scheme, kind in classes.items():
        package.register_implementation(f"tobj+{scheme}", kind, clobber=True)
    for scheme in schemes:
        names = _NAMES.get(scheme, (scheme,))
        if replace or not any(_is_served_by_another(name, classes[scheme]) for name in names):
            for name in names:
                package.register_implementation(name, classes[scheme], clobber=True)
    return {scheme for scheme in schemes if serves(classes[scheme], scheme)}


def serves(kind: Any, scheme: str) -> bool:
    """Whether fsspec opens a scheme with a class."""
    return package.registry.get(scheme) is kind


def _is_served_by_another(name: str, kind: Any) -> bool:
    present = package.registry.get(name)
    if present is not None:
        return present is not kind
    return importlib.util.find_spec(known_implementations[name]["class"].partition(".")[0]) is not None
