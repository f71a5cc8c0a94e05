"""The conditions of a write, in one form for all providers. The store checks them."""

from torchobj.exceptions import ConfigError

__all__ = ["condition"]


def condition(overwrite: bool, if_version: str | None) -> tuple[bool, str | None]:  # noqa: FBT001  passed by name
    """Returns whether the object must not exist, and the version that it must have.

    Args:
        overwrite: Whether an existing object may be replaced.
        if_version: The version that is replaced.

    Raises:
        ConfigError: The arguments exclude each other, or one has a wrong type; the message names them.
    """
    if not isinstance(overwrite, bool):
        raise ConfigError(f"overwrite={overwrite!r}: must be True or False")
    if if_version is not None and not isinstance(if_version, str):
        raise ConfigError(f"if_version={if_version!r}: must be a version returned by put() or head(), or None")
    if if_version is not None and not overwrite:
        raise ConfigError(
            f"overwrite=False, if_version={if_version!r}: exclude each other; the first creates an object, the second "
            "replaces one"
        )
    return not overwrite, if_version
