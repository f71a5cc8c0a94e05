"""Files of the fsspec file system that are written, as text and compressed: committed when closed, or discarded."""

import gc
import gzip
import io

import fsspec
import pytest
from fsspec.compression import available_compressions, compr

import torchobj
from tests.support.file_systems import InMemory

BUCKET = "files"


def body(key):
    return bytes(torchobj.Store("memory://files").get(key))


@pytest.mark.parametrize("mode", ["w", "wb", "a", "ab"])
def test_a_with_block_that_raises_keeps_the_old_object(files, mode):
    files.pipe("files/k", b"old")
    with pytest.raises(ZeroDivisionError), files.open("files/k", mode) as file:
        file.write("new" if "b" not in mode else b"new")
        _ = 1 / 0
    assert body("k") == b"old"


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("mode", ["w", "wb", "a", "ab"])
def test_a_with_block_of_fsspec_open_that_raises_keeps_the_old_object(files, mode, compression):
    files.pipe("files/k", b"old")
    with pytest.raises(ZeroDivisionError), fsspec.core.OpenFile(files, "files/k", mode, compression) as file:
        file.write("new" if "b" not in mode else b"new")
        _ = 1 / 0
    assert body("k") == b"old"


@pytest.mark.parametrize("opened", [InMemory.open, fsspec.core.OpenFile])
@pytest.mark.parametrize("mode", ["w", "wb"])
def test_a_file_can_be_written_while_an_exception_is_handled(files, mode, opened):
    text = "new" if mode == "w" else b"new"
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        with opened(files, "files/k", mode) as file:
            file.write(text)
        with pytest.raises(KeyError), opened(files, "files/k", mode) as file:
            file.write(text * 2)
            raise KeyError from None
    assert body("k") == b"new"


def test_a_file_closed_while_its_exception_is_handled_is_not_committed(files, caplog):
    file = files.open("files/k", "wb")
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        file.close()
    assert not files.exists("files/k")
    assert "because of ZeroDivisionError; nothing was committed" in caplog.text
    file = files.open("files/k", "wb")
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        with file:
            file.write(b"whole")
    assert body("k") == b"whole"


def lines(mode):
    """Content to write in a mode."""
    text = "text\n" * 1000
    return text if "b" not in mode else text.encode()


COMPRESSIONS = [name for name in available_compressions() if name is not None]


@pytest.mark.parametrize("mode", ["w", "wt", "wb", "xb", "at"])
@pytest.mark.parametrize(("compression", "name"), [*((each, "k") for each in COMPRESSIONS), ("infer", "k.gz")])
def test_a_compressed_file_is_committed_when_it_is_closed(files, mode, compression, name):
    path, content = f"files/{name}", lines(mode)
    with files.open(path, mode, compression=compression) as file:
        file.write(content)
        assert not files.exists(path)
    assert file.closed
    reading = "rb" if "b" in mode else "r"
    with files.open(path, reading, compression=compression) as file:
        assert file.read() == content
    assert body(name) != lines("wb")
    files.rm_file(path)
    file = files.open(path, mode, compression=compression)
    file.write(content)
    file.close()
    with fsspec.core.OpenFile(files, path, reading, compression) as file:
        assert file.read() == content


@pytest.mark.parametrize("mode", ["wt", "wb"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_compressed_file_is_discarded_after_an_exception(files, mode, compression, caplog):
    def fail():
        with files.open("files/k", mode, compression=compression) as file:
            file.write(lines(mode))
            _ = 1 / 0

    files.pipe("files/k", b"old")
    with pytest.raises(ZeroDivisionError):
        fail()
    file = files.open("files/k", mode, compression=compression)
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        file.close()
    assert "because of ZeroDivisionError; nothing was committed" in caplog.text
    assert body("k") == b"old"
    with pytest.raises(ZeroDivisionError), files.transaction:
        with files.open("files/k", mode, compression=compression) as file:
            file.write(lines(mode))
        _ = 1 / 0
    assert body("k") == b"old"


def test_a_compressed_file_is_committed_by_its_transaction(files):
    files.pipe("files/other", b"old")
    with files.transaction:
        for mode in ("wt", "wb"):
            with files.open(f"files/{mode}", mode, compression="gzip") as file:
                file.write(lines(mode))
        with pytest.raises(ZeroDivisionError), files.open("files/other", "wt", compression="gzip") as file:
            file.write("half")
            _ = 1 / 0
        assert files.find("files") == ["files/other"]
    assert [gzip.decompress(body(mode)) for mode in ("wt", "wb")] == [lines("wb")] * 2
    assert body("other") == b"old"


@pytest.mark.parametrize("mode", ["w", "wb"])
@pytest.mark.parametrize("compression", [None, *COMPRESSIONS])
def test_a_file_that_is_dropped_before_it_is_closed_is_discarded(files, mode, compression, caplog):
    files.pipe("files/k", b"old")
    file = files.open("files/k", mode, compression=compression)
    file.write(lines(mode))
    del file
    gc.collect()
    assert "was dropped before it was closed: nothing was written" in caplog.text
    assert body("k") == b"old"
    with files.transaction:
        file = files.open("files/closed", mode, compression=compression)
        file.write(lines(mode))
        file.close()
        del file
        gc.collect()
    assert files.exists("files/closed")


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("mode", ["w", "wb"])
def test_a_block_that_succeeds_while_an_exception_is_handled_is_committed(files, mode, compression):
    file = files.open("files/k", mode, compression=compression)
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        with file:
            file.write(lines(mode))
    with files.open("files/k", "rb", compression=compression) as read:
        assert read.read() == lines("wb")


def test_a_compressor_that_fails_at_the_end_leaves_the_old_object(files, monkeypatch):
    class Failing(io.BytesIO):
        def close(self):
            raise OSError("disk full")

    monkeypatch.setitem(compr, "failing", lambda file, mode: Failing())
    files.pipe("files/k", b"old")
    for mode in ("w", "wb"):
        file = files.open("files/k", mode, compression="failing")
        with pytest.raises(OSError, match="disk full"):
            file.close()
        with pytest.raises(OSError, match="disk full"), files.open("files/k", mode, compression="failing"):
            pass
        with pytest.raises(ZeroDivisionError), files.open("files/k", mode, compression="failing"):
            _ = 1 / 0
    with pytest.raises(ValueError, match="not supported"), files.transaction:
        files.open("files/k", "wb", compression="unknown")
    assert body("k") == b"old"


@pytest.mark.parametrize("compression", [None, "gzip", "bz2", "xz"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_text_begins_with_the_mark_of_its_encoding_and_has_no_other(files, compression, encoding):
    path = "files/marked"
    for mode in ("w", "a"):
        with files.open(path, mode, encoding=encoding, compression=compression) as file:
            file.write("abc")
    with files.open(path, "rb", compression=compression) as file:
        assert file.read() == "abcabc".encode(encoding)
