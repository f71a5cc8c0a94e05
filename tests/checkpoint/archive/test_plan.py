"""The zip archive of torch.save: plans equal the files that torch writes, and parsed offsets are correct."""

import bisect
import io
import pickle
import zipfile
import zlib
from unittest import mock

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.saved_objects import whole
from torchobj.checkpoint.archive import device_memory, plan, zip_archive
from torchobj.checkpoint.archive.entries import select, selected
from torchobj.checkpoint.archive.pickling import Outline, uses_in
from torchobj.exceptions import CheckpointError, ConfigError

OVER_4_GIB = (4 << 30) + 5


def stock(value):
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def without_id(data):
    """The content of the records, except for torch's hash of the CRC-32, which a plan does not have."""
    content = zipfile.ZipFile(io.BytesIO(data))
    return {name: content.read(name) for name in content.namelist() if not name.endswith("serialization_id")}


def test_a_plan_names_another_device_for_all_storages():
    value = {"a": torch.ones(3), "b": [torch.ones(2, 2).t(), torch.nn.Parameter(torch.ones(1))]}
    for location, expected in ((None, "cpu"), ("cuda:7", "cuda:7")):
        records = zipfile.ZipFile(io.BytesIO(whole(plan.plan_of(value, location=location))))
        pickled = next(records.read(name) for name in records.namelist() if name.endswith("data.pkl"))
        assert [storage.location for storage in Outline(pickled).storages.values()] == [expected] * 3


@settings(max_examples=50)
@given(st.lists(st.integers(0, 3000), max_size=12))
def test_a_plan_equals_the_file_that_torch_writes(lengths):
    value = [torch.arange(length, dtype=torch.int16) for length in lengths]
    planned = whole(plan.plan_of(value))
    written = stock(value)
    assert len(planned) == len(written)
    assert zipfile.ZipFile(io.BytesIO(planned)).testzip() is None
    assert without_id(planned) == without_id(written)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 3000), max_size=12), st.sampled_from([1, 64, 4096]))
def test_payload_offsets_equal_torchs(lengths, alignment):
    config = pytest.importorskip("torch.utils.serialization.config", reason="torch 2.6 aligns to 64 always")
    before = config.save.storage_alignment
    config.save.storage_alignment = alignment
    try:
        data = stock([torch.arange(length, dtype=torch.int16) for length in lengths])
    finally:
        config.save.storage_alignment = before
    directory = zip_archive.find_directory(data[-256 << 10 :], len(data))
    records = zip_archive.records_of(data[directory.start : directory.end], directory.start)
    reader = torch._C.PyTorchFileReader(io.BytesIO(data))
    assert sorted(records) == sorted(reader.get_all_records())
    for name, record in records.items():
        assert record.payload == reader.get_record_offset(name)
        local = data[record.header : record.header + zip_archive.LOCAL_HEADER_BYTES]
        assert zip_archive.payload_of(record, local) == record.payload
        assert record.stored
        content = data[record.payload : record.payload + record.size]
        assert zlib.crc32(content) == record.crc32
        assert data[record.crc32_field : record.crc32_field + 4] == record.crc32.to_bytes(4, "little")
        if record.size:
            at = zip_archive.crc32_of_descriptor(record.payload, record.size)
            assert data[at : at + 4] == record.crc32.to_bytes(4, "little")


class Sparse(io.RawIOBase):
    """A plan as a file, with holes read as zeros that take no memory."""

    def __init__(self, planned):
        self.parts, self.at = [], 0
        at = 0
        for piece in planned.pieces():
            data = bytes(4) if isinstance(piece, plan.Field) else piece
            length = data.storage.nbytes() if isinstance(data, plan.Hole) else len(data)
            self.parts.append((at, length, data))
            at += length
        self.size = at

    def seek(self, offset, whence=io.SEEK_SET):
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def tell(self):
        return self.at

    def seekable(self):
        return True

    def readable(self):
        return True

    def readinto(self, buffer):
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and self.at < self.size:
            start, length, data = self.parts[bisect.bisect(self.parts, self.at, key=lambda part: part[0]) - 1]
            count = min(len(view) - done, start + length - self.at)
            here = self.at - start
            view[done : done + count] = bytes(count) if isinstance(data, plan.Hole) else data[here : here + count]
            done, self.at = done + count, self.at + count
        return done


def test_storages_over_4_gib_are_planned_and_parsed_without_their_memory():
    # Memory is allocated only when it is accessed.
    value = [torch.ones(3), torch.empty(OVER_4_GIB, dtype=torch.uint8), torch.ones(5), torch.empty(0)]
    planned = plan.plan_of(value)
    file = Sparse(planned)
    assert file.size == planned.size > OVER_4_GIB
    holes = {hole.start: hole.storage.nbytes() for hole in planned.holes}
    assert list(holes.values()) == [12, OVER_4_GIB, 20]
    entries = {entry.filename: entry for entry in zipfile.ZipFile(file).infolist()}
    assert entries["archive/data/1"].file_size == OVER_4_GIB
    assert entries["archive/data/2"].header_offset > 1 << 32
    file.seek(0)
    reader = torch._C.PyTorchFileReader(file)
    assert [reader.get_record_offset(f"data/{number}") for number in range(3)] == list(holes)
    file.seek(-4096, io.SEEK_END)
    directory = zip_archive.find_directory(file.read(), planned.size)
    file.seek(directory.start)
    records = zip_archive.records_of(file.read(directory.end - directory.start), directory.start)
    assert [(records[f"data/{n}"].payload, records[f"data/{n}"].size) for n in range(3)] == list(holes.items())
    for record in (records[f"data/{n}"] for n in range(3)):
        file.seek(record.header)
        assert zip_archive.payload_of(record, file.read(zip_archive.LOCAL_HEADER_BYTES)) == record.payload
        fields = [field.start for field in planned.fields if field.hole == record.payload]
        assert fields == [zip_archive.crc32_of_descriptor(record.payload, record.size), record.crc32_field]
        file.seek(record.payload + record.size)
        assert file.read(4) == b"PK\x07\x08"


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_directory_raises_checkpoint_error_or_parses_differently(data):
    body = bytearray(stock({"a": torch.ones(3), "b": torch.zeros(9)}))
    start = body.index(b"PK\x01\x02")
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(start, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        directory = zip_archive.find_directory(bytes(body), len(body))
        if directory is not None:
            zip_archive.records_of(bytes(body[directory.start : directory.end]), directory.start)
    except CheckpointError:
        pass


def test_an_outline_runs_no_code_and_lists_all_names():
    class Code:
        def __reduce__(self):
            return (exec, ("raise SystemError",))

    shared = torch.ones(3)
    value = {
        "model": {"weight": shared, "list": [torch.zeros(2), (shared[1:], 5)]},
        "code": Code.__new__(Code),
        "sparse": torch.eye(2).to_sparse(),
        3: torch.nn.Parameter(torch.ones(1)),
    }
    data = zipfile.ZipFile(io.BytesIO(stock(value))).read("archive/data.pkl")
    outline = Outline(data)
    assert "builtins.exec" in outline.globals
    assert list(outline.names.values()) == ["model.weight", "model.list.0", "sparse", "sparse", "3"]
    assert [(use.path, use.dense) for use in uses_in(outline.tree)] == [
        ("model.weight", True),
        ("model.list.0", True),
        ("model.list.1.0", True),
        ("sparse", False),
        ("sparse", False),
        ("3", True),
    ]
    assert [storage.nbytes for storage in outline.storages.values()] == [12, 8, 32, 8, 4]


@pytest.mark.parametrize("data", [b"", b"text", pickle.dumps({"a": 1})[:-1], b"\x80\x02(U\x04textq\x00Q."])
def test_other_data_than_a_pickle_of_torch_has_no_outline(data):
    with pytest.raises(CheckpointError, match=r"data\.pkl is not a pickle of torch\.save"):
        Outline(data)


trees = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from(["a", "b", "a.b", 1]), inner, max_size=3), max_leaves=9
)


def leaves_of(tree, path=()):
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: value for name, inner in tree.items() for key, value in leaves_of(inner, (*path, name)).items()}


@settings(max_examples=200)
@given(trees, st.lists(st.sampled_from(["a", "b", "1", "a.b", "a.b.a", "b.1"]), max_size=3))
def test_selected_entries_are_those_that_the_keys_name(tree, keys):
    if not isinstance(tree, dict):
        return
    try:
        paths = select(tree, keys, "s3://b/k")
    except ConfigError:
        return
    dotted = {path: ".".join(map(str, path)) for path in leaves_of(tree)}
    expected = {
        path: value
        for path, value in leaves_of(tree).items()
        if any(f"{dotted[path]}.".startswith(f"{key}.") for key in keys)
    }
    assert leaves_of(selected(tree, paths)) == expected


@settings(max_examples=100)
@given(st.lists(st.integers(0, 100), max_size=20), st.booleans())
def test_reads_through_blocks_put_each_byte_in_place_within_the_memory_limit(lengths, checksum):
    source = bytes(range(256)) * 8
    targets = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    destinations = [(3 * number, target) for number, target in enumerate(targets)]
    largest, addresses = [], set()

    def read(segments):
        largest.append(sum(len(memory) for _, memory in segments))
        addresses.add(numpy.asarray(segments[0][1]).ctypes.data)
        for offset, memory in segments:
            memory[:] = memoryview(source)[offset : offset + len(memory)]
        return [zlib.crc32(memory) if checksum else 0 for _, memory in segments]

    with mock.patch.multiple(device_memory, BLOCK_BYTES=16, BLOCKS_BYTES=64):
        sums = device_memory.fill(destinations, read)
    wanted = [source[offset : offset + len(target)] for offset, target in destinations]
    assert [bytes(target.numpy()) for target in targets] == wanted
    assert sums == [zlib.crc32(data) if checksum else 0 for data in wanted]
    assert max(largest, default=0) <= 16
    assert len(addresses) <= 4
