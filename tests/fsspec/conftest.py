"""A file system in memory for the tests of fsspec."""

import pytest

import torchobj
from tests.support.file_systems import InMemory


@pytest.fixture
def files(request):
    """A file system in memory, in which the bucket that the test file names as `BUCKET` is empty."""
    store = torchobj.Store(f"memory://{request.module.BUCKET}")
    store.delete([info.key for info in store.list()])
    files = InMemory()
    files._created_folders.clear()
    return files
