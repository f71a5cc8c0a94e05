"""Decodes the fields of samples of tar shards."""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torchobj.config.checks import check

__all__ = ["Decode", "check_decode", "decoded"]

#: Callables by extension, each of which converts a `Buffer`.
Decode: TypeAlias = Mapping[str, Callable[[Any], Any]]


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
