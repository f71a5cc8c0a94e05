"""The nesting depth of pickles, which limits what the unpickler hashes and remembers."""

import pytest

from torchobj._torchobj import pickle_nesting

UNBOUNDED = (1 << 32) - 1


def test_a_memo_index_beyond_the_number_of_opcodes_is_unbounded():
    assert pickle_nesting(b"\x80\x02Nq\x00q\x01q\x04.") == 0
    assert pickle_nesting(b"\x80\x02Nq\x04.") == UNBOUNDED
    assert pickle_nesting(b"\x80\x02Nr\x00\x00\x00\x04.") == UNBOUNDED
    assert pickle_nesting(b"Np99999999\n.") == UNBOUNDED


@pytest.mark.parametrize(
    ("pickle", "depth"),
    [
        (b"\x80\x04N.", 0),
        (b"\x80\x04).", 0),
        (b"\x80\x04N\x85\x85\x85.", 3),
        (b"\x80\x04]]]aa.", 2),
        (b"(lp0\n(lp1\na.", 1),
        (b"\x80\x04}X\x01\x00\x00\x00a]s.", 1),
        (b"\x80\x04](NN)\x85e.", 2),
    ],
)
def test_nested_containers_are_measured(pickle, depth):
    assert pickle_nesting(pickle) == depth


def test_depth_accumulates_through_the_memo():
    nested = b"".join(bytes([ord("h"), index, 0x85, 0x94, ord("0")]) for index in range(100))
    assert pickle_nesting(b"\x80\x04)\x94" + nested + b"h\x64.") == 100
    text = "(tp0\n" + "".join(f"0(g{index}\ntp{index + 1}\n" for index in range(50))
    assert pickle_nesting(f"{text}.".encode()) == 50


@pytest.mark.parametrize(("times", "depth"), [(20, 20), (40, UNBOUNDED), (5000, UNBOUNDED)])
def test_a_tuple_that_shares_its_parts_too_often_is_unbounded(times, depth):
    assert pickle_nesting(b"\x80\x04)" + b"2\x86" * times + b".") == depth


def test_arguments_are_not_opcodes():
    for head in (b"U\xff", b"C\xff", b"\x8c\xff", b"X\xff\0\0\0", b"\x8e\xff\0\0\0\0\0\0\0"):
        assert pickle_nesting(b"\x80\x04)" + head + b"\x85" * 255 + b"\x85.") == 1, head
    assert pickle_nesting(b"cmod\nname\n)\x85R.") == 2


def test_truncated_pickles_end_and_memo_indices_that_no_pickler_writes_are_unbounded():
    for pickle in (b"", b"X\xff\xff\xff\xff", b"\x8e" + b"\xff" * 8, b"\x85\x86\x87e1asRb.", b"S'a"):
        assert pickle_nesting(pickle) <= 4, pickle
    assert pickle_nesting(b")p 1_0 \n.") == UNBOUNDED
