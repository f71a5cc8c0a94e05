"""The checkpoint plugin with the name and signature of `s3torchconnector.lightning` 1.5."""

from typing import Any

from torchobj.config import StoreConfig
from torchobj.lightning import ObjectCheckpointIO
from torchobj.s3torchconnector.client_config import S3ClientConfig, connector_config

__all__ = ["S3LightningCheckpoint"]


class S3LightningCheckpoint(ObjectCheckpointIO):
    """The plugin with the name and arguments of s3torchconnector. Accepts `s3://` URLs only.

    Args:
        region: Region of the bucket; detected if None.
        s3client_config: An `S3ClientConfig`, or a `StoreConfig`.
        endpoint: URL of the store; AWS or the environment's if None.
    """

    _schemes = ("s3",)

    def __init__(
        self,
        region: str | None = None,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        endpoint: str | None = None,
    ) -> None:
        super().__init__(config=connector_config(None, s3client_config, region, endpoint))
        self.region = region

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["region"], state["_config"])  # type: ignore[misc]  # as the plugin's

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:  # noqa: ARG002
        """Saves a checkpoint as `ObjectCheckpointIO` does, but ignores `storage_options`, as s3torchconnector does."""
        super().save_checkpoint(checkpoint, path)
