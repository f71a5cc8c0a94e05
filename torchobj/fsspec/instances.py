"""Which arguments share a cached instance of an fsspec file system, and its configuration. Does not import torch."""

import contextvars
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import fsspec as package  # type: ignore[import-untyped]
from fsspec.config import apply_config  # type: ignore[import-untyped]

from torchobj.config import StoreConfig, store_config
from torchobj.config.credentials import source_of
from torchobj.config.store import OPTIONS

__all__ = ["CachedByConfig", "set_default_config"]

#: Configuration from `register`, for file systems without one. Not in fsspec's configuration, which s3fs also reads.
_default: StoreConfig | None = None

#: Numbers of configurations in this process. Kept until it exits, as the cached instances are.
_numbers: dict[tuple[Any, ...], int] = {}

_next_number = itertools.count(1)

#: Number of the configuration that the current call of a class passes.
_called_with: contextvars.ContextVar[int | None] = contextvars.ContextVar("torchobj_fsspec_config", default=None)


class CachedByConfig(type(package.AbstractFileSystem)):  # type: ignore[misc]
    """Caches instances by the configuration itself.

    fsspec caches instances by the repr of their arguments, which omits credential providers and files of keys. Its
    token therefore also contains a number of the configuration, if the class has `config_number` among its
    `_extra_tokenize_attributes`.
    """

    #: Translates options of another file system for the same scheme to a configuration.
    _translate: Callable[[StoreConfig, Mapping[str, Any]], StoreConfig]
    #: Names of these options. fsspec passes them to the constructor only: instances, their tokens and pickles do not
    #: contain them, because some are secrets.
    _strip_tokenize_options: tuple[str, ...]

    @property
    def config_number(cls) -> int | None:
        """Number of the configuration of the call in progress, for the token."""
        return _called_with.get()

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        """Creates an instance, or returns that of the same class, thread and arguments."""
        arguments, named = cls._configured(arguments, named)
        previous = _called_with.set(_number_of(arguments[0] if arguments else named.get("config")))
        try:
            return super().__call__(*arguments, **named)
        finally:
            _called_with.reset(previous)

    def _configured(cls, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the default configuration, and with one in place of the options of another file system.

        Options are also those of fsspec's own configuration, such as `FSSPEC_S3_ANON`.
        """
        given = apply_config(cls, named)
        options = {name: given[name] for name in cls._strip_tokenize_options if name in given}
        if not arguments and given.get("config") is None and _default is not None:
            named = {**named, "config": _default}
        if not options:
            return arguments, named
        named = {name: value for name, value in named.items() if name not in options}
        named |= dict(zip(("config", "region", "endpoint_url"), arguments, strict=False))
        named["config"] = cls._translate(store_config(named.get("config", given.get("config"))), options)
        return (), named


def set_default_config(config: StoreConfig) -> None:
    """Sets the configuration of file systems that are created without one."""
    global _default  # noqa: PLW0603  state of the process
    _default = config


def _number_of(config: Any) -> int | None:
    """The number of a configuration in this process; equal ones with the same set fields have the same."""
    if not isinstance(config, StoreConfig):
        return None
    providers = (config.s3.credential_provider, config.gcs.credential_provider)
    # An unhashable provider equals only itself, as it does for the clients.
    sources = tuple(None if provider is None else source_of(provider) for provider in providers)
    fields = tuple(each._set for each in (config, *(getattr(config, name) for name in OPTIONS)))
    return _numbers.setdefault((config, sources, fields), next(_next_number))
