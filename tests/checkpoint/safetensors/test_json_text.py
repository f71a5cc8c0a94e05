"""JSON of untrusted files: what is refused, and that memory is bounded."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchobj.checkpoint.safetensors.json_text import JsonText
from torchobj.exceptions import CheckpointError

#: What UTF-8 can represent.
TEXTS = st.text(st.characters(codec="utf-8"))
VALUES = st.none() | st.booleans() | st.integers() | st.lists(st.integers(), max_size=3) | TEXTS
SPACE = st.text(" \t\n\r", max_size=2)


def parsed(data):
    text = JsonText(data)
    found = dict(text.members(lambda name: text.strings() if name == "strings" else text.value()))
    text.end()
    return found


@given(st.dictionaries(TEXTS.filter(lambda name: name != "strings"), VALUES), st.dictionaries(TEXTS, TEXTS), SPACE)
def test_an_object_is_parsed_as_by_json(values, strings, space):
    expected = values | {"strings": strings}
    for ensure_ascii in (True, False):
        text = json.dumps(expected, ensure_ascii=ensure_ascii, separators=(f"{space},{space}", f"{space}:{space}"))
        assert parsed(f"{space}{text}{space}".encode()) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "character 0: '', expected {"),
        (b"[]", "expected {"),
        (b"{", 'expected " or }'),
        (b'{"a"}', "expected :"),
        (b'{"a":1', "expected , or }"),
        (b'{"a":1,}', 'expected "'),
        (b'{"a":1}x', "expected the end"),
        (b'{"a":1 2}', "expected , or }"),
        (b'{"a":}', "Expecting value"),
        (b'{"a":nul}', "Expecting value"),
        (b"{'a':1}", 'expected "'),
        (b'{"a', "Unterminated string"),
        (b'{"a\n":1}', "Invalid control character"),
        (b'{"\xff":1}', "utf-8"),
        (b'{"\\ud800":1}', "surrogate"),
        (b'{"a":1,"a":2}', "'a' occurs twice"),
        (b'{"\\u0061":1,"a":2}', "'a' occurs twice"),
        (b'{"a":{"b":1,"b":2}}', "a name twice"),
        (b'{"strings":{"b":"1","b":"2"}}', "'b' occurs twice"),
        (b'{"strings":{"b":1}}', 'expected "'),
        (b'{"strings":"b"}', "expected {"),
        (b'{"a":' + b"[" * 10_000, "recursion|Expecting"),
        (b'{"a":"' + b"x" * 20_000 + b'"}', "Unterminated string"),
        (b'{"a":' + b"1" * 5_000 + b"}", "Exceeds the limit"),
    ],
)
def test_what_is_not_valid_is_refused(data, message):
    with pytest.raises(CheckpointError, match=message):
        parsed(data)


@pytest.mark.parametrize(
    "data",
    [b'{"a":[' + b"[]," * 1_000_000, b'{"a":' + b"{" * 3_000_000, b'{"a":[' + b'{"":{}},' * 400_000, b"{" * 3_000_000],
    ids=["lists", "objects", "members", "nested"],
)
def test_the_memory_of_a_hostile_text_is_bounded(data):
    """json.loads takes 90 to 200 MB for them."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            parsed(data)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data) + (4 << 20)
    finally:
        tracemalloc.stop()
