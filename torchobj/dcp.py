"""Distributed checkpoints by the names and signatures of `s3torchconnector.dcp` 1.5."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase

from torchobj.checkpoint.dcp.prefix import (
    BinaryPrefixStrategy,
    DefaultPrefixStrategy,
    HexPrefixStrategy,
    NumericPrefixStrategy,
    RoundRobinPrefixStrategy,
    S3PrefixStrategyBase,
)
from torchobj.checkpoint.dcp.reader import StorageReader
from torchobj.checkpoint.dcp.writer import StorageWriter
from torchobj.checkpoint.files import ObjectWriter, open_reader
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.exceptions import ConfigError, ObjectNotFoundError
from torchobj.store import Store
from torchobj.urls import parse_url

__all__ = [
    "BinaryPrefixStrategy",
    "DefaultPrefixStrategy",
    "HexPrefixStrategy",
    "NumericPrefixStrategy",
    "RoundRobinPrefixStrategy",
    "S3FileSystem",
    "S3PrefixStrategyBase",
    "S3StorageReader",
    "S3StorageWriter",
]

#: Settings of torch's FileSystemWriter that change nothing here: how it syncs and copies.
_WITHOUT_MEANING = ("sync_files", "single_file_per_rank", "per_thread_copy_ahead", "cache_staged_state_dict")


class S3FileSystem(FileSystemBase):
    """Objects of S3 as files of torch's checkpoints, for writers and readers that take a file system.

    Args:
        region: Region of the buckets; found out when None.
        s3_client: Not taken: torchobj has no such class.
        s3client_config: An `S3ClientConfig`, or a `StoreConfig`.
        reader_constructor: Has no meaning: readers fetch as they are read.

    Raises:
        ConfigError: There is an `s3_client`.
    """

    def __init__(
        self,
        region: str | None,
        s3_client: Any = None,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        reader_constructor: Any = None,  # noqa: ARG002  part of the signature
    ) -> None:
        if s3_client is not None:
            raise ConfigError(f"s3_client={s3_client!r}: must be None; settings go to s3client_config")
        self._config = store_config(s3client_config, region)

    def _object(self, path: str | os.PathLike[str]) -> tuple[Store, str]:
        """Store and key of one object.

        Raises:
            ConfigError: The path is not the URL of an object, but of a bucket or folder.
        """
        url = parse_url(os.fspath(path), ("s3",))
        if not url.key or url.key.endswith("/"):
            raise ConfigError(f"path={os.fspath(path)!r}: must be the URL of one object, as s3://bucket/folder/file")
        return Store(url.base, config=self._config), url.key

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """A file to read (`rb`) or to write (`wb`); what is written appears when the block ends without an exception.

        Raises:
            ConfigError: Another mode, or no URL of an object.
        """
        if mode == "rb":
            with open_reader(os.fspath(path), self._config) as reader:
                yield reader
        elif mode == "wb":
            with ObjectWriter(os.fspath(path), config=self._config) as writer:
                yield writer
        else:
            raise ConfigError(f"mode={mode!r}: must be rb or wb")

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """The object `suffix` of the folder `path`."""
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """The path as it is."""
        return path

    def rename(self, old_path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Copies an object on the server, and deletes the old one. To its own name it stays as it is.

        Raises:
            ConfigError: A path is not the URL of one object.
        """
        store, key = self._object(old_path)
        target, new_key = self._object(new_path)
        if (store.url, key) != (target.url, new_key):
            target.copy(f"{store.url}/{key}", new_key)
            store.delete(key)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Does nothing: S3 has no folders."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether there is such an object."""
        store, key = self._object(path)
        try:
            store.head(key)
        except ObjectNotFoundError:
            return False
        return True

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """The URLs of the objects and folders directly in a folder; none where there is no such folder."""
        url = parse_url(os.fspath(path), ("s3",))
        folder = f"{url.key.rstrip('/')}/" if url.key else ""
        pages = list(Store(url.base, config=self._config).list(folder, "/").pages())
        names = [info.key for page in pages for info in page.objects if info.key != folder]
        return [f"{url.base}/{name}" for name in sorted([*names, *(name for page in pages for name in page.prefixes)])]

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Deletes one object. One that does not exist is no error.

        Raises:
            ConfigError: The path is not the URL of one object: no folder and no bucket is deleted.
        """
        store, key = self._object(path)
        store.delete(key)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is an `s3://` URL."""
        return S3StorageWriter.validate_checkpoint_id(checkpoint_id)


class S3StorageWriter(StorageWriter):
    """Saves distributed checkpoints to S3: `torchobj.checkpoint.StorageWriter` by the signature of s3torchconnector.

    `fs` is the `S3FileSystem` of the same settings, and `path` the checkpoint's URL.

    Args:
        region: Region of the bucket; found out when None.
        path: The checkpoint's folder, `s3://bucket/folder`.
        s3client_config: An `S3ClientConfig`, or a `StoreConfig`.
        prefix_strategy: How the names of a rank's files begin.
        thread_count: Into how many files a rank's items are divided.
        kwargs: Those of torch's `FileSystemWriter`. `overwrite` is as there; what says how it syncs and copies has no
            meaning here.

    Raises:
        ConfigError: No `s3://` URL; or extensions, or another format than torch.save's.
        TypeError: Another argument.
    """

    _schemes = ("s3",)

    @property
    def path(self) -> str:
        """The checkpoint's URL."""
        return self.checkpoint_id

    def __init__(
        self,
        region: str | None,
        path: str,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        prefix_strategy: S3PrefixStrategyBase | None = None,
        thread_count: int = 1,
        **kwargs: Any,
    ) -> None:
        self.fs = S3FileSystem(region, s3client_config=s3client_config)
        parse_url(path, ("s3",))
        overwrite = kwargs.pop("overwrite", True)
        extensions, form = kwargs.pop("_extensions", None), kwargs.pop("serialization_format", None)
        if extensions:
            raise ConfigError(f"_extensions={extensions!r}: must be none; items are framed without a stream")
        if form is not None and form.value != "torch_save":
            raise ConfigError(f"serialization_format={form}: must be TORCH_SAVE")
        unknown = sorted(set(kwargs) - set(_WITHOUT_MEANING))
        if unknown:
            raise TypeError(f"S3StorageWriter() got an unexpected keyword argument {unknown[0]!r}")
        super().__init__(
            path,
            thread_count=thread_count,
            prefix_strategy=prefix_strategy,
            overwrite=overwrite,
            config=s3client_config,
            region=region,
        )


class S3StorageReader(StorageReader):
    """Loads distributed checkpoints from S3: `torchobj.checkpoint.StorageReader` by the signature of s3torchconnector.

    `fs` is the `S3FileSystem` of the same settings, and `path` the checkpoint's URL.

    Args:
        region: Region of the bucket; found out when None.
        path: The checkpoint's folder, `s3://bucket/folder`.
        s3client_config: An `S3ClientConfig`, or a `StoreConfig`.
        reader_constructor: Has no meaning: ranges are read into the tensors.

    Raises:
        ConfigError: No `s3://` URL.
    """

    _schemes = ("s3",)

    @property
    def path(self) -> str:
        """The checkpoint's URL."""
        return self.checkpoint_id

    def __init__(
        self,
        region: str | None,
        path: str | os.PathLike[str],
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        reader_constructor: Any = None,  # noqa: ARG002  part of the signature
    ) -> None:
        self.fs = S3FileSystem(region, s3client_config=s3client_config)
        url = os.fspath(path)
        parse_url(url, ("s3",))
        super().__init__(url, config=s3client_config, region=region)
