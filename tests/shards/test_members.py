"""Headers of members are those of tarfile."""

import tarfile

from hypothesis import example, given
from hypothesis import strategies as st

from torchobj.shards.members import end_of_archive, header, padding


@given(
    st.text(min_size=1, max_size=130).filter(lambda name: "\0" not in name),
    st.integers(0, 1 << 40),
)
@example("a" * 100, 8**11 - 1)
@example("a" * 101, 8**11)
@example("é" * 50, 0)
def test_headers_are_those_of_tarfile(name, size):
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o444
    assert header(name, size) == info.tobuf(tarfile.PAX_FORMAT)


@given(st.integers(0, 1 << 40))
def test_archives_end_with_two_blocks_and_a_whole_record(blocks):
    end = end_of_archive(512 * blocks)
    assert 1024 <= len(end) < 1024 + 10240
    assert (512 * blocks + len(end)) % 10240 == 0
    assert not any(end)


@given(st.integers(0, 10_000))
def test_contents_fill_whole_blocks(size):
    assert (size + len(padding(size))) % 512 == 0
    assert len(padding(size)) < 512
