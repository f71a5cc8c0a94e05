"""Creates test configurations from field names, whichever options class holds the field."""

import dataclasses
from typing import Any

from torchobj import S3Options, StoreConfig


def s3_config(**settings: Any) -> StoreConfig:
    """Returns a `StoreConfig`; the fields may be those of `S3Options` or `StoreConfig`."""
    names = {field.name for field in dataclasses.fields(S3Options)}
    s3 = S3Options(**{name: value for name, value in settings.items() if name in names})
    return StoreConfig(s3=s3, **{name: value for name, value in settings.items() if name not in names})


def with_profile(config: StoreConfig, profile: str, **settings: Any) -> StoreConfig:
    """Returns the configuration with another profile and, optionally, other `StoreConfig` fields."""
    return dataclasses.replace(config, s3=dataclasses.replace(config.s3, profile=profile), **settings)
