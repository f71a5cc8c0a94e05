"""How the command line shows keys, sizes and times."""

import pytest

from torchobj.cli.output import age_s, duration, escaped, human_size


@pytest.mark.parametrize("text", ["\x1b[2J", "\x9b2J", "\r", "\u202e", "\u2066", "\ud800", "\x00"])
def test_characters_that_control_a_terminal_are_escaped(text):
    assert escaped(text).isascii() and escaped(text).isprintable()
    assert escaped(f"é {text} 日本").startswith("é \\") and escaped(f"é {text} 日本").endswith(" 日本")


def test_sizes_have_three_digits():
    sizes = [0, 999, 1000, 1023, 1024, 10_239, 10_240, 102_349, 1 << 20, (1 << 30) - 1, 1 << 62]
    assert [human_size(size) for size in sizes] == [
        "0 B", "999 B", "0.98 KiB", "1.00 KiB", "1.00 KiB", "10.0 KiB", "10.0 KiB", "100 KiB", "1.00 MiB", "1.00 GiB",
        "4.00 EiB",
    ]  # fmt: skip


def test_ages_have_a_unit():
    assert [age_s(text) for text in ("90", "2m", "1.5h", "7d", "1w")] == [90, 120, 5400, 604_800, 604_800]
    for text in ("", "h", "-1h", "1y", "1h30m"):
        with pytest.raises(ValueError, match="12h"):
            age_s(text)


def test_durations_grow_with_their_unit():
    assert [duration(seconds) for seconds in (0.0004, 0.5, 59.94, 61, 90_000)] == [
        "0.4 ms",
        "500.0 ms",
        "59.9 s",
        "0:01:01",
        "1 day, 1:00:00",
    ]
