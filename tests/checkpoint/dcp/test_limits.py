"""Metadata and items that claim what is not so: each is a CheckpointError that names the object, and takes no memory."""

import contextlib
import io
import pickle
import tracemalloc
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.support.long_tables import often
from torchobj import Store, exceptions
from torchobj.checkpoint import StorageReader, StorageWriter
from torchobj.checkpoint.dcp import load_items, other_formats
from torchobj.checkpoint.dcp.metadata import check_described, load_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

URL = "memory://limits/run"
MOST_BYTES = 100 << 20
HUGE = (4 << 30, 1 << 40, (1 << 63) - 5000, 1 << 63, 1 << 70, 10**5000)


@pytest.fixture(autouse=True, scope="module")
def traced():
    """Traces once for all tests: Python 3.11 can crash when tracing stops while another thread enters the interpreter
    (python/cpython#128679), and threads of earlier tests may renew credentials.
    """
    tracemalloc.start()
    yield
    tracemalloc.stop()


@contextlib.contextmanager
def in_bounds():
    """The block takes less memory than `MOST_BYTES`."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    yield
    assert tracemalloc.get_traced_memory()[1] - before < MOST_BYTES


@pytest.fixture
def saved():
    """A checkpoint of 2.8 KB: its store, its metadata and the key of its file."""
    store = Store("memory://limits")
    store.delete([info.key for info in store.list()])
    dcp.save({"weight": torch.rand(30), "value": {"a": (1, 2)}}, storage_writer=StorageWriter(URL))
    metadata = pickle.loads(bytes(store.get("run/.metadata")))
    [key] = [info.key for info in store.list() if info.key.endswith(".distcp")]
    return store, metadata, key


def error_of_load(store, data, *, names=("weight", "value.a"), verify=True):
    """The error of a load with this metadata; less memory than `MOST_BYTES` was taken for it."""
    store.put("run/.metadata", data if isinstance(data, bytes) else pickle.dumps(data))
    state = {"weight": torch.zeros(30), "value": {"a": None}}
    state = {name: value for name, value in state.items() if any(key.startswith(name) for key in names)}
    with in_bounds(), pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=StorageReader(URL, verify=verify))
    [(error, _)] = caught.value.failures.values()
    return error


def index_of(metadata, name):
    return next(index for index in metadata.storage_data if index.fqn.startswith(name))


PLACES = [
    *({"length": length} for length in HUGE),
    *({"offset": offset} for offset in HUGE),
    *({"offset": offset, "length": length} for offset in HUGE for length in HUGE[:3]),
    *({field: value} for field in ("offset", "length") for value in (-1, -(1 << 63), -(1 << 70), True, 1.5, "5", None)),
    *({"relative_path": value} for value in (5, None, ["a"])),
    *({"relative_path": value} for value in ("", "/x", "c/../x", "a//b", "\\x", "\ud800", "\0")),
    {"length": 100_000},
    {"length": 3 << 20},
]


@pytest.mark.parametrize("item", often(1, ["weight", "value"]))
@pytest.mark.parametrize(
    "place", PLACES, ids=lambda place: repr({k: v if v != HUGE[-1] else "huge" for k, v in place.items()})
)
def test_a_place_that_cannot_be_is_refused_before_memory_is_taken(saved, item, place):
    store, metadata, key = saved
    for field, value in place.items():
        setattr(metadata.storage_data[index_of(metadata, item)], field, value)
    error = error_of_load(store, metadata, names=(item,))
    assert isinstance(error, exceptions.CheckpointError), error
    assert URL in str(error)
    if item == "value" and place.get("length") in (1 << 40, 4 << 30) and len(place) == 1:
        assert key in str(error)
        assert str(len(store.get(key))) in str(error)


def test_items_that_overlap_are_refused_and_the_same_item_twice_is_not(saved):
    store, metadata, key = saved
    weight, value = (metadata.storage_data[index_of(metadata, name)] for name in ("weight", "value"))
    first, second = sorted((weight, value), key=lambda info: info.offset)
    second.offset, second.length = second.offset - 10, second.length + 10
    error = error_of_load(store, metadata)
    assert isinstance(error, exceptions.CheckpointError)
    assert key in str(error)
    load_items.check_apart([first, _StorageInfo(key, first.offset, first.length)], URL)


def test_what_is_not_a_place_is_refused(saved):
    store, metadata, _ = saved
    for value in (5, None, ("a", 1, 2), {"offset": 1}):
        metadata.storage_data[index_of(metadata, "weight")] = value
        assert isinstance(error_of_load(store, metadata), exceptions.CheckpointError)


SIZES = [(-30,), (1 << 62,), (30, 1), (), (1 << 31, 1 << 31, 4), (0,) * 50]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("part", ["chunk", "offsets", "both"])
def test_a_size_that_cannot_be_is_refused(saved, size, part):
    store, metadata, _ = saved
    tensor = metadata.state_dict_metadata["weight"]
    given, zero = torch.Size(size), torch.Size([0] * len(size))
    if part == "chunk":
        tensor.chunks = [ChunkStorageMetadata(zero, given)]
    elif part == "offsets":
        tensor.chunks = [ChunkStorageMetadata(given, tensor.size)]
    else:
        tensor.size, tensor.chunks = given, [ChunkStorageMetadata(zero, given)]
        if size in ((30, 1), (), (0,) * 50):
            # It could be: but another tensor is there, which torch's planner says.
            return
    store.put("run/.metadata", pickle.dumps(metadata))
    with pytest.raises(exceptions.CheckpointError, match="run/.metadata"):
        StorageReader(URL).read_metadata()


@pytest.mark.parametrize("size", [(30,), (), (-1, 0), (1 << 70,), 5, None], ids=str)
def test_a_tensor_without_chunks_is_refused(saved, size):
    store, metadata, _ = saved
    metadata.state_dict_metadata["weight"].size = torch.Size(size) if isinstance(size, tuple) else size
    metadata.state_dict_metadata["weight"].chunks = []
    store.put("run/.metadata", pickle.dumps(metadata))
    with pytest.raises(exceptions.CheckpointError, match="run/.metadata: .* weight: has no chunks"):
        StorageReader(URL).read_metadata()


@pytest.mark.parametrize(
    ("size", "chunks"),
    [
        ((10,), [((0,), (10,)), ((0,), (10,))]),
        ((10,), [((0,), (0,)), ((0,), (4,)), ((4,), (6,)), ((10,), (0,))]),
        # What one rank of two saves by itself, with no_dist=True.
        ((10,), [((5,), (5,))]),
        ((0,), []),
        ((3, 0), [((0, 0), (3, 0))]),
        ((), [((), ())]),
    ],
)
def test_chunks_as_torch_writes_them_are_accepted(size, chunks):
    described = [ChunkStorageMetadata(*map(torch.Size, chunk)) for chunk in chunks]
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size(size), described)
    check_described(Metadata({"weight": tensor}))


@pytest.mark.parametrize("what", [5, None, "x", [], {}, torch.Size([3]), MetadataIndex("a")], ids=repr)
def test_what_describes_no_tensor_is_refused(saved, what):
    store, metadata, _ = saved
    for change in ("whole", "size", "chunks", "properties", "chunk"):
        metadata = pickle.loads(pickle.dumps(saved[1]))
        tensor = metadata.state_dict_metadata["weight"]
        if change == "whole":
            metadata.state_dict_metadata["weight"] = what
        elif change == "chunk":
            tensor.chunks = [what]
        elif (change, what) not in (("size", torch.Size([3])), ("chunks", [])):
            setattr(tensor, change, what)
        else:
            continue
        store.put("run/.metadata", pickle.dumps(metadata))
        with pytest.raises(exceptions.CheckpointError, match="run/.metadata"):
            StorageReader(URL).read_metadata()


def nested(times, by):
    return b"\x80\x04)" + by * times


@pytest.mark.parametrize(
    "data",
    [
        nested(2_000_000, b"\x85") + b".",
        # As the key of a dict, which Python hashes by recursion in C.
        b"\x80\x04}" + nested(2_000_000, b"\x85")[2:] + b"Ns.",
        # The same pair forty times in itself: hashing it takes hours.
        b"\x80\x04}" + nested(40, b"2\x86")[2:] + b"Ns.",
        b"\x80\x04" + b"]" * 500_000 + b"a" * 499_999 + b".",
        b"(" * 500_000 + b"t" * 500_000 + b".",
        b"\x80\x02c__builtin__\nlist\n(cbuiltins\nrange\n(J\0\0\0\x7ftRtR.",
        b"\x80\x02cbuiltins\nbytearray\n(J\0\0\0\x7ftR.",
        b"\x80\x02cbuiltins\nset\n(cbuiltins\nrange\n(J\0\0\0\x7ftRtR.",
        b"\x80\x02ctorch\nSize\n(cbuiltins\nrange\n(J\0\0\0\x7ftRtR.",
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadataIndex\n(Nctorch\nSize\nJ\0\0\0\x7f\x85RtR.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x04I" + b"9" * 10_000 + b"\n.",
    ],
    ids=lambda data: repr(data[:6] + data[-24:]),
)
def test_metadata_that_is_a_trap_is_refused_in_bounds(data):
    with in_bounds(), pytest.raises(exceptions.CheckpointError, match="^u: "):
        load_metadata(data, "u")


def put_item(store, metadata, key, name, content):
    """Puts other content in place of one item, at the end of the file."""
    body = bytes(store.get(key))
    store.put(key, body + content)
    metadata.storage_data[index_of(metadata, name)] = _StorageInfo(key.removeprefix("run/"), len(body), len(content))


def archive(pickled, method=zipfile.ZIP_STORED, **records):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as file:
        for name, content in {"data.pkl": pickled, "version": b"3\n", **records}.items():
            file.writestr(f"archive/{name}", content)
    return out.getvalue()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", ["weight", "value"])
def test_an_archive_that_unpacks_to_more_than_the_limit_is_refused(saved, name, verify, monkeypatch):
    store, metadata, key = saved
    monkeypatch.setattr(load_items, "_UNPACKED_BYTES", 1 << 20)
    put_item(store, metadata, key, name, archive(b"N." + bytes(5 << 20), zipfile.ZIP_DEFLATED))
    error = error_of_load(store, metadata, names=(name,), verify=verify)
    assert isinstance(error, exceptions.CheckpointError)
    assert "when it is unpacked" in str(error)
    assert key in str(error)


@pytest.mark.parametrize("name", ["weight", "value"])
def test_an_item_that_nests_too_deep_is_refused(saved, name):
    store, metadata, key = saved
    put_item(store, metadata, key, name, archive(b"\x80\x02}" + nested(2_000_000, b"\x85")[2:] + b"Ns."))
    error = error_of_load(store, metadata, names=(name,))
    assert isinstance(error, exceptions.CheckpointError)
    assert key in str(error)


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04", archive(b"\x80\x02X\xff\xff\xff\x7f."), archive(b"")])
@pytest.mark.parametrize("name", ["weight", "value"])
def test_an_item_that_is_none_is_an_error_that_names_the_file(saved, name, content):
    store, metadata, key = saved
    put_item(store, metadata, key, name, content)
    error = error_of_load(store, metadata, names=(name,))
    assert isinstance(error, exceptions.CheckpointError), repr(error)
    assert key in str(error)


class Endless:
    """An extension's stream that does not end."""

    def read(self, count):
        return bytes(count)


def test_a_stream_of_an_extension_that_does_not_end_is_an_error(monkeypatch):
    extension = pytest.importorskip("torch.distributed.checkpoint._extension")

    class Bomb(extension.StreamTransformExtension):
        @staticmethod
        def registry_name():
            return "stream.bomb"

        @staticmethod
        def from_descriptor(version):
            return Bomb()

        def get_descriptor(self):
            return "stream.bomb/1"

        def transform_to(self, output):
            return output

        def transform_from(self, input):
            return Endless()

    known = extension.ExtensionRegistry.__init__

    def knowing(registry):
        known(registry)
        registry.register(Bomb)

    monkeypatch.setattr(extension.ExtensionRegistry, "__init__", knowing)
    info = _StorageInfo("x", 0, 5, transform_descriptors=["stream.bomb/1"])
    with pytest.raises(exceptions.CheckpointError, match="item: has more than 4194304 bytes"):
        other_formats.untransformed(bytes(5), info, 4 << 20, "item")
