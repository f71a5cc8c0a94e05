"""Checks the fields of configurations. A `ConfigError` names the field, its value and the allowed values."""

import math
from typing import Any, get_args

from torchobj.exceptions import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def check(name: str, value: object, allowed: str, *, ok: bool) -> None:
    """Raises a `ConfigError` unless `ok`."""
    if not ok:
        raise ConfigError(f"{name}={value!r}: must be {allowed}")


def check_callable(name: str, value: object) -> None:
    """Checks an argument that is callable or None, as the transform of a dataset."""
    check(name, value, "callable, or None", ok=value is None or callable(value))


def _shown(value: object) -> object:
    """A value for a message: of a container the type only, because its items may be secrets in the wrong place."""
    return type(value) if isinstance(value, (list, tuple, dict, set)) else value


def check_number(name: str, value: object, low: float, high: float, unit: str = "", *, whole: bool = True) -> None:
    """Checks that a value is a number in `low..high`, both included."""
    kinds = int if whole else (int, float)
    number = value if isinstance(value, kinds) and not isinstance(value, bool) else math.nan
    text = {5 * MIB: "5 MiB", 5 * GIB: "5 GiB", MIB: "1 MiB", 64 * GIB: "64 GiB"}
    allowed = f"{text.get(int(low), low)}..{text.get(int(high), high)}{unit}"
    check(name, _shown(value), allowed, ok=low <= number <= high)


def check_kinds(config: object, allowed: str, kinds: tuple[type, ...], *names: str) -> None:
    """Checks the types of fields."""
    for name in names:
        value = getattr(config, name)
        check(name, _shown(value), allowed, ok=isinstance(value, kinds))


def check_auto_or_bool(config: object, name: str) -> None:
    """Checks that a field is True, False or `auto`."""
    value = getattr(config, name)
    check(name, value, "auto, True or False", ok=isinstance(value, bool) or value == "auto")


def check_choices(config: object, **literals: Any) -> None:
    """Checks that fields have one of the values of a `Literal`, given by their names."""
    for name, literal in literals.items():
        value, choices = getattr(config, name), get_args(literal)
        allowed = f"{', '.join(map(str, choices[:-1]))} or {choices[-1]}"
        check(name, _shown(value), allowed, ok=value in choices)
