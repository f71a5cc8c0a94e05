"""JSON and text are as Python decodes them."""

import json
import pickle

import pytest

from torchobj import decode


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000])
def test_json_that_is_nested_too_deeply_is_an_error_of_json(data):
    with pytest.raises(json.JSONDecodeError, match="nested too deeply") as raised:
        decode.json(data)
    assert isinstance(pickle.loads(pickle.dumps(raised.value)), json.JSONDecodeError)
    assert decode.json(b"[" * 500 + b"]" * 500)


def test_text_and_json_raise_what_python_does():
    with pytest.raises(ValueError, match="4300 digits"):
        decode.json(b"1" * 5000)
    with pytest.raises(UnicodeDecodeError):
        decode.json(b'"\xff"')
    with pytest.raises(json.JSONDecodeError):
        decode.json(b"{")
    with pytest.raises(UnicodeDecodeError):
        decode.text(b"\xff")
    assert decode.text(b"\xff", errors="replace") == "\ufffd"
