"""The bytes around a tensor are those of torch.save; slices, packing and sums are what arithmetic says."""

import io
import itertools
import math
import random
import zipfile
import zlib

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils.serialization import config as torch_config

from torchobj import _torchobj
from torchobj.checkpoint.dcp import foreign, slices, writing
from torchobj.checkpoint.dcp import item as items
from torchobj.exceptions import IntegrityError

SHAPES = [(), (0,), (3, 0), (1,), (5,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (300,), (70_000,), (1, 1, 1), (0, 2)]
DTYPES = sorted(items._DTYPES, key=str)


def tensor_of(dtype, shape):
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


def stock(tensor):
    out = io.BytesIO()
    torch.save(tensor, out)
    return out.getvalue()


def ours(tensor):
    item = items.item_of(tensor.dtype, tensor.shape)
    payload = items.stand_in(tensor).numpy().tobytes()
    assert len(payload) == item.payload_bytes
    if not payload:
        assert len(item.before) == item.length
        return item.before
    crc32 = zlib.crc32(payload).to_bytes(4, "little")
    whole = b"".join((item.before, payload, items.DESCRIPTOR_MARK, crc32, item.middle, crc32, item.after))
    assert len(whole) == item.length
    return whole


def without_id(archive):
    """The bytes with a constant in place of the serialization id, which torch makes of the names, and of its sum."""
    own = zipfile.ZipFile(io.BytesIO(archive)).read("archive/.data/serialization_id")
    return archive.replace(own, bytes(40)).replace(zlib.crc32(own).to_bytes(4, "little"), bytes(4))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_item_is_what_torch_saves_byte_for_byte(dtype):
    for shape in SHAPES:
        tensor = tensor_of(dtype, shape)
        assert without_id(ours(tensor)) == without_id(stock(tensor)), shape
        loaded = torch.load(io.BytesIO(ours(tensor)))
        assert (loaded.dtype, loaded.shape) == (dtype, tensor.shape)
        assert ours(loaded) == ours(tensor)
        zipfile.ZipFile(io.BytesIO(ours(tensor))).testzip()


class Discarding:
    """A file that keeps what is small, and of what is large the length."""

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
    item = items.item_of(torch.uint8, (size,))
    assert item.length == out.length
    none = bytes(4)
    whole = b"".join((item.before, items.DESCRIPTOR_MARK, none, item.middle, none, item.after))
    stock_bytes = b"".join(out.kept)
    # What differs: without checksums torch leaves these fields empty, and the serialization id is its own.
    known = set()
    for content in (items._pickle(items._DTYPES[torch.uint8], (size,)), b"1", b"64", b"little", b"3\n"):
        crc32 = zlib.crc32(content).to_bytes(4, "little")
        for start in positions(whole, crc32):
            known.update(range(start, start + 4))
    for start in positions(whole, items._SERIALIZATION_ID):
        known.update(range(start, start + 40))
    for start in positions(whole, zlib.crc32(items._SERIALIZATION_ID).to_bytes(4, "little")):
        known.update(range(start, start + 4))
    assert set(differences(whole, stock_bytes)) <= known
    assert items.descriptor_bytes(size) == (24 if size >= (1 << 32) - 1 else 16)


def positions(where, what):
    start = where.find(what)
    while start >= 0:
        yield start
        start = where.find(what, start + 1)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_what_is_no_plain_memory_of_the_cpu_has_no_frame():
    plain = torch.rand(4, 4)
    assert items.stand_in(plain) is plain
    others = [
        plain.t(),
        plain[:, ::2],
        plain.to_sparse(),
        torch.rand(4, dtype=torch.complex64).conj(),
        torch.nn.Parameter(plain),
        torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8),
        torch.empty(4, device="meta"),
    ]
    assert all(items.stand_in(tensor) is None for tensor in others)
    assert items.stand_in(torch.rand(3).bfloat16()).dtype == torch.int16
    assert items.item_of(torch.qint8, (3,)) is None


def test_sums_of_joined_bytes_are_those_of_the_whole():
    content = random.Random(1).randbytes(5000)
    for cut in (0, 1, 7, 4096, 5000):
        first, second = content[:cut], content[cut:]
        assert _torchobj.crc32_joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(content)


def boxes():
    for shape in [(1,), (5,), (4, 3), (2, 3, 4), (3, 1, 4), (2, 1, 3, 2), ()]:
        spans = [[(start, end - start) for start in range(n) for end in range(start + 1, n + 1)] for n in shape]
        for box in itertools.product(*spans):
            yield shape, tuple(span[0] for span in box), tuple(span[1] for span in box)


def sliced(tensor, offsets, lengths):
    return tensor[tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))]


def test_runs_are_the_elements_of_a_slice_in_order():
    for shape, offsets, lengths in boxes():
        elements = torch.arange(math.prod(shape)).view(shape)
        run, starts = slices.runs_of(shape, offsets, lengths)
        found = [start + number for start in starts for number in range(run)]
        assert found == sliced(elements, offsets, lengths).reshape(-1).tolist(), (shape, offsets, lengths)


@pytest.mark.parametrize("most", [1, 3, 5, 12, 1000])
def test_tiles_cover_each_element_of_a_slice_once_and_are_small(most):
    for shape, offsets, lengths in boxes():
        elements = torch.arange(math.prod(shape)).view(shape)
        flat, out = elements.reshape(-1), torch.full(lengths, -1)
        for tile in slices.tiles_of(shape, offsets, lengths, most):
            count = math.prod(tile.shape)
            assert count <= max(most, shape[-1] if shape and most < shape[-1] else 1)
            rows = flat[tile.start : tile.start + count].view(tile.shape)
            place = sliced(out, tile.outer, tile.lengths)
            assert (place == -1).all()
            place.copy_(sliced(rows, tile.inner, tile.lengths))
        assert torch.equal(out, sliced(elements, offsets, lengths))


@pytest.mark.parametrize(
    "tensor",
    [torch.rand(50, 70).t(), torch.rand(3, 4, 5)[:, ::2], torch.rand(10, dtype=torch.complex64).conj(), torch.rand(())],
    ids=["transposed", "strided", "conjugated", "scalar"],
)
def test_copies_in_pieces_are_the_tensor(tensor, monkeypatch):
    monkeypatch.setattr(writing, "_PIECE_BYTES", 100)
    pieces = list(writing._staged_pieces(tensor))
    assert all(piece.is_contiguous() and piece.nbytes <= 100 and not piece.is_conj() for piece in pieces)
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), tensor.reshape(-1))


def write_item(name, count):
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([count]))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([count]))
    return WriteItem(MetadataIndex(name, [0]), WriteItemType.TENSOR, tensor_data=data)


def test_items_are_packed_the_largest_first():
    counts = [7, 1, 5, 3, 3, 1, 9, 2]
    planned = [write_item(str(number), count) for number, count in enumerate(counts)]
    planned += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in "xyz"]
    bins = writing._packed(planned, 3)
    assert sorted(item.index.fqn for content in bins for item in content) == sorted(item.index.fqn for item in planned)
    sizes = [sum(map(writing._item_bytes, content)) for content in bins]
    assert max(sizes) - min(sizes) <= 8
    assert writing._packed(planned[:2], 5) == [[planned[0]], [planned[1]]]
    assert writing._packed([], 3) == []


@pytest.mark.parametrize("shape", [(), (7,), (100, 30)])
def test_a_payload_is_found_in_an_archive_of_another_layout(shape):
    tensor = torch.rand(shape)
    with torch_config.patch("save.storage_alignment", 4096):
        archive = stock(tensor)
    ends = archive[: foreign.END_BYTES], archive[-foreign.END_BYTES :]
    pickle = items.pickle_of(tensor.dtype, tensor.shape)
    found = foreign.payload_in(*ends, len(archive), pickle, tensor.nbytes)
    content = tensor.numpy().tobytes()
    assert found is None or archive[found.offset :].startswith(content)
    whole = foreign.payload_in(archive, b"", len(archive), pickle, tensor.nbytes)
    assert archive[whole.offset :].startswith(content)
    assert whole.crc32 == zlib.crc32(content)
    assert foreign.payload_in(archive, b"", len(archive), pickle[:-1], tensor.nbytes) is None
    foreign.check_archive(archive, "it")
    flipped = bytearray(archive)
    flipped[whole.offset] ^= 1
    with pytest.raises(IntegrityError, match="it: record data/0"):
        foreign.check_archive(flipped, "it")


def test_a_payload_that_would_end_behind_its_archive_is_not_found():
    tensor = torch.rand(100, 30)
    archive = bytearray(stock(tensor))
    pickle = items.pickle_of(tensor.dtype, tensor.shape)
    place = archive.index(tensor.numpy().tobytes())
    # The local header ends where the payload begins; its last field says how long the padding is.
    header = archive.rindex(b"PK\x03\x04", 0, place)
    archive[header + 28 : header + 30] = (len(archive) - place).to_bytes(2, "little")
    assert foreign.payload_in(bytes(archive), b"", len(archive), pickle, tensor.nbytes) is None
