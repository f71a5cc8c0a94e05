"""Samples of tar shards, and the decoding of their fields."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from torchobj.config.checks import check

logger = logging.getLogger("torchobj")

#: Maximum number of fields that a message names.
_SHOWN = 10

#: Callables by extension, each of which converts a `Buffer`.
Decode: TypeAlias = Mapping[str, Callable[[Any], Any]]


class Sample(dict[str, Any]):
    """A sample as a dict, whose KeyError of a missing field names the sample. A copy, as in a batch, is a dict."""

    def __missing__(self, field: object) -> Any:
        names = ", ".join(name for name in self if not name.startswith("__"))
        source = f", {self['__url__']}" if "__url__" in self else ""
        raise KeyError(f"no field {field!r} in {self.get('__key__')!r}{source}: its fields are {names}")

    def __copy__(self) -> dict[str, Any]:
        return dict(self)


def check_decode(decode: Any) -> dict[str, Callable[[Any], Any]]:
    """The `decode` argument of a dataset as a dict.

    Raises:
        ConfigError: It is not a mapping of extensions to callables.
    """
    given = {} if decode is None else decode
    ok = isinstance(given, Mapping) and all(
        isinstance(field, str) and callable(function) for field, function in given.items()
    )
    check("decode", decode, "a dict of extensions, such as 'jpg', to callables", ok=ok)
    for field in given:
        is_extension = field == field.lower() and not field.startswith(".") and not re.search(r"[;\s]", field)
        check("decode", field, "an extension in lower case without a leading dot, one per entry", ok=is_extension)
    return dict(given)


def decoded(sample: dict[str, Any], decode: Decode) -> None:
    """Decodes the fields of a sample in place.

    Raises:
        Exception: That of a callable, with a note that names the field and the key.
    """
    for field, function in decode.items():
        if field in sample:
            try:
                sample[field] = function(sample[field])
            except Exception as error:
                error.add_note(f"in decode of {field!r} of {sample['__key__']!r}, {sample['__url__']}")
                raise


def warn_of_decode(decode: Decode, fields: Iterable[str], where: str) -> None:
    """Warns if none of the fields of a sample, or of all samples, is decoded."""
    found = [field for field in fields if not field.startswith("__")]
    if decode and found and not any(field in decode for field in found):
        logger.warning(
            "%s has the fields %s; decode has only %s, so that nothing is decoded; name the extensions that follow the "
            "first dot of the file names",
            where,
            ", ".join(sorted(found)[:_SHOWN]) + (", ..." if len(found) > _SHOWN else ""),
            ", ".join(decode),
        )
