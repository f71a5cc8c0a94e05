"""Tar shards: errors, compressed shards, shared memory, resuming, and the ranges that an index reads."""

import bz2
import gc
import gzip
import io
import itertools
import pickle
import tarfile
import weakref

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torchobj
from tests.support.tar_shards import URL, make, members, plain, read, walk
from torchobj import exceptions
from torchobj._torchobj import Buffer, ObjectReader, TarIndexer, TarReader

REG = tarfile.REGTYPE
SHARD = make([("a/0.jpg", REG, b"j" * 700), ("a/0.cls", REG, b"0"), ("a/1.jpg", REG, b""), ("a/1.cls", REG, b"1")])
SAMPLES = [
    {"__key__": "a/0", "__url__": URL, "jpg": b"j" * 700, "cls": b"0"},
    {"__key__": "a/1", "__url__": URL, "jpg": b"", "cls": b"1"},
]
cuts = st.lists(st.integers(0, 1 << 20), max_size=6)


def zstd(data, frames=1):
    size = len(data) // frames + 1
    return b"".join(
        pyarrow.compress(data[at : at + size], codec="zstd", asbytes=True) for at in range(0, len(data), size)
    )


def gzips(data, parts=1):
    size = len(data) // parts + 1
    return b"".join(gzip.compress(data[at : at + size]) for at in range(0, len(data), size))


def samples(found):
    return [plain(sample) for *_, sample in found]


def test_a_sample_is_a_dict_of_its_members():
    found, error = read(SHARD)
    assert error is None
    assert samples(found) == SAMPLES
    assert [(begin, end, key) for begin, end, key, _ in found] == [(0, 2560, "a/0"), (2560, 4096, "a/1")]
    assert list(found[0][3]) == ["__key__", "__url__", "jpg", "cls"]


def test_a_sample_is_returned_as_soon_as_the_next_one_begins():
    reader = TarReader(URL)
    assert reader.push(Buffer(SHARD[:2560])) == []
    assert samples(reader.push(Buffer(SHARD[2560:3072]))) == SAMPLES[:1]
    # The blocks of zeros end the shard.
    assert samples(reader.push(Buffer(SHARD[3072:]))) == SAMPLES[1:]
    assert reader.push(Buffer(b"ignored")) == reader.finish() == []


def test_reading_continues_at_every_sample():
    found, _ = read(SHARD)
    for index, (begin, end, *_) in enumerate(found):
        assert samples(read(SHARD[begin:], position=begin)[0]) == SAMPLES[index:]
        assert read(SHARD[end:], position=end)[0] == found[index + 1 :]


def test_members_share_the_memory_of_what_was_pushed():
    data = Buffer(SHARD)
    reader = TarReader(URL)
    sample = reader.push(data)[0][3]
    np.frombuffer(data, np.uint8)[512:515] = list(b"new")
    assert bytes(sample["jpg"][:4]) == b"newj"
    torn = TarReader(URL)
    torn.push(Buffer(SHARD[:600]))
    copied = torn.push(Buffer(SHARD[600:]))[0][3]
    assert copied["jpg"] == b"j" * 700


def test_members_keep_the_memory_and_nothing_else_does():
    data = Buffer(SHARD)
    reader = TarReader(URL)
    found = reader.push(data)
    alive = weakref.ref(data)
    array = np.frombuffer(found[0][3]["jpg"], np.uint8)
    del data, found
    gc.collect()
    assert alive() is not None
    assert bytes(array) == b"j" * 700
    del array
    gc.collect()
    assert alive() is None


def test_members_can_be_pickled():
    sample = read(SHARD)[0][0][3]
    assert plain(pickle.loads(pickle.dumps(sample))) == SAMPLES[0]


def test_a_reader_of_bytes_in_memory_can_be_pushed():
    reader = TarReader(URL)
    pushed = ObjectReader(URL, "bucket", "shard.tar", Buffer(SHARD))
    pushed.seek(99)
    assert samples(reader.push(pushed)) == SAMPLES
    pushed.close()
    with pytest.raises(ValueError, match="closed"):
        reader.push(pushed)


def test_a_reader_that_fetches_on_demand_is_refused():
    with torchobj.open("memory://tar-reader/shard.tar") as ahead:
        with pytest.raises(exceptions.ConfigError, match=r"memory://tar-reader/shard.tar: its bytes are not in memory"):
            TarReader(URL).push(ahead)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compression": "bz2"}, 'compression="bz2": must be'),
        ({"position": 100}, "position=100: must be"),
        ({"position": -512}, "position=-512"),
        ({"compression": "gzip", "position": 512}, "0 for a compressed shard"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(exceptions.ConfigError, match=message):
        TarReader(URL, **arguments)


def test_an_extension_that_occurs_twice_is_an_error_of_its_sample_only():
    shard = make([("a.x", REG, b"1"), ("a.X", REG, b"2"), ("b.x", REG, b"3"), ("c.__url__", REG, b"4")])
    found, error = read(shard)
    assert error is None
    assert [key for _, _, key, _ in found] == ["a", "b", "c"]
    for index, part in [(0, 'several members with the extension "x"'), (2, 'a member with the extension "__url__"')]:
        problem = found[index][3]
        assert isinstance(problem, exceptions.TarError)
        assert part in str(problem)
        assert problem.url == URL
    assert found[0][3].offset == 1024
    assert plain(found[1][3])["x"] == b"3"


def test_samples_before_an_error_are_returned_first():
    damaged = bytearray(SHARD)
    damaged[3072 + 2] ^= 1
    reader = TarReader(URL)
    assert samples(reader.push(Buffer(damaged))) == SAMPLES[:1]
    for call in [lambda: reader.push(Buffer(b"")), reader.finish]:
        with pytest.raises(
            exceptions.TarError, match=rf"tar shard {URL}: offset 3072: damaged header: the checksum"
        ) as caught:
            call()
        assert (caught.value.url, caught.value.offset) == (URL, 3072)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (b"", "offset 0: not a tar: it is empty"),
        (b"<html>" * 200, "offset 0: not a tar: the checksum is not a number"),
        (SHARD[:100], "offset 0: the shard ends in the middle: after 100 bytes of a header"),
        (SHARD[:900], r'offset 512: the shard ends in the middle: after 388 of 700 bytes of "a/0.jpg"'),
        (SHARD[:1300], r'the shard ends in the middle: 236 bytes of "a/0.jpg" or its padding are missing'),
        (bz2.compress(SHARD), "offset 0: "),
    ],
)
def test_what_is_not_a_shard_is_an_error_with_its_offset(shard, message):
    assert read(shard)[1].args[0].startswith(f"tar shard {URL}: offset ")
    with pytest.raises(exceptions.TarError, match=message):
        raise read(shard)[1]


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_sparse_members_are_refused_by_name(form):
    if form == "gnu":
        shard = make([("holes.bin", tarfile.GNUTYPE_SPARSE, b"")], "gnu")
    else:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            info = tarfile.TarInfo("GNUSparseFile.0/holes.bin")
            info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "holes.bin"}
            tar.addfile(info)
        shard = file.getvalue()
    with pytest.raises(exceptions.TarError, match='"holes.bin" is a sparse member'):
        raise read(shard)[1]
    with pytest.raises(exceptions.TarError, match='"holes.bin" is a sparse member'):
        walk(shard)


def test_global_headers_of_the_archive_are_read():
    shard = make([("a.x", REG, b"1")], "pax", pax_headers={"comment": "of all"})
    assert samples(read(shard)[0]) == [{"__key__": "a", "__url__": URL, "x": b"1"}]
    with pytest.raises(exceptions.TarError, match="a global pax header sets 'path' for all members"):
        raise read(make([("a.x", REG, b"1")], "pax", pax_headers={"path": "b.x"}))[1]


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
@settings(max_examples=40)
@given(members=members, cuts=cuts, parts=st.integers(1, 3))
def test_a_compressed_shard_has_the_samples_of_the_shard(compression, members, cuts, parts):
    shard = make(members)
    compressed = {"gzip": gzips, "zstd": zstd}[compression](shard, parts)
    found, error = read(compressed, cuts, compression)
    expected, failed = read(shard)
    assert error is failed is None
    assert [(begin, end, key) for begin, end, key, _ in found] == [(begin, end, key) for begin, end, key, _ in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[3] == other[3] or (str(one[3]) == str(other[3]))


@pytest.mark.parametrize(("compression", "compress"), [("gzip", gzips), ("zstd", zstd)])
def test_a_compressed_shard_that_ends_in_the_middle_is_an_error(compression, compress):
    whole = compress(SHARD)
    for length in range(len(whole)):
        with pytest.raises(
            exceptions.TarError, match=f"the {compression} stream ends in the middle, after {length} bytes"
        ):
            raise read(whole[:length], (), compression)[1]


@pytest.mark.parametrize(("compression", "compress"), [("gzip", gzips), ("zstd", zstd)])
def test_a_damaged_compressed_shard_is_an_error(compression, compress):
    whole = compress(SHARD)
    with pytest.raises(exceptions.TarError, match=f"bytes are not {compression}"):
        raise read(SHARD, (), compression)[1]
    with pytest.raises(exceptions.TarError, match=f"bytes after the end of the {compression} stream"):
        raise read(whole + b"more", (), compression)[1]
    if compression == "gzip":
        assert read(whole + bytes(100), (), compression)[1] is None
        wrong = bytearray(whole)
        wrong[-6] ^= 1  # The CRC-32 of the content.
        with pytest.raises(exceptions.TarError, match="gzip bytes are damaged"):
            raise read(bytes(wrong), (), compression)[1]


@pytest.mark.parametrize(("compression", "compress"), [("gzip", gzips), ("zstd", zstd)])
def test_one_push_decompresses_a_bounded_part(compression, compress):
    size = 4 << 20
    shard = make([(f"{index}.bin", REG, bytes(size)) for index in range(40)])
    reader = TarReader(URL, compression)
    counts = [len(reader.push(Buffer(compress(shard))))]
    while reader.pending:
        counts.append(len(reader.push(Buffer(b""))))
    assert max(counts) <= (68 << 20) // size
    assert sum(counts) + len(reader.finish()) == 40


def test_the_index_of_large_members_reads_two_percent_of_the_bytes():
    size = 4 << 20
    members = itertools.chain.from_iterable(
        [(f"{index}.bin", REG, bytes(size)), (f"{index}.cls", REG, b"1")] for index in range(16)
    )
    shard = make(members)
    rows, read_bytes = walk(shard)
    assert len(rows) == 16
    assert read_bytes <= len(shard) * 0.02


def test_an_index_needs_the_bytes_of_the_range():
    indexer = TarIndexer(URL, len(SHARD))
    assert indexer.next() == indexer.next() == (0, len(SHARD))
    with pytest.raises(
        exceptions.ConfigError, match=rf"100 bytes for the {len(SHARD)} bytes 0\.\.{len(SHARD)} of {URL}"
    ):
        indexer.feed(Buffer(SHARD[:100]))
    indexer.feed(Buffer(SHARD))
    assert indexer.next() is None
    assert [row[0] for row in indexer.samples()] == ["a/0", "a/1"]
    assert indexer.samples() == []


def test_the_index_of_a_shard_that_is_cut_is_an_error():
    with pytest.raises(exceptions.TarError, match=f'"a/1.cls" of 1 bytes ends at 4096, the shard at {3700}'):
        walk(SHARD[:3700])
    with pytest.raises(exceptions.TarError, match="it is empty"):
        walk(b"")


def test_readers_show_their_shard():
    assert repr(TarReader(URL)) == f"<torchobj._torchobj.TarReader {URL}>"
    assert repr(TarIndexer(URL, 1)) == f"<torchobj._torchobj.TarIndexer {URL}>"


def test_a_view_of_a_buffer_shares_its_memory():
    buffer = Buffer(b"0123456789")
    view = buffer.view(2, 8)
    assert view == b"234567"
    assert (len(view), view.view(1, 3), buffer.view(10, 10)) == (6, b"34", b"")
    memoryview(view)[0] = ord("x")
    assert bytes(buffer[:4]) == b"01x3"
    del buffer
    assert view == b"x34567"


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (3, 2), (0, 11), (11, 11)])
def test_a_view_is_within_its_buffer(start, end):
    with pytest.raises(IndexError, match=f"bytes {start}..{end} of a buffer of 10 bytes"):
        Buffer(b"0123456789").view(start, end)


def inflated(kind, sizes, random_bytes=0):
    """A compressed shard: a small sample, and one with members of these sizes in MiB. Of each MiB some bytes are random."""
    frame = gzip.compress if kind == "gzip" else zstd
    part = frame(np.random.default_rng(1).bytes(random_bytes) + bytes((1 << 20) - random_bytes))
    shard = frame(make([("0.x", REG, b"small")])[:1024])
    for number, size in enumerate(sizes):
        info = tarfile.TarInfo(f"1.{number}")
        info.size = size << 20
        shard += frame(info.tobuf()) + part * size
    return shard + frame(bytes(1024))


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
@pytest.mark.parametrize("sizes", [[300], [20] * 15], ids=["one member", "many members"])
def test_a_sample_of_a_thousand_times_its_compressed_bytes_is_an_error(kind, sizes):
    found, error = read(inflated(kind, sizes), compression=kind)
    assert samples(found) == [{"__key__": "0", "__url__": URL, "x": b"small"}]
    assert isinstance(error, exceptions.TarError) and error.offset == 1024
    assert 'sample "1" has more than' in str(error) and "in a shard that is not compressed" in str(error)


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_large_samples_of_usual_ratios_and_small_ones_of_any_are_read(kind):
    for sizes, random_bytes in (([270], 20_000), ([50], 0)):
        found, error = read(inflated(kind, sizes, random_bytes), compression=kind)
        assert (error, [len(sample) for *_, sample in found]) == (None, [3, 3])
        assert len(found[1][3]["0"]) == sizes[0] << 20
