"""The base class of configurations: which fields are set, and names that are similar to an unknown one."""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, NoReturn, Self


class ConfigBase:
    """Base class of the configurations: frozen keyword-only dataclasses, whose instances record which fields are set.

    A field is set if it was passed to the constructor, also with its default value. Only `resolve` distinguishes the
    two: a field that is not set has its default in reads, repr, comparisons and hashes. `dataclasses.replace` passes
    all fields; if all of several fields are passed, only those with other values than their defaults are set.

    An unknown name is a `TypeError` that suggests a similar one, and so is a subclass of a configuration: a constructor
    of its own would be called with other arguments than the fields that it sets.
    """

    #: The names of the fields that are set.
    _set: frozenset[str]

    def __init_subclass__(cls) -> None:
        if base := next((base for base in cls.__bases__ if dataclasses.is_dataclass(base)), None):
            raise TypeError(f"{cls.__name__}: {base.__name__} has no subclasses; write a function that returns one")

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Notes which fields are passed. `__init__` refuses positional arguments."""
        fields = fields_of(cls)
        if unknown := [name for name in given if name not in fields]:
            cls._refuse(unknown)
        config = super().__new__(cls)
        is_replaced = 1 < len(given) == len(fields)
        names = (name for name in given if not is_replaced or given[name] != _default_of(fields[name]))
        config.__dict__["_set"] = frozenset(names)
        return config

    def replaced(self, **given: Any) -> Self:
        """A copy with other values of fields, which are set. Each other field is set in the copy if it is set here."""
        config = type(self)(**{name: getattr(self, name) for name in self._set} | given)
        config.__dict__["_set"] = self._set.union(given)
        return config

    @classmethod
    def _refuse(cls, names: list[str]) -> NoReturn:
        """Raises the error of names that are not fields."""
        raise TypeError(f"{cls.__name__} has no field {names[0]!r}{nearest(names[0], fields_of(cls))}")


def fields_of(kind: type[ConfigBase]) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a configuration, by their names."""
    return {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # always a dataclass


def nearest(name: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """The end of a message about an unknown name: the most similar one, also of other classes, or all known ones."""
    names = sorted(known)
    similar = difflib.get_close_matches(name, [*names, *elsewhere], n=1, cutoff=0.5)
    return f"; did you mean {similar[0]}?" if similar else f": its fields are {', '.join(names)}"


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
