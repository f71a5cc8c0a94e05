"""Files of the fsspec file system that are written, as text and compressed: committed when closed, or discarded."""

import asyncio
import contextlib
import copy
import gc
import gzip
import io
import sys
from unittest import mock

import fsspec
import pandas
import pyarrow.parquet
import pytest
from fsspec.compression import available_compressions, compr
from fsspec.registry import _registry

import torchobj
from tests.support.file_systems import InMemory
from tests.support.long_tables import often

BUCKET = "files"


def open_url(path, mode):
    return torchobj.open(f"memory://{path}", mode)


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


def raised_again_in_a_block(files):
    try:
        raise KeyError("earlier")
    except KeyError:
        with fsspec.core.OpenFile(files, "files/k", "wb") as file:
            file.write(b"ha")
            raise


def raised_again_before_finally(files):
    try:
        raise KeyError("earlier")
    except KeyError as error:
        file = files.open("files/k", "wb")
        try:
            file.write(b"ha")
            raise error
        finally:
            file.close()


@pytest.mark.parametrize("write", [raised_again_in_a_block, raised_again_before_finally])
def test_an_exception_that_is_handled_and_raised_again_discards_the_file(files, write, caplog):
    with pytest.raises(KeyError):
        write(files)
    assert not files.exists("files/k")
    assert "memory://files/k" in caplog.text


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


@pytest.mark.parametrize("mode", often(1, ["wb", "w"]))
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


class Context:
    """A context manager that closes a file, as those of libraries do."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self.file

    def __exit__(self, *raised):
        self.file.close()


def with_file(files, error):
    with files.open("files/k", "wb") as file:
        file.write(b"new")
        raise error


def with_fsspec(files, error):
    with fsspec.core.OpenFile(files, "files/k", "wb") as file:
        file.write(b"new")
        raise error


def with_exit_stack(files, error):
    with contextlib.ExitStack() as stack:
        stack.callback(files.open("files/k", "wb").close)
        raise error


def with_closing(files, error):
    with contextlib.closing(files.open("files/k", "w")) as file:
        file.write("new")
        raise error


def with_a_generator(files, error):
    @contextlib.contextmanager
    def opened():
        file = files.open("files/k", "wb")
        try:
            yield file
        finally:
            file.close()

    with opened():
        raise error


def with_pandas(files, error):
    class Value:
        def __str__(self):
            raise error

    with mock.patch.dict(_registry, {"memory": InMemory}):
        pandas.DataFrame({"a": [Value()]}).to_csv("memory://files/k")


def with_pyarrow(files, error):
    schema = pyarrow.schema([("a", pyarrow.int64())])
    with files.open("files/k", "wb") as file, pyarrow.parquet.ParquetWriter(file, schema):
        raise error


def with_finally(files, error):
    file = files.open("files/k", "wb")
    try:
        raise error
    finally:
        file.close()


def with_finally_within_except(files, error):
    file = files.open("files/k", "wb")
    try:
        next(iter(()))
    except StopIteration:
        try:
            raise error
        finally:
            file.close()


def in_a_class(files, error):
    with Context(files.open("files/k", "wb")):
        raise error


async def with_async(files, error):
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(files.open("files/k", "wb").close)
        raise error


PASSING = [
    with_file,
    with_fsspec,
    with_exit_stack,
    with_closing,
    with_a_generator,
    with_pandas,
    with_pyarrow,
    with_finally,
    with_finally_within_except,
    in_a_class,
    lambda files, error: asyncio.run(with_async(files, error)),
]
ERRORS = [KeyError("k"), StopIteration(), StopAsyncIteration(), SystemExit(0), asyncio.CancelledError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("write", PASSING, ids=lambda write: write.__name__)
def test_an_exception_that_passes_discards_the_file(files, write, error, caplog):
    files.pipe("files/k", b"old")
    with pytest.raises(BaseException) as caught:
        write(files, copy.copy(error))
    assert body("k") == b"old"
    # A coroutine may not raise StopIteration.
    assert type(error) in (type(caught.value), type(caught.value.__cause__))
    # An error that passes is seen; that of a block that ends with `close` has a note as well.
    if write not in (with_file, with_pyarrow) or not isinstance(error, KeyError):
        assert "memory://files/k: the write was aborted because of" in caplog.text


def after_next(file):
    try:
        next(iter(()))
    except StopIteration:
        file.close()


def after_next_as(file):
    try:
        next(iter(()))
    except (KeyError, StopIteration) as ended:
        _ = ended.value
        file.close()


def after_a_key_error_within_next(file):
    class Keys:
        def __iter__(self):
            return self

        def __next__(self):
            try:
                return {}["k"]
            except KeyError:
                raise StopIteration  # noqa: B904  as programs do

    try:
        next(Keys())
    except LookupError:
        raise
    except StopIteration:
        with contextlib.closing(file):
            pass


def after_anext(file):
    async def nothing():
        for _ in ():
            yield

    async def write():
        try:
            await anext(nothing())
        except StopAsyncIteration:
            file.close()

    asyncio.run(write())


def after_next_in_finally(file):
    try:
        next(iter(()))
    except StopIteration:
        try:
            file.close()
        finally:
            pass


def after_next_in_a_with_block(file):
    try:
        next(iter(()))
    except StopIteration:
        with contextlib.nullcontext():
            file.close()


def after_next_within_a_with_block(file):
    with contextlib.ExitStack():
        try:
            next(iter(()))
        except StopIteration:
            file.close()


def after_next_within_finally(file):
    try:
        try:
            next(iter(()))
        except StopIteration:
            file.close()
    finally:
        _ = file


def after_the_handler(file):
    with contextlib.suppress(KeyError):
        raise KeyError
    file.close()


@pytest.mark.parametrize("mode", ["w", "wb"])
@pytest.mark.parametrize(
    "close",
    [
        after_next,
        after_next_as,
        after_next_in_finally,
        after_next_in_a_with_block,
        after_next_within_a_with_block,
        after_next_within_finally,
        after_a_key_error_within_next,
        after_anext,
        after_the_handler,
    ],
)
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_close_at_the_end_of_an_iterator_commits(files, close, mode, compression, caplog):
    file = files.open("files/k", mode, compression=compression)
    file.write(lines(mode))
    close(file)
    with files.open("files/k", "rb", compression=compression) as read:
        assert read.read() == lines("wb")
    assert "aborted" not in caplog.text


def in_a_key_error(file):
    try:
        _ = {}["k"]
    except KeyError as error:
        file.close()
        return error


def in_a_key_error_and_the_end_of_an_iterator(file):
    try:
        _ = {}["k"]
    except KeyError:
        try:
            next(iter(()))
        except StopIteration as error:
            file.close()
            return error


@pytest.mark.parametrize("close", [in_a_key_error, in_a_key_error_and_the_end_of_an_iterator])
def test_a_close_that_may_be_that_of_a_failed_block_is_discarded_with_a_note(files, close, caplog):
    error = close(files.open("files/k", "wb"))
    assert not files.exists("files/k")
    assert "memory://files/k: the write was aborted because of" in caplog.text
    [note] = error.__notes__
    assert note.startswith("memory://files/k: the write was aborted")
    assert note.endswith("close the file before the exception or after its handler")


@pytest.mark.parametrize("opened", [InMemory.open, fsspec.core.OpenFile, lambda files, url, mode: open_url(url, mode)])
@pytest.mark.parametrize("mode", ["w", "wb"])
def test_a_generator_that_is_closed_discards_its_file_with_a_warning(files, opened, mode, caplog):
    def rows():
        with opened(files, "files/k", mode) as file:
            while True:
                yield file.write("row" if mode == "w" else b"row")

    generator = rows()
    next(generator)
    generator.close()
    assert not files.exists("files/k")
    assert "memory://files/k: the write was aborted because of GeneratorExit; nothing was committed" in caplog.text


def test_a_failed_transaction_names_its_files(files, caplog):
    with pytest.raises(SystemExit), files.transaction:
        with files.open("files/k", "wb") as file:
            file.write(b"new")
        sys.exit(0)
    assert not files.exists("files/k")
    assert "memory://files/k: the write was aborted with its transaction" in caplog.text
