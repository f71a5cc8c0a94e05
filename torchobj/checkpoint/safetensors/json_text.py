"""Parses JSON of untrusted files member by member: memory is bounded by a small multiple of the text's length.

`json.loads` needs 30 times the memory of a text of empty lists.
"""

import json
import re
import reprlib
from collections.abc import Callable, Iterator
from typing import Any

from torchobj.exceptions import CheckpointError

__all__ = ["JsonText"]

_SPACE = re.compile(r"[ \t\n\r]*")

#: Maximum length of a value that is not an object of strings.
_VALUE_CHARS = 16 << 10


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("an object has a name twice")
    return members


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


class JsonText:
    """A JSON text, which is parsed from its start to its end.

    Args:
        data: The text, in UTF-8.

    Raises:
        CheckpointError: The data is not UTF-8. All methods raise it too: if the text is not valid JSON, or an object
            has a name twice.
    """

    def __init__(self, data: bytes) -> None:
        try:
            self._text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"not valid JSON: {error}") from None
        self._at = 0

    def members(self, value_of: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
        """Yields the members of the object that follows: each name, and what `value_of` returns for it.

        `value_of` parses the value by `string`, `strings` or `value`.
        """
        self._expect("{")
        names: set[str] = set()
        if self._expect('"}') == "}":
            return
        self._at -= 1
        while True:
            name = self.string()
            if name in names:
                raise CheckpointError(f"the name {reprlib.repr(name)} occurs twice")
            names.add(name)
            self._expect(":")
            yield name, value_of(name)
            if self._expect(",}") == "}":
                return

    def strings(self) -> dict[str, str]:
        """Returns the object that follows, whose values are strings."""
        return dict(self.members(lambda _: self.string()))

    def string(self) -> str:
        """Returns the string that follows."""
        self._expect('"')
        text: str
        text, self._at = self._decoded(self._text, self._at - 1)
        try:
            # Half of a surrogate pair is no character.
            text.isascii() or text.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(f"not valid JSON: {error}") from None
        return text

    def value(self) -> Any:
        """Returns the value that follows, if it is not longer than 16 KiB."""
        self._skip_space()
        value, length = self._decoded(self._text[self._at : self._at + _VALUE_CHARS], 0)
        self._at += length
        return value

    def end(self) -> None:
        """Checks that only white space follows."""
        self._skip_space()
        if self._at < len(self._text):
            raise CheckpointError(f"not valid JSON: character {self._at}: expected the end")

    def _skip_space(self) -> None:
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space else self._at

    def _expect(self, characters: str) -> str:
        """Returns the next character, which is one of these."""
        self._skip_space()
        found = self._text[self._at : self._at + 1]
        if not found or found not in characters:
            expected = " or ".join(characters)
            raise CheckpointError(f"not valid JSON: character {self._at}: {found!r}, expected {expected}")
        self._at += 1
        return found

    def _decoded(self, text: str, start: int) -> tuple[Any, int]:
        """Returns the value that starts there, and its end."""
        try:
            return _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"not valid JSON after character {self._at}: {error}") from None
