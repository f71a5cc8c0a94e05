"""Conditional writes, and reads of ranges by reference, on every provider."""

import pytest

import torchobj
from tests.conftest import strict_bucket
from torchobj import exceptions

pytestmark = pytest.mark.providers("s3", "gs")


@pytest.fixture(params=["s3", "gs", "file", "memory"])
def store(request, tmp_path):
    if request.param in ("file", "memory"):
        return torchobj.Store(f"file://{tmp_path}" if request.param == "file" else f"memory://{tmp_path.name}")
    any_bucket = strict_bucket(request.param, request)
    return torchobj.Store(any_bucket.url, config=any_bucket.config)


def test_a_put_creates_or_replaces_one_version_only(store):
    version = store.put("k", b"one", overwrite=False)
    with pytest.raises(FileExistsError):
        store.put("k", b"two", overwrite=False)
    assert store.head("k").version == version
    second = store.put("k", b"second", if_version=version)
    with pytest.raises(exceptions.PreconditionFailedError):
        store.put("k", b"third", if_version=version)
    assert (store.get("k"), store.head("k").version) == (b"second", second)


@pytest.mark.parametrize("size", [5, 20 << 20])
def test_a_writer_creates_or_replaces_one_version_only(store, size):
    def write(fill, **conditions):
        with torchobj.open(f"{store.url}/k", "wb", config=store.config, **conditions) as file:
            file.write(fill * size)
        return file.version

    version = write(b"1", overwrite=False)
    with pytest.raises(FileExistsError):
        write(b"2", overwrite=False)
    second = write(b"2", if_version=version)
    with pytest.raises(exceptions.PreconditionFailedError):
        write(b"3", if_version=version)
    assert store.head("k").version == second
    assert store.get_range("k", -1) == b"2"
    assert not [*store.unfinished_uploads()]


def test_files_of_fsspec_take_the_same_conditions(bucket):
    files = bucket.files
    path = f"{bucket.name}/k"
    with files.open(path, "wb", overwrite=False) as file:
        file.write(b"one")
    with pytest.raises(FileExistsError):
        files.pipe_file(path, b"two", overwrite=False)
    version = files.info(path)["ETag"]
    files.pipe_file(path, b"two", if_version=version)
    with pytest.raises(exceptions.PreconditionFailedError), files.open(path, "wb", if_version=version) as file:
        file.write(b"three")
    assert files.cat_file(path) == b"two"
    with pytest.raises(exceptions.ConfigError, match=r"overwrite=False, if_version='v'"):
        files.pipe_file(path, b"x", mode="create", if_version="v")


def test_attributes_are_returned_under_their_names(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    given = {
        "content_type": "text/plain",
        "content_encoding": "identity",
        "content_disposition": "inline",
        "content_language": "de",
        "cache_control": "no-store",
        "metadata": {"b": "2", "a": "1"},
    }
    store.put("k", b"x", **given)
    info = store.head("k")
    assert {name: getattr(info, name) for name in given} == given


def test_references_are_read_with_their_ranges_and_versions(store):
    version = store.put("deep/a", b"0123456789")
    store.put("b", b"abc")
    ref = torchobj.ObjectRef
    url = f"{store.url}/deep/a"
    wanted = ["b", ref(url), ref(url, start=2, end=5), ref(url, start=8, version=version), ref(url, end=99)]
    expected = [b"abc", b"0123456789", b"234", b"89", b"0123456789"]
    assert store.get_many(wanted) == expected
    assert torchobj.get_many([f"{store.url}/b", *wanted[1:]], config=store.config) == expected
    memory = [bytearray(10) for _ in wanted]
    assert store.get_many(wanted, into=memory) == [3, 10, 3, 2, 10]
    assert memory[2][:3] == b"234"
    old = ref(url, version="0" if store.url.startswith("gs") else '"0"')
    [read, failed] = store.get_many(["b", old], return_errors=True)
    assert read == b"abc"
    assert isinstance(failed, exceptions.StoreError)


def test_a_reference_to_another_store_is_refused(store):
    other = torchobj.ObjectRef("memory://another/key")
    with pytest.raises(exceptions.ConfigError, match=r"memory://another/key.*torchobj\.get_many"):
        store.get_many([other])
