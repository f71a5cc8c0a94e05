"""`fs` of the classes of s3torchconnector: objects as files, of which one at a time is deleted."""

import pytest

import torchobj.dcp
from torchobj.exceptions import ConfigError, ObjectNotFoundError


@pytest.fixture(params=[torchobj.dcp.S3StorageWriter, torchobj.dcp.S3StorageReader])
def files(request, place):
    for key in ("a", "a/b", "a/c/d", "a2"):
        place.boto.put_object(Bucket=place.bucket, Key=key, Body=key.encode())
    return request.param(None, f"{place.url}/run", place.config).fs


def test_a_file_is_written_found_renamed_and_deleted(files, place):
    path = files.concat_path(files.init_path(f"{place.url}/run"), "x y")
    assert not files.exists(path)
    files.mkdir(f"{place.url}/run")
    with files.create_stream(path, "wb") as stream:
        stream.write(b"content")
    assert files.exists(path)
    files.rename(path, f"{place.url}/run/z")
    assert not files.exists(path)
    with files.create_stream(f"{place.url}/run/z", "rb") as stream:
        assert stream.read() == b"content"
    files.rename(f"{place.url}/run/z", f"{place.url}/run/z")
    files.rm_file(f"{place.url}/run/z")
    files.rm_file(f"{place.url}/run/z")
    assert place.keys() == ["a", "a/b", "a/c/d", "a2"]
    with pytest.raises(ObjectNotFoundError):
        files.rename(f"{place.url}/missing", f"{place.url}/z")


def test_a_folder_is_listed(files, place):
    assert files.ls(f"{place.url}/a") == files.ls(f"{place.url}/a/") == [f"{place.url}/a/b", f"{place.url}/a/c/"]
    assert files.ls(place.url) == [f"{place.url}/{name}" for name in ("a", "a/", "a2")]
    assert files.ls(f"{place.url}/missing") == []


@pytest.mark.parametrize("path", ["", "{}", "{}/", "{}/a/", "/tmp/x", "a", "file:///tmp/x", "memory://a/b"])
def test_only_one_object_is_deleted_or_renamed(files, place, path):
    path = path.format(place.url)
    for call in (files.rm_file, lambda path: files.rename(path, f"{place.url}/new"), files.exists):
        with pytest.raises(ConfigError):
            call(path)
    with pytest.raises(ConfigError):
        files.rename(f"{place.url}/a", path)
    assert place.keys() == ["a", "a/b", "a/c/d", "a2"]
