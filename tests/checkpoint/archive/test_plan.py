"""Plans of files of torch.save: they equal the files that torch writes."""

import bisect
import io
import zipfile

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.saved_objects import stock, whole
from torchobj.checkpoint.archive import plan, zip_archive
from torchobj.checkpoint.archive.pickling import Outline

OVER_4_GIB = (4 << 30) + 5


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
