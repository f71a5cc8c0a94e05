"""How stores are reached and used: frozen dataclasses, checked at construction. Reads no environment and no files.

`StoreConfig` (`store`) holds what all providers share; the options of one provider are in `S3Options` and `FileOptions`
(`options`). `S3ClientConfig` (`s3_client`) is s3torchconnector's class. Credentials are never part of a configuration:
they come from where the AWS SDKs look, at the moment of use.
"""

from torchobj.config.options import FileOptions, S3Options
from torchobj.config.s3_client import S3ClientConfig, store_config
from torchobj.config.store import StoreConfig

__all__ = ["FileOptions", "S3ClientConfig", "S3Options", "StoreConfig", "store_config"]
