"""The bytes around a tensor equal those of torch.save; slices, packing and checksums are correct."""

import io
import re
import zipfile
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.serialization import config as torch_config

from tests.support.tensors import DTYPES
from torchobj.checkpoint import StorageReader, StorageWriter
from torchobj.checkpoint.archive import plan
from torchobj.checkpoint.archive import zip_archive as archives
from torchobj.checkpoint.dcp import other_formats, save_items
from torchobj.exceptions import IntegrityError
from torchobj.store.tensor_memory import memory_of

SHAPES = [(), (0,), (3, 0), (1,), (5,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (300,), (70_000,), (1, 1, 1), (0, 2)]


def tensor_of(dtype, shape):
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


def stock(tensor):
    out = io.BytesIO()
    torch.save(tensor, out)
    return out.getvalue()


def ours(tensor):
    item = plan.tensor_archive(tensor.dtype, tensor.shape)
    assert plan.is_memory(tensor)
    payload = bytes(memory_of(tensor))
    assert len(payload) == item.payload_bytes
    if not payload:
        assert len(item.before) == item.length
        return item.before
    crc32 = zlib.crc32(payload).to_bytes(4, "little")
    whole = b"".join((item.before, payload, archives.DESCRIPTOR_MARK, crc32, item.middle, crc32, item.after))
    assert len(whole) == item.length
    return whole


def without_id(archive):
    """The bytes with a constant for the serialization id, a hash of names and checksums, and for its checksum."""
    own = zipfile.ZipFile(io.BytesIO(archive)).read("archive/.data/serialization_id")
    return archive.replace(own, bytes(40)).replace(zlib.crc32(own).to_bytes(4, "little"), bytes(4))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_item_equals_what_torch_saves_byte_for_byte(dtype):
    for shape in SHAPES:
        tensor = tensor_of(dtype, shape)
        assert without_id(ours(tensor)) == without_id(stock(tensor)), shape
        loaded = torch.load(io.BytesIO(ours(tensor)))
        assert (loaded.dtype, loaded.shape) == (dtype, tensor.shape)
        assert ours(loaded) == ours(tensor)
        zipfile.ZipFile(io.BytesIO(ours(tensor))).testzip()


class Discarding:
    """A file that keeps small writes, and the length of large ones."""

    def __init__(self):
        self.kept, self.length = [], 0

    def write(self, data):
        data = memoryview(data).cast("B")
        self.length += len(data)
        if len(data) < 1 << 20:
            self.kept.append(bytes(data))
        return len(data)

    def flush(self):
        pass


def differences(first, second):
    assert len(first) == len(second)
    return [number for number, (one, other) in enumerate(zip(first, second, strict=True)) if one != other]


@pytest.mark.parametrize("size", [(1 << 32) - 1, 1 << 32, (1 << 32) + 123, (1 << 32) - 700, (1 << 32) - 1500])
def test_an_item_of_four_gibibytes_has_the_wide_fields_of_torch(size):
    out = Discarding()
    with torch_config.patch("save.compute_crc32", False):
        # Never written to, so that it takes no memory.
        torch.save(torch.empty(size, dtype=torch.uint8), out)
    item = plan.tensor_archive(torch.uint8, (size,))
    assert item.length == out.length
    none = bytes(4)
    whole = b"".join((item.before, archives.DESCRIPTOR_MARK, none, item.middle, none, item.after))
    stock_bytes = b"".join(out.kept)
    # The differences: without checksums torch leaves these fields empty, and the serialization id differs.
    [own_id] = re.findall(rb"(?<!\d)\d{40}(?!\d)", whole)
    known = set()
    for content in (item.pickle, b"1", b"64", b"little", b"3\n", own_id):
        crc32 = zlib.crc32(content).to_bytes(4, "little")
        for start in positions(whole, crc32):
            known.update(range(start, start + 4))
    for start in positions(whole, own_id):
        known.update(range(start, start + 40))
    assert set(differences(whole, stock_bytes)) <= known


def positions(where, what):
    start = where.find(what)
    while start >= 0:
        yield start
        start = where.find(what, start + 1)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_tensors_without_plain_memory_on_the_cpu_have_no_archive():
    plain = torch.rand(4, 4)
    assert plan.is_memory(plain)
    assert plan.is_memory(torch.rand(3).bfloat16())
    others = [
        plain.t(),
        plain[:, ::2],
        plain.to_sparse(),
        torch.rand(4, dtype=torch.complex64).conj(),
        torch.nn.Parameter(plain),
        torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8),
        torch.empty(4, device="meta"),
    ]
    assert not any(plan.is_memory(tensor) for tensor in others)
    assert plan.tensor_archive(torch.qint8, (3,)) is None


def test_an_impossible_shape_has_no_archive_and_a_large_one_takes_no_memory():
    assert plan.tensor_archive(torch.uint8, (1 << 59,)) is None
    assert plan.tensor_archive(torch.uint8, (1 << 43,)).length > 1 << 43


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_saves_tensors_itself_if_its_layout_is_unknown(monkeypatch):
    """If torch's archive cannot be planned, items are written by torch."""
    writes = torch.save

    def with_another_descriptor(value, file, **settings):
        if isinstance(file, plan._Recorder):
            raise RuntimeError("this torch plans nothing")
        writes(value, file, **settings)

    plan.tensor_archive.cache_clear()
    monkeypatch.setattr(torch, "save", with_another_descriptor)
    try:
        saved = {"a": torch.rand(3, 5), "b": torch.rand(40_000), "c": torch.rand(30, 70).t()}
        url = "memory://unplanned/checkpoint"
        dcp.save(saved, storage_writer=StorageWriter(url), no_dist=True)
        found = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
        dcp.load(found, storage_reader=StorageReader(url), no_dist=True)
        assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    finally:
        plan.tensor_archive.cache_clear()


@pytest.mark.parametrize(
    "tensor",
    [torch.rand(50, 70).t(), torch.rand(3, 4, 5)[:, ::2], torch.rand(10, dtype=torch.complex64).conj(), torch.rand(())],
    ids=["transposed", "strided", "conjugated", "scalar"],
)
def test_copies_in_pieces_are_the_tensor(tensor, monkeypatch):
    monkeypatch.setattr(save_items, "_PIECE_BYTES", 100)
    pieces = list(save_items._staged_pieces(tensor))
    assert all(piece.is_contiguous() and piece.nbytes <= 100 and not piece.is_conj() for piece in pieces)
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), tensor.reshape(-1))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_files_of_a_rank_are_of_about_the_same_size(tmp_path):
    counts = [7, 1, 5, 3, 3, 1, 9, 2]
    state = {str(number): torch.ones(10_000 * count) for number, count in enumerate(counts)} | {"epoch": 3}
    dcp.save(state, storage_writer=StorageWriter(tmp_path.as_uri(), thread_count=3), no_dist=True)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.distcp")]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) <= 100_000


LIMIT_BYTES = 1 << 20


@pytest.mark.parametrize("shape", [(), (7,), (100, 30)])
def test_a_payload_is_found_in_an_archive_of_another_layout(shape):
    tensor = torch.rand(shape)
    with torch_config.patch("save.storage_alignment", 4096):
        archive = stock(tensor)
    ends = archive[: other_formats.END_BYTES], archive[-other_formats.END_BYTES :]
    expected = plan.tensor_archive(tensor.dtype, tensor.shape)
    found = other_formats.payload_in(*ends, len(archive), expected)
    content = tensor.numpy().tobytes()
    assert found is None or archive[found.offset :].startswith(content)
    whole = other_formats.payload_in(archive, b"", len(archive), expected)
    assert archive[whole.offset :].startswith(content)
    assert whole.crc32 == zlib.crc32(content)
    another = expected._replace(pickle=expected.pickle[:-1])
    assert other_formats.payload_in(archive, b"", len(archive), another) is None
    other_formats.check_archive(archive, LIMIT_BYTES, "it", verify=True)
    flipped = bytearray(archive)
    flipped[whole.offset] ^= 1
    other_formats.check_archive(bytes(flipped), LIMIT_BYTES, "it", verify=False)
    with pytest.raises(IntegrityError, match="it: record data/0"):
        other_formats.check_archive(bytes(flipped), LIMIT_BYTES, "it", verify=True)


def test_a_payload_that_would_end_behind_its_archive_is_not_found():
    tensor = torch.rand(100, 30)
    archive = bytearray(stock(tensor))
    expected = plan.tensor_archive(tensor.dtype, tensor.shape)
    place = archive.index(tensor.numpy().tobytes())
    # The local header ends where the payload begins; its last field says how long the padding is.
    header = archive.rindex(b"PK\x03\x04", 0, place)
    archive[header + 28 : header + 30] = (len(archive) - place).to_bytes(2, "little")
    assert other_formats.payload_in(bytes(archive), b"", len(archive), expected) is None
