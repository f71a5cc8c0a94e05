"""Configurations of the tests, by the names of fields alone."""

import dataclasses
from typing import Any

from torchobj import S3Options, StoreConfig


def s3_config(**settings: Any) -> StoreConfig:
    """A configuration of fields of `S3Options` and of `StoreConfig`."""
    names = {field.name for field in dataclasses.fields(S3Options)}
    s3 = S3Options(**{name: value for name, value in settings.items() if name in names})
    return StoreConfig(s3=s3, **{name: value for name, value in settings.items() if name not in names})


def with_profile(config: StoreConfig, profile: str, **settings: Any) -> StoreConfig:
    """The same configuration with another profile, and other settings of `StoreConfig`."""
    return dataclasses.replace(config, s3=dataclasses.replace(config.s3, profile=profile), **settings)
