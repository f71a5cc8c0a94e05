"""Records which fields were passed to the constructor of a configuration: they override the configuration file."""

import dataclasses
from typing import TYPE_CHECKING, Any, Self, TypeVar


class ExplicitFields:
    """Base class of a dataclass that records the names of the fields that are passed to its constructor."""

    _explicit: frozenset[str]

    # Hidden from type checkers and editors, which otherwise ignore the signature of the dataclass.
    if not TYPE_CHECKING:

        def __new__(cls, *_: Any, **fields: Any) -> Self:
            """Records the names of fields."""
            self = super().__new__(cls)
            object.__setattr__(self, "_explicit", frozenset(fields))
            return self


_Config = TypeVar("_Config", bound=ExplicitFields)


def explicit_fields(config: ExplicitFields) -> dict[str, Any]:
    """The fields that were passed to the constructor, with their values.

    `dataclasses.replace` passes all fields. If all of several fields were passed, those with default values are left
    out.
    """
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(config)  # type: ignore[arg-type]  # always a dataclass
    values = {field.name: getattr(config, field.name) for field in fields if field.name in config._explicit}
    if len(values) < len(fields) or len(fields) == 1:
        return values
    defaults = type(config)()
    return {name: value for name, value in values.items() if value != getattr(defaults, name)}


def replace_fields(config: _Config, **fields: Any) -> _Config:
    """A copy with other values of fields, as if they had been passed to the constructor."""
    return type(config)(**{**explicit_fields(config), **fields})
