"""Checks the conditions of a write. The store verifies that they hold."""

from torchobj.exceptions import ConfigError

__all__ = ["check_condition"]


def check_condition(overwrite: bool, if_version: str | None) -> None:  # noqa: FBT001  passed by name
    """Checks the condition of a write, before a request is sent.

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
