"""The attributes of uploaded objects, as keyword arguments."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

from torchobj.exceptions import ConfigError

if TYPE_CHECKING:
    from torchobj import _torchobj

__all__ = ["ObjectAttributes", "native_attributes"]


class ObjectAttributes(TypedDict, total=False):
    """Headers, storage class and metadata of an object, as arguments of uploads. Those of `Store.put`."""

    content_type: str | None
    content_encoding: str | None
    content_disposition: str | None
    content_language: str | None
    cache_control: str | None
    storage_class: str | None
    metadata: Mapping[str, str] | None


def native_attributes(attributes: ObjectAttributes) -> "_torchobj.Attributes":
    """The attributes for the native module.

    Raises:
        ConfigError: An argument has another name.
    """
    unknown = attributes.keys() - ObjectAttributes.__annotations__.keys()
    if unknown:
        names = ", ".join(ObjectAttributes.__annotations__)
        raise ConfigError(f"{min(unknown)}: no such argument; attributes of an object are {names}")
    return {**attributes, "metadata": attributes.get("metadata") or {}}
