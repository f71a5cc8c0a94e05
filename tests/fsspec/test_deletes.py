"""Markers of folders that a server refuses to delete."""

import dataclasses

import pytest

from torchobj import exceptions
from torchobj.fsspec import ObjectFileSystem

KEYS = ("f/a", "f/in/", "f/in/b", "f/z/")


@pytest.fixture
def refusing(bucket, control):
    """A bucket with a folder, whose server refuses to delete the marker of the folder."""
    for key in KEYS:
        bucket.write(key, b"" if key.endswith("/") else b"x")
    control.bucket(bucket.name, {"no_bulk_delete": True})
    refused = {"status": 409, "code": "DirectoryNotEmpty"}
    control.faults({"operation": "DeleteObject", "key": "f/z/", "action": refused})
    return bucket


@pytest.mark.parametrize("maxdepth", [None, 5])
def test_the_objects_of_a_folder_are_deleted_and_its_marker_is_left_with_a_warning(refusing, caplog, maxdepth):
    refusing.files.rm(f"{refusing.name}/f", recursive=True, maxdepth=maxdepth)
    assert refusing.keys() == ["f/z/"]
    assert [record.message for record in caplog.records if "f/z/: the marker of the folder is left" in record.message]


def test_a_folder_is_moved_and_its_marker_is_left_with_a_warning(refusing, caplog):
    refusing.files.mv(f"{refusing.name}/f", f"{refusing.name}/g", recursive=True)
    assert refusing.keys() == ["f/z/", "g/a", "g/in/", "g/in/b", "g/z/"]
    assert "f/z/: the marker of the folder is left" in caplog.text


def test_a_marker_with_content_or_without_permission_is_an_error(refusing, control):
    control.faults({"operation": "DeleteObject", "key": "f/z/", "action": {"status": 403, "code": "AccessDenied"}})
    with pytest.raises(PermissionError):
        refusing.files.rm(f"{refusing.name}/f", recursive=True)
    refusing.write("f/z/", b"content")
    control.faults({"operation": "DeleteObject", "key": "f/z/", "action": {"status": 409, "code": "DirectoryNotEmpty"}})
    with pytest.raises(exceptions.StoreError, match="DirectoryNotEmpty"):
        refusing.files.rm(f"{refusing.name}/f", recursive=True)
    assert refusing.keys() == ["f/z/"]


def test_a_folder_is_moved_and_removed_where_no_key_can_be_a_marker(bucket):
    s3 = dataclasses.replace(bucket.config.s3, key_rules="path")
    files = ObjectFileSystem(dataclasses.replace(bucket.config, s3=s3))
    for key in KEYS:
        bucket.write(key, b"" if key.endswith("/") else b"x")
    files.mv(f"{bucket.name}/f", f"{bucket.name}/g", recursive=True)
    assert [key for key in bucket.keys() if not key.endswith("/")] == ["g/a", "g/in/b"]
    files.rm(f"{bucket.name}/g", recursive=True, maxdepth=3)
    files.rm(f"{bucket.name}/f", recursive=True)
    assert [key for key in bucket.keys() if not key.endswith("/")] == []


def test_an_object_that_the_server_refuses_to_delete_is_an_error(refusing, control):
    control.faults({"operation": "DeleteObject", "key": "f/a", "action": {"status": 409, "code": "Refused"}})
    with pytest.raises(exceptions.StoreError, match="Refused"):
        refusing.files.rm(f"{refusing.name}/f", recursive=True)
    assert "f/a" in refusing.keys()
