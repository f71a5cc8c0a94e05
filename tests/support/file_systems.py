"""File systems of fsspec for tests without a server."""

from torchobj.fsspec import ObjectFileSystem


class InMemory(ObjectFileSystem):
    """A file system of stores in memory."""

    protocol = "memory"
