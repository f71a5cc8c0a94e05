"""The checkpoint class of s3torchconnector, by its names."""

from torchobj._torchobj import ObjectReader
from torchobj.checkpoint.files import ObjectWriter, open_reader
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.urls import parse_url

__all__ = ["S3Checkpoint"]


class S3Checkpoint:
    """Writes and reads checkpoints in S3.

    Args:
        region: Region of the bucket; found out when None.
        endpoint: Where the store is; AWS, or the environment's, when None.
        s3client_config: An `S3ClientConfig`, or a `StoreConfig`.
        config: The same, by the name that it has elsewhere.

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
        self._config = store_config(config or s3client_config, region, endpoint)

    def reader(self, s3_uri: str) -> ObjectReader:
        """A file to read an object, for `torch.load`: large tensors land in their own memory by parallel ranges.

        Raises:
            ConfigError: No `s3://` URL of an object.
        """
        return open_reader(str(parse_url(s3_uri, ("s3",))), self._config)

    def writer(self, s3_uri: str) -> ObjectWriter:
        """A file to write an object, for `torch.save`: it appears by a close before which nothing failed.

        Raises:
            ConfigError: No `s3://` URL of an object.
        """
        return ObjectWriter(str(parse_url(s3_uri, ("s3",))), config=self._config)
