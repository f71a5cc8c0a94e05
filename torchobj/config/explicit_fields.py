"""Records which fields were passed to the constructor of a configuration: they override the configuration file."""

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar, dataclass_transform


class ExplicitFields:
    """Base class of the classes that `configuration` decorates."""

    #: The names of the fields that were passed to the constructor.
    _explicit: frozenset[str]

    @classmethod
    def _refuse(cls, names: list[str]) -> NoReturn:
        """Raises the error of names that are not fields."""
        raise TypeError(f"{cls.__name__} has no field {names[0]!r}{nearest(names[0], field_names(cls))}")


_Config = TypeVar("_Config", bound=ExplicitFields)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def configuration(kind: type[_Config]) -> type[_Config]:
    """Makes a class a frozen keyword-only dataclass whose instances record the fields that their constructor received.

    An unknown name is a `TypeError` that suggests a similar one.
    """
    kind = dataclasses.dataclass(frozen=True, kw_only=True)(kind)
    construct, known = kind.__init__, field_names(kind)

    @functools.wraps(construct)
    def record(self: _Config, **fields: Any) -> None:
        if unknown := [name for name in fields if name not in known]:
            kind._refuse(unknown)
        object.__setattr__(self, "_explicit", frozenset(fields))
        construct(self, **fields)

    kind.__init__ = record  # type: ignore[assignment]
    return kind


def field_names(kind: type[ExplicitFields]) -> set[str]:
    """The names of the fields of a configuration."""
    return {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # always a dataclass


def nearest(name: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """The end of a message about an unknown name: the most similar one, also of other classes, or all known ones."""
    names = sorted(known)
    similar = difflib.get_close_matches(name, [*names, *elsewhere], n=1, cutoff=0.5)
    return f"; did you mean {similar[0]}?" if similar else f": its fields are {', '.join(names)}"


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
