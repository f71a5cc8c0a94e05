"""`fs` of the classes of s3torchconnector: objects as files, of which one at a time is deleted."""

import pytest

import torchobj.s3torchconnector.dcp
from torchobj.exceptions import ConfigError, IntegrityError, ObjectNotFoundError


@pytest.fixture(params=[torchobj.s3torchconnector.dcp.S3StorageWriter, torchobj.s3torchconnector.dcp.S3StorageReader])
def files(request, bucket):
    for key in ("a", "a/b", "a/c/d", "a2"):
        bucket.write(key, key.encode())
    return request.param(None, f"{bucket.url}/run", bucket.config).fs


def test_a_file_is_written_found_renamed_and_deleted(files, bucket):
    path = files.concat_path(files.init_path(f"{bucket.url}/run"), "x y")
    assert not files.exists(path)
    files.mkdir(f"{bucket.url}/run")
    with files.create_stream(path, "wb") as stream:
        stream.write(b"content")
    assert files.exists(path)
    files.rename(path, f"{bucket.url}/run/z")
    assert not files.exists(path)
    with files.create_stream(f"{bucket.url}/run/z", "rb") as stream:
        assert stream.read() == b"content"
    files.rename(f"{bucket.url}/run/z", f"{bucket.url}/run/z")
    files.rm_file(f"{bucket.url}/run/z")
    files.rm_file(f"{bucket.url}/run/z")
    assert bucket.keys() == ["a", "a/b", "a/c/d", "a2"]
    with pytest.raises(ObjectNotFoundError):
        files.rename(f"{bucket.url}/missing", f"{bucket.url}/z")


@pytest.mark.parametrize("stored", [None, b"x", b"other"], ids=["nothing", "shorter", "other bytes"])
def test_a_file_whose_copy_the_server_did_not_store_is_not_renamed(files, bucket, control, stored):
    bucket.write("a", b"bytes")
    etag = '"00000000000000000000000000000000"'
    if stored is not None:
        bucket.write("z", stored)
        etag = bucket.version("z")
    body = f"<CopyObjectResult><ETag>{etag}</ETag></CopyObjectResult>"
    headers = {"content-type": "application/xml"}
    control.faults({"operation": "CopyObject", "action": {"status": 200, "headers": headers, "body": body}})
    with pytest.raises(IntegrityError, match=f"rename {bucket.url}/a: kept, because {bucket.url}/z"):
        files.rename(f"{bucket.url}/a", f"{bucket.url}/z")
    assert bucket.body("a") == b"bytes"


def test_a_folder_is_listed(files, bucket):
    assert files.ls(f"{bucket.url}/a") == files.ls(f"{bucket.url}/a/") == [f"{bucket.url}/a/b", f"{bucket.url}/a/c/"]
    assert files.ls(bucket.url) == [f"{bucket.url}/{name}" for name in ("a", "a/", "a2")]
    assert files.ls(f"{bucket.url}/missing") == []


@pytest.mark.parametrize("path", ["", "{}", "{}/", "{}/a/", "/tmp/x", "a", "file:///tmp/x", "memory://a/b"])
def test_only_one_object_is_deleted_or_renamed(files, bucket, path):
    path = path.format(bucket.url)
    for call in (files.rm_file, lambda path: files.rename(path, f"{bucket.url}/new"), files.exists):
        with pytest.raises(ConfigError):
            call(path)
    with pytest.raises(ConfigError):
        files.rename(f"{bucket.url}/a", path)
    assert bucket.keys() == ["a", "a/b", "a/c/d", "a2"]
