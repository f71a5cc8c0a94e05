"""A reader is a binary file, whether its bytes are in memory or fetched as they are read."""

import importlib
import io
import json
import pickle

import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import torchobj
from torchobj._torchobj import ObjectReader
from torchobj.store.file_objects import open_reader

BODY = b"".join(b"line %d\n" % number for number in range(2000)) + b"the last one has no end"


def in_memory(body):
    return ObjectReader("memory://b/k", "b", "k", torchobj.Buffer(body))


def read_ahead(body):
    torchobj.Store("memory://readers").put("k", body)
    return open_reader("memory://readers/k", torchobj.StoreConfig(), 1000, 5000)


def exact(body):
    torchobj.Store("memory://readers").put("k", body)
    return open_reader("memory://readers/k", torchobj.StoreConfig(), 0, 0)


KINDS = pytest.mark.parametrize("reader_of", [in_memory, read_ahead, exact])

steps = st.one_of(
    st.tuples(st.just("read"), st.one_of(st.none(), st.integers(-1, 30_000))),
    st.tuples(st.just("readline"), st.one_of(st.just(-1), st.integers(0, 50))),
    st.tuples(st.just("readinto"), st.integers(0, 9000)),
    st.tuples(
        st.just("seek"),
        st.one_of(
            st.tuples(st.integers(0, 40_000), st.just(0)),
            st.tuples(st.integers(-40_000, 0), st.just(2)),
            st.tuples(st.integers(-5000, 5000), st.just(1)),
        ),
    ),
    st.tuples(st.just("tell"), st.none()),
)


def play(file, step, argument):
    try:
        if step == "readinto":
            buffer = bytearray(argument)
            return file.readinto(buffer), bytes(buffer)
        if step == "seek":
            return file.seek(*argument)
        return getattr(file, step)(*([] if argument is None else [argument]))
    except ValueError:
        return ValueError


@KINDS
@settings(max_examples=60)
@given(script=st.lists(steps, max_size=25))
def test_it_behaves_as_a_file_in_memory(reader_of, script):
    ours, model = reader_of(BODY), io.BytesIO(BODY)
    for step, argument in script:
        if step == "seek" and argument[1] and argument[0] + (model.tell(), len(BODY))[argument[1] - 1] < 0:
            # BytesIO stops at 0; files and readers raise.
            continue
        assert play(ours, step, argument) == play(model, step, argument), (step, argument)


@KINDS
def test_it_has_the_attributes_of_a_buffered_file(reader_of):
    reader = reader_of(BODY)
    assert isinstance(reader, io.BufferedIOBase)
    assert (reader.readable(), reader.writable(), reader.seekable(), reader.closed) == (True, False, True, False)
    assert list(reader)[:2] == [b"line 0\n", b"line 1\n"]
    with reader as same:
        assert same is reader
    assert reader.closed
    for use in (reader.read, reader.tell, reader.__enter__, lambda: reader.seek(0)):
        with pytest.raises(ValueError, match="closed"):
            use()
    for use in (lambda: reader.write(b""), reader.truncate, reader.fileno, reader.detach):
        with pytest.raises(io.UnsupportedOperation):
            use()


@KINDS
def test_pillow_torch_and_json_read_it(reader_of):
    picture = io.BytesIO()
    Image.new("RGB", (7, 5), (1, 2, 3)).save(picture, "PNG")
    with Image.open(reader_of(picture.getvalue())) as image:
        assert (image.size, image.getpixel((0, 0))) == ((7, 5), (1, 2, 3))
    saved = io.BytesIO()
    state = {"weight": torch.arange(100_000.0), "bias": torch.ones(3, dtype=torch.int8)}
    torch.save(state, saved)
    loaded = torch.load(reader_of(saved.getvalue()))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert json.load(reader_of(b'{"a": [1, 2]}')) == {"a": [1, 2]}


@KINDS
@pytest.mark.parametrize("form", ["ipc", "stream", "feather", "parquet", "orc", "csv"])
def test_pyarrow_reads_it_as_a_file(reader_of, form):
    table, file = pyarrow.table({"a": [1, 2], "b": ["x", None]}), io.BytesIO()
    modules = {"feather": "pyarrow.feather", "parquet": "pyarrow.parquet", "orc": "pyarrow.orc", "csv": "pyarrow.csv"}
    module = importlib.import_module(modules.get(form, "pyarrow.ipc"))
    if form in ("ipc", "stream"):
        make, read = (module.new_file, module.open_file) if form == "ipc" else (module.new_stream, module.open_stream)
        with make(file, table.schema) as writer:
            writer.write_table(table)
        assert read(reader_of(file.getvalue())).read_all().equals(table)
        return
    write = {"feather": "write_feather", "csv": "write_csv"}.get(form, "write_table")
    getattr(module, write)(table, file)
    read = getattr(module, "read_csv" if form == "csv" else "read_table")
    assert read(reader_of(file.getvalue()))["a"].equals(table["a"])


def test_bytes_in_memory_are_viewed_without_a_copy():
    reader = in_memory(bytearray(b"abc"))
    view = reader.getbuffer()
    view[0] = ord("x")
    assert torch.frombuffer(reader, dtype=torch.uint8).tolist() == list(b"xbc")
    assert reader.read() == b"xbc"
    reader.close()
    assert bytes(view) == b"xbc"


def test_a_reader_without_its_bytes_offers_no_buffer():
    reader = read_ahead(BODY)
    with pytest.raises(io.UnsupportedOperation, match="fetches on demand"):
        reader.getbuffer()
    # As of an object without the buffer protocol, by which libraries tell files from bytes.
    with pytest.raises(TypeError, match="bytes-like object is required"):
        memoryview(reader)
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(reader)


def test_a_reader_with_its_bytes_is_pickled_with_its_position():
    reader = in_memory(BODY)
    reader.seek(5)
    copy = pickle.loads(pickle.dumps(reader))
    assert (copy.url, copy.bucket, copy.key, copy.tell(), copy.read(3)) == ("memory://b/k", "b", "k", 5, BODY[5:8])


def test_a_missing_object_is_an_error_at_the_first_use():
    reader = torchobj.open("memory://readers/missing")
    with pytest.raises(FileNotFoundError, match="memory://readers/missing"):
        reader.read(1)


@KINDS
def test_reading_into_a_read_only_buffer_raises_the_type_error_of_io(reader_of):
    reader = reader_of(b"0123456789")
    for target in (b"xx", memoryview(b"xx"), "xx", 5, None):
        for read in (reader.readinto, reader.readinto1):
            with pytest.raises(TypeError):
                read(target)
    with pytest.raises(TypeError, match="readinto.. takes a writable buffer, not <class 'bytes'>"):
        reader.readinto(b"xx")
    # No byte was consumed.
    assert (reader.tell(), reader.size, reader.read()) == (0, 10, b"0123456789")
