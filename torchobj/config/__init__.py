"""Configuration of stores: frozen dataclasses, checked at construction, and a file with settings by URL prefix.

`StoreConfig` (`store`) holds what all providers share; its `AdvancedOptions`, what few change. The options of one
provider are in `S3Options`, `GCSOptions` and `FileOptions`, those of the disk cache in `CacheOptions`, and prices in
`PriceOptions` (`options`).
`load_config` reads a file (`config_file`), and `resolve` merges the configuration of a call with it (`resolve`), for
which configurations know their set fields (`settings`); every store is created from a resolved one.
Credentials are found as by the SDKs of AWS and Google, or returned by a callable (`credentials`) when a request needs
them. Keys that are passed to `S3Options` are in no repr, log or file.
"""

from torchobj.config.config_file import Prefix, file_for, load_config
from torchobj.config.credentials import GCSCredentialProvider, GCSCredentials, S3CredentialProvider, S3Credentials
from torchobj.config.options import CacheOptions, FileOptions, GCSOptions, PriceOptions, S3Options
from torchobj.config.resolve import resolve, store_config
from torchobj.config.store import AdvancedOptions, StoreConfig

__all__ = [
    "AdvancedOptions",
    "CacheOptions",
    "FileOptions",
    "GCSCredentialProvider",
    "GCSCredentials",
    "GCSOptions",
    "Prefix",
    "PriceOptions",
    "S3CredentialProvider",
    "S3Credentials",
    "S3Options",
    "StoreConfig",
    "file_for",
    "load_config",
    "resolve",
    "store_config",
]
