"""The `fields` parameter: parses a mask, verifies it against the known fields, and applies it to JSON.

Source: GCS documentation, "Request endpoints and partial responses": `a,b(c,d),e/f,*`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .errors import GcsError

# The fields of a resource: None is a value, a mapping an object or a list of objects, ANY an object with any fields.
Schema = Mapping[str, Any]
ANY: Schema = {}
_WORDS = re.compile(r"[A-Za-z0-9_.\-]+|[*,/()]")
Mask = dict[str, Any]


def _invalid(mask: str) -> GcsError:
    return GcsError("invalid", f"Invalid field selection {mask}", parameter="fields")


class _Parser:
    """Parses one mask by recursive descent."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._words = _WORDS.findall(text)
        if "".join(self._words) != text.replace(" ", ""):
            raise _invalid(text)

    def whole(self) -> Mask:
        mask = self._list()
        if self._words:
            raise _invalid(self._text)
        return mask

    def _list(self) -> Mask:
        mask = self._path()
        while self._next_is(","):
            mask.update(self._path())
        return mask

    def _path(self) -> Mask:
        if not self._words or self._words[0] in ",/()":
            raise _invalid(self._text)
        name = self._words.pop(0)
        if self._next_is("/"):
            return {name: self._path()}
        if self._next_is("("):
            inner = self._list()
            if not self._next_is(")"):
                raise _invalid(self._text)
            return {name: inner}
        return {name: None}

    def _next_is(self, word: str) -> bool:
        found = self._words[:1] == [word]
        if found:
            del self._words[0]
        return found


def _verify(mask: Mask, schema: Schema, text: str) -> None:
    for name, inner in mask.items():
        if name == "*":
            continue
        if schema is not ANY and name not in schema:
            raise _invalid(text)
        inner_schema = ANY if schema is ANY else schema[name]
        if inner is not None:
            if inner_schema is None:
                raise _invalid(text)
            _verify(inner, inner_schema, text)


def _apply(mask: Mask, value: Any) -> Any:
    if isinstance(value, list):
        return [_apply(mask, element) for element in value]
    kept = {}
    for name, content in value.items():
        if name in mask or "*" in mask:
            inner = mask.get(name, mask.get("*"))
            kept[name] = content if inner is None else _apply(inner, content)
    return kept


def masked(text: str | None, resource: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """Returns the selected fields of a resource; raises GcsError if the mask names one that the schema lacks."""
    if text is None:
        return resource
    mask = _Parser(text).whole()
    _verify(mask, schema, text)
    selected: dict[str, Any] = _apply(mask, resource)
    return selected
