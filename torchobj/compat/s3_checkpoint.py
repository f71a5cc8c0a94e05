"""`S3Checkpoint`, with the names of s3torchconnector. `files` has the files. Does not import torch."""

from torchobj._torchobj import ObjectReader
from torchobj.config import S3ClientConfig, StoreConfig, one_config, store_config
from torchobj.store.file_objects import ObjectWriter, open_reader
from torchobj.urls import parse_url

__all__ = ["S3Checkpoint"]


class S3Checkpoint:
    """Writes and reads checkpoints in S3.

    Args:
        region: Region of the bucket; detected if None.
        endpoint: URL of the store; AWS or the environment's if None.
        s3client_config: An `S3ClientConfig`, or a `StoreConfig`.
        config: The same as `s3client_config`, by its name in torchobj.

    Example:
        ```python
        checkpoint = S3Checkpoint()
        with checkpoint.writer("s3://bucket/step-100.pt") as writer:
            torch.save(model.state_dict(), writer)
        with checkpoint.reader("s3://bucket/step-100.pt") as reader:
            state = torch.load(reader)
        ```
    """

    def __init__(
        self,
        region: str | None = None,
        endpoint: str | None = None,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        *,
        config: StoreConfig | S3ClientConfig | None = None,
    ) -> None:
        self.region, self.endpoint = region, endpoint
        self._config = store_config(one_config(config, s3client_config), region, endpoint)

    def reader(self, s3_uri: str) -> ObjectReader:
        """Returns a file to read an object, for `torch.load`: large tensors are read in parallel into their own memory.

        Raises:
            ConfigError: The URL is not an `s3://` URL of an object.
        """
        return open_reader(str(parse_url(s3_uri, ("s3",))), self._config)

    def writer(self, s3_uri: str, *, overwrite: bool = True, if_version: str | None = None) -> ObjectWriter:
        """Returns a file to write an object, for `torch.save`: see `ObjectWriter`.

        Args:
            s3_uri: The URL of the object.
            overwrite, if_version: As for `ObjectWriter`.

        Raises:
            ConfigError: The URL is not an `s3://` URL of an object, or conditions exclude each other.
        """
        url = str(parse_url(s3_uri, ("s3",)))
        return ObjectWriter(url, config=self._config, overwrite=overwrite, if_version=if_version)
