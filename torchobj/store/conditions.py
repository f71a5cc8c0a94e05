"""The conditions of a write, in one form for all providers. The store checks them."""

from torchobj.exceptions import ConfigError

__all__ = ["condition"]


def condition(
    overwrite: bool,  # noqa: FBT001  callers pass it by name
    if_version: str | None,
    *,
    if_none_match: bool = False,
    if_match: str | None = None,
) -> tuple[bool, str | None]:
    """Returns whether the object must not exist, and the version that it must have.

    Args:
        overwrite: Whether an existing object may be replaced.
        if_version: The version that is replaced.
        if_none_match: The same as `overwrite=False`, by its name in HTTP.
        if_match: The same as `if_version`, by its name in HTTP.

    Raises:
        ConfigError: Two arguments contradict each other, or one has a wrong type; the message names them.
    """
    flags = {"overwrite": overwrite, "if_none_match": if_none_match}
    versions = {"if_version": if_version, "if_match": if_match}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r}: must be True or False")
    for name, version in versions.items():
        if version is not None and not isinstance(version, str):
            raise ConfigError(f"{name}={version!r}: must be a version returned by put() or head(), or None")
    given = [f"{name}={version!r}" for name, version in versions.items() if version is not None]
    absent = [
        text for text, holds in (("overwrite=False", not overwrite), ("if_none_match=True", if_none_match)) if holds
    ]
    if len(given) == len(versions):
        raise ConfigError(f"{given[0]}, {given[1]}: are the same condition; pass only one of them")
    if given and absent:
        raise ConfigError(
            f"{absent[0]}, {given[0]}: exclude each other; the first creates an object, the second replaces one"
        )
    return bool(absent), if_version if if_match is None else if_match
