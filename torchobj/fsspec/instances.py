"""Which arguments share a cached instance of an fsspec file system. Does not import torch."""

import contextvars
import itertools
from typing import Any

import fsspec as package  # type: ignore[import-untyped]

from torchobj.config import StoreConfig
from torchobj.config.credentials import source_of

__all__ = ["CachedByConfig"]

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

    @property
    def config_number(cls) -> int | None:
        """Number of the configuration of the call in progress, for the token."""
        return _called_with.get()

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        """Creates an instance, or returns that of the same class, thread and arguments."""
        previous = _called_with.set(_number_of(arguments[0] if arguments else named.get("config")))
        try:
            return super().__call__(*arguments, **named)
        finally:
            _called_with.reset(previous)


def _number_of(config: Any) -> int | None:
    """The number of a configuration in this process; equal ones with the same explicit fields have the same."""
    if not isinstance(config, StoreConfig):
        return None
    providers = (config.s3.credential_provider, config.gcs.credential_provider)
    # An unhashable provider equals only itself, as it does for the clients.
    sources = tuple(None if provider is None else source_of(provider) for provider in providers)
    explicit = tuple(each._explicit for each in (config, config.s3, config.gcs, config.file))
    return _numbers.setdefault((config, sources, explicit, config.is_complete), next(_next_number))
