"""Decodes JSON and text."""

import json as json_module
from typing import Any

from torchobj.decode.data import Data, memory_of


def json(data: Data) -> Any:
    """Decodes JSON.

    Raises:
        json.JSONDecodeError: It is not JSON, or lists and objects are nested more deeply than Python's parser permits.
            It is a ValueError, as the others are.
        UnicodeDecodeError: It is not text in UTF-8, UTF-16 or UTF-32.
        ValueError: An integer has more digits than `sys.get_int_max_str_digits()`.
    """
    try:
        return json_module.loads(bytes(memory_of(data)))
    except RecursionError:
        raise json_module.JSONDecodeError("Lists and objects are nested too deeply", "", 0) from None


def text(data: Data, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Decodes text.

    Args:
        data: The object.
        encoding: Name of the encoding.
        errors: What to do with bytes that are not text, as for `bytes.decode`.

    Raises:
        UnicodeDecodeError: It is not text in this encoding.
    """
    return str(memory_of(data), encoding, errors)
