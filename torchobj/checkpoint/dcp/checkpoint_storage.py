"""What the storage reader and the storage writer have in common: the folder of a checkpoint and its configuration."""

import os
from typing import ClassVar

from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.exceptions import ConfigError
from torchobj.urls import SCHEMES, parse_url

__all__ = ["CheckpointStorage"]


class CheckpointStorage:
    """Base of the storage reader and the storage writer, before torch's base: their folder and configuration.

    Args:
        url: Folder of the checkpoint.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: Override those of the configuration.

    Raises:
        ConfigError: `url` is not a URL of a store, or `config` is not a configuration.
    """

    #: Schemes of the URLs that it accepts.
    _schemes: ClassVar[tuple[str, ...]] = SCHEMES

    def __init__(
        self,
        url: str,
        config: StoreConfig | S3ClientConfig | None,
        region: str | None,
        endpoint_url: str | None,
    ) -> None:
        super().__init__()
        self._config = store_config(config, region, endpoint_url, url=url)
        self._checkpoint = self._dir(url)

    @property
    def checkpoint_id(self) -> str:
        """URL of the checkpoint."""
        return self._checkpoint.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.checkpoint_id!r})"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether `checkpoint_id` is a URL of a store."""
        try:
            return isinstance(checkpoint_id, str) and bool(parse_url(checkpoint_id, cls._schemes))
        except ConfigError:
            return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Starts a new save or load, at `checkpoint_id` if given.

        Raises:
            ConfigError: `checkpoint_id` is not a URL of a store.
        """
        if checkpoint_id:
            self._checkpoint = self._dir(checkpoint_id)

    def _dir(self, url: str | os.PathLike[str]) -> CheckpointDir:
        if not isinstance(url, str):
            raise ConfigError(f"checkpoint_id={url!r}: must be a URL as a str; a path would lose one of its slashes")
        return CheckpointDir(url, self._config)
