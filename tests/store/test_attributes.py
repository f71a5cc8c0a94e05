"""The attributes of written objects: every write takes the same ones, and refuses others by the same error."""

import io

import pytest

import torchobj
from torchobj import exceptions, files

URL = "memory://attributes/k"


@pytest.mark.parametrize(
    "write",
    [
        lambda path, **given: torchobj.Store("memory://attributes").put("k", b"1", **given),
        lambda path, **given: torchobj.ObjectWriter(URL, **given).close(),
        lambda path, **given: torchobj.Store("memory://attributes").upload_file("k", path, **given),
        lambda path, **given: files.upload_file(path, URL, **given),
        lambda path, **given: files.upload_stream(io.BytesIO(b"1"), URL, **given),
    ],
    ids=["put", "ObjectWriter", "Store.upload_file", "upload_file", "upload_stream"],
)
def test_an_unknown_attribute_is_refused_by_each_write_with_the_known_ones(write, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"1")
    with pytest.raises(exceptions.ConfigError, match="content_typ: no such argument; .* are content_type, "):
        write(path, content_typ="text/plain")
    write(path, content_type="text/plain", metadata=None, cache_control=None)
    info = torchobj.Store("memory://attributes").head("k")
    assert (info.content_type, info.cache_control) == ("text/plain", None)
    # Uploads of files record the time of modification.
    assert info.metadata.keys() <= {"mtime"}
