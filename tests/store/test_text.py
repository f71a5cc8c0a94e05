"""Objects as text: files in text mode, `Store.open`, `torchobj.get` and `Buffer.decode`."""

import gc
import io
import logging

import pytest

import torchobj
from torchobj import exceptions
from torchobj.config import StoreConfig

TEXT = "äöü\n日本\r\n€\n"


@pytest.fixture
def store(request):
    store = torchobj.Store(f"memory://text-{request.node.name}/below")
    store.put("utf-8.txt", TEXT.encode())
    store.put("latin-1.txt", "äöü\n".encode("latin-1"))
    return store


@pytest.mark.parametrize("mode", ["r", "rt"])
@pytest.mark.parametrize("newline", [None, "", "\n", "\r\n"])
def test_text_is_read_as_by_the_builtin(store, tmp_path, mode, newline):
    (tmp_path / "file").write_bytes(TEXT.encode())
    with open(tmp_path / "file", mode, encoding="utf-8", newline=newline) as expected:
        lines = list(expected)
    with torchobj.open(f"{store.url}/utf-8.txt", mode, newline=newline) as file:
        assert isinstance(file, io.TextIOBase)
        assert list(file) == lines
    with store.open("utf-8.txt", mode, newline=newline) as file:
        assert file.read() == "".join(lines)


def test_an_encoding_and_its_errors_are_those_of_the_builtin(store):
    assert store.open("latin-1.txt", "r", encoding="latin-1").read() == "äöü\n"
    assert store.open("latin-1.txt", "r", errors="replace").read() == "\ufffd\ufffd\ufffd\n"
    with pytest.raises(UnicodeDecodeError):
        store.open("latin-1.txt", "r").read()
    with pytest.raises(LookupError, match="klingon"):
        store.open("latin-1.txt", "r", encoding="klingon")


@pytest.mark.parametrize("mode", ["w", "wt", "x", "xt"])
def test_text_is_written_when_the_file_is_closed(store, mode):
    with store.open("new.txt", mode, encoding="utf-16-le") as file:
        file.write("ab\n")
        assert "new.txt" not in [info.key for info in store.list()]
    assert bytes(store.get("new.txt")) == "ab\n".encode("utf-16-le")


@pytest.mark.parametrize("mode", ["x", "xt", "xb"])
def test_mode_x_refuses_an_object_that_exists(store, mode):
    with pytest.raises(FileExistsError), store.open("utf-8.txt", mode):
        pass
    assert bytes(store.get("utf-8.txt")) == TEXT.encode()


def test_a_detached_file_belongs_to_the_caller(store, caplog):
    text = store.open("new.txt", "w")
    text.write("one ")
    file = text.detach()
    del text
    gc.collect()
    file.write(b"two")
    file.close()
    assert bytes(store.get("new.txt")) == b"one two"
    assert not caplog.records


def test_a_condition_applies_to_text(store):
    version = store.put("k", b"old")
    with store.open("k", "w", if_version=version) as file:
        file.write("new")
    with pytest.raises(exceptions.PreconditionFailedError), store.open("k", "w", if_version=version) as file:
        file.write("newer")
    assert store.get("k").decode() == "new"


def test_a_text_file_that_fails_or_is_dropped_writes_nothing(store, caplog):
    caplog.set_level(logging.WARNING, "torchobj")
    with pytest.raises(ZeroDivisionError), store.open("utf-8.txt", "w") as file:
        file.write("other")
        _ = 1 / 0
    file = store.open("utf-8.txt", "w")
    file.write("other")
    del file
    gc.collect()
    with pytest.raises(UnicodeEncodeError), store.open("utf-8.txt", "w", encoding="ascii") as file:
        file.write("é")
    assert bytes(store.get("utf-8.txt")) == TEXT.encode()
    assert "nothing was written" in caplog.text


@pytest.mark.parametrize("mode", ["a", "ab", "r+", "rw", "b", "t", "", "rtb", "wb+", "rbt"])
def test_an_unknown_mode_is_refused_with_the_known_ones(store, mode):
    with pytest.raises(exceptions.ConfigError, match=r"mode='.*': must be rb, wb or xb, or r, w or x for text"):
        store.open("utf-8.txt", mode)


@pytest.mark.parametrize("given", [{"encoding": "utf-8"}, {"errors": "strict"}, {"newline": ""}])
@pytest.mark.parametrize("mode", ["rb", "wb", "xb"])
def test_an_argument_of_text_is_refused_in_a_binary_mode(store, mode, given):
    with pytest.raises(exceptions.ConfigError, match=f"mode='{mode}'.*exclude each other; text needs mode='{mode[0]}'"):
        store.open("utf-8.txt", mode, **given)


@pytest.mark.parametrize("key", ["a b", "a//b", "ä?#%41", "trail/x"])
def test_a_store_opens_the_object_that_it_puts(store, key):
    store.put(key, b"body")
    assert store.open(key).read() == b"body"
    with store.open(key, "wb") as file:
        file.write(b"other")
    assert bytes(store.get(key)) == bytes(torchobj.get(f"{store.url}/{key}")) == b"other"


def test_an_object_is_read_by_its_url_and_version(tmp_path, store):
    (tmp_path / "x").write_bytes(b"file")
    assert torchobj.get(f"file://{tmp_path}/x").decode() == "file"
    version = store.put("k", b"1")
    assert bytes(torchobj.get(f"{store.url}/k", version=version, config=StoreConfig())) == b"1"
    store.put("k", b"2")
    with pytest.raises(exceptions.ObjectChangedError):
        torchobj.get(f"{store.url}/k", version=version)
    with pytest.raises(exceptions.ObjectNotFoundError):
        torchobj.get(f"{store.url}/missing")
    for url in ("memory://bucket", "x", "http://a/b"):
        with pytest.raises(exceptions.ConfigError):
            torchobj.get(url)


def decoded(data, arguments):
    try:
        return data.decode(*arguments)
    except (UnicodeDecodeError, LookupError) as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    "arguments", [(), ("utf-8",), ("latin-1", "strict"), ("ascii", "replace"), ("utf-16", "ignore"), ("klingon",)]
)
def test_a_buffer_is_decoded_as_bytes_are(arguments):
    for data in (b"abc", "äöü€".encode(), b"\xff\xfe\x00", b"a\0b"):
        assert decoded(torchobj.Buffer(data), arguments) == decoded(data, arguments)
    assert torchobj.Buffer(b"").decode() == ""
    assert torchobj.Buffer("aä".encode()).view(1, 3).decode() == "ä"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig", "utf-16-be"])
@pytest.mark.parametrize("texts", [[], ["", "abc", "d"]])
def test_a_text_begins_with_the_mark_of_its_encoding(store, tmp_path, encoding, texts):
    with (
        store.open("new.txt", "w", encoding=encoding) as file,
        open(tmp_path / "a", "w", encoding=encoding) as expected,
    ):
        for text in texts:
            assert file.write(text) == expected.write(text)
    assert bytes(store.get("new.txt")) == (tmp_path / "a").read_bytes()


def test_a_mode_that_is_no_text_is_refused(store):
    with pytest.raises(exceptions.ConfigError, match="mode=None"):
        store.open("new.txt", None)
