"""Distributed checkpoints with the names and signatures of `s3torchconnector.dcp` 1.5."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch.distributed
from torch.distributed.checkpoint.filesystem import FileSystemBase

from torchobj.checkpoint.dcp.object_names import rank_prefix
from torchobj.checkpoint.dcp.storage import CheckpointStorage, StorageReader, StorageWriter
from torchobj.config import StoreConfig, resolve
from torchobj.exceptions import ConfigError, IntegrityError, ObjectChangedError, ObjectNotFoundError
from torchobj.s3torchconnector.client_config import S3ClientConfig, connector_config
from torchobj.store import Store
from torchobj.store.copies import Copy, delete_unchanged, unverified
from torchobj.store.file_objects import ObjectWriter, open_reader
from torchobj.urls import Url, parse_url

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

#: Settings of torch's FileSystemWriter without effect here: how it syncs and copies.
_IGNORED = ("sync_files", "single_file_per_rank", "per_thread_copy_ahead", "cache_staged_state_dict")


def _within_epoch(folder: str, epoch_num: int | None, rank: int) -> str:
    epoch = "" if epoch_num is None else f"epoch_{epoch_num}/"
    return f"{folder}/{epoch}{rank_prefix(rank)}"


class S3PrefixStrategyBase(ABC):
    """Chooses the prefix of a rank's files, relative to the checkpoint.

    S3 partitions keys by prefix, and serves more requests per second to ranks whose keys start differently.
    """

    def __call__(self, rank: int) -> str:
        """Calls `generate_prefix`."""
        return self.generate_prefix(rank)

    @abstractmethod
    def generate_prefix(self, rank: int) -> str:
        """Returns the prefix of the files of `rank`."""


class DefaultPrefixStrategy(S3PrefixStrategyBase):
    """`__<rank>_`, as in torch."""

    def generate_prefix(self, rank: int) -> str:
        """`__<rank>_`"""
        return rank_prefix(rank)


class NumericPrefixStrategy(S3PrefixStrategyBase):
    """`<number>/epoch_<epoch>/__<rank>_`: numbers with their digits reversed, so that the first digits differ.

    Args:
        base: Base of the numbers, 2 to 36.
        epoch_num: Epoch in the prefix; None omits it.
        min_prefix_length: Minimum number of digits.
        prefix_count: Number of different prefixes; None uses the number of ranks.

    Raises:
        ValueError: An argument is not an int, or is too small.
    """

    def __init__(
        self, base: int, epoch_num: int | None = None, min_prefix_length: int = 10, prefix_count: int | None = None
    ) -> None:
        if min_prefix_length < 1:
            raise ValueError(f"min_prefix_length={min_prefix_length}: must be 1 or more")
        if epoch_num is not None and not isinstance(epoch_num, int):
            raise ValueError(f"epoch_num={epoch_num!r}: must be None or an int")
        if prefix_count is not None and (not isinstance(prefix_count, int) or prefix_count < 1):
            raise ValueError(f"prefix_count={prefix_count!r}: must be None, or an int of 1 or more")
        self.base = base
        self.epoch_num = epoch_num
        self.min_prefix_len = min_prefix_length
        is_running = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.prefix_count = prefix_count or (torch.distributed.get_world_size() if is_running else 1)
        self.prefix_map = self._generate_prefix_map()

    def generate_prefix(self, rank: int) -> str:
        """Returns the prefix of the files of `rank`."""
        return _within_epoch(self.prefix_map[rank % len(self.prefix_map)], self.epoch_num, rank)

    def _generate_prefix_map(self) -> list[str]:
        length = 1
        while self.base**length < self.prefix_count:
            length += 1
        length = max(length, self.min_prefix_len)
        return [self._format_number(number, length)[::-1] for number in range(self.prefix_count)]

    def _format_number(self, number: int, length: int) -> str:
        """Returns the number with `length` digits."""
        return numpy.base_repr(number, self.base).lower().zfill(length)


class BinaryPrefixStrategy(NumericPrefixStrategy):
    """A `NumericPrefixStrategy` of binary numbers."""

    def __init__(
        self, epoch_num: int | None = None, min_prefix_length: int = 10, prefix_count: int | None = None
    ) -> None:
        super().__init__(2, epoch_num, min_prefix_length, prefix_count)


class HexPrefixStrategy(NumericPrefixStrategy):
    """A `NumericPrefixStrategy` of hexadecimal numbers."""

    def __init__(
        self, epoch_num: int | None = None, min_prefix_length: int = 10, prefix_count: int | None = None
    ) -> None:
        super().__init__(16, epoch_num, min_prefix_length, prefix_count)


class RoundRobinPrefixStrategy(S3PrefixStrategyBase):
    """`<prefix>/epoch_<epoch>/__<rank>_`, with the prefixes in turn.

    Args:
        user_prefixes: One or more prefixes.
        epoch_num: Epoch in the prefix; None omits it.

    Raises:
        ValueError: `user_prefixes` is empty.
    """

    def __init__(self, user_prefixes: list[str], epoch_num: int | None = None) -> None:
        if not user_prefixes:
            raise ValueError("user_prefixes=[]: must have one at least")
        self.user_prefixes = user_prefixes
        self.epoch_num = epoch_num

    def generate_prefix(self, rank: int) -> str:
        """Returns the prefix of the files of `rank`."""
        return _within_epoch(self.user_prefixes[rank % len(self.user_prefixes)], self.epoch_num, rank)


class S3FileSystem(FileSystemBase):
    """The objects of S3 as a file system for torch's checkpoint writers and readers.

    Args:
        region: Region of the buckets; None detects it.
        s3_client: Must be None: torchobj has no such class.
        s3client_config: An `S3ClientConfig`, or a `StoreConfig`.
        reader_constructor: Ignored: a reader fetches what is read.

    Raises:
        ConfigError: `s3_client` is given.
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
        self._config = connector_config(None, s3client_config, region, None)

    def _store(self, path: str | os.PathLike[str]) -> tuple[Store, Url]:
        url = parse_url(os.fspath(path), ("s3",))
        return Store(url.base, config=resolve(str(url), self._config)), url

    def _object(self, path: str | os.PathLike[str]) -> tuple[Store, str]:
        """Returns the store and the key of an object.

        Raises:
            ConfigError: `path` is not the URL of an object.
        """
        store, url = self._store(path)
        if not url.key or url.key.endswith("/"):
            raise ConfigError(f"path={os.fspath(path)!r}: must be the URL of one object, as s3://bucket/folder/file")
        return store, url.key

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Opens a file to read (`rb`) or to write (`wb`). A file is created if the block ends without an exception.

        Raises:
            ConfigError: `mode` is another one, or `path` is not the URL of an object.
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
        """Returns the path of `suffix` in the folder `path`."""
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Returns the path unchanged."""
        return path

    def rename(self, old_path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Copies an object on the server, verifies the copy, and deletes the old one. Does nothing if the paths are the
        same.

        Raises:
            ConfigError: A path is not the URL of an object.
            IntegrityError: The copy does not exist, or is not equal to the object, which is kept.
            ObjectChangedError: The object changed while it was copied, and is kept.
        """
        store, key = self._object(old_path)
        target, new_key = self._object(new_path)
        if (store.url, key) != (target.url, new_key):
            written, found = target.copy(f"{store.url}/{key}", new_key), store.head(key)
            copy = Copy(key, found.size, found.version, new_key, written)
            for reason in unverified(target, [copy], store).values():
                raise IntegrityError(f"rename {old_path}: kept, because {reason}")
            if not delete_unchanged(store, key, found.version):
                raise ObjectChangedError(f"rename {old_path}: kept, because it changed while it was copied")

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Does nothing: S3 has no folders."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Returns whether an object exists."""
        store, key = self._object(path)
        try:
            store.head(key)
        except ObjectNotFoundError:
            return False
        return True

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """Returns the URLs of the objects and folders directly in a folder; none if it does not exist."""
        store, url = self._store(path)
        folder = f"{url.key.rstrip('/')}/" if url.key else ""
        pages = list(store.list(folder, "/").pages())
        names = [info.key for page in pages for info in page.objects if info.key != folder]
        return [f"{url.base}/{name}" for name in sorted([*names, *(name for page in pages for name in page.prefixes)])]

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Deletes an object. A missing object is not an error.

        Raises:
            ConfigError: `path` is not the URL of an object. Folders and buckets are not deleted.
        """
        store, key = self._object(path)
        store.delete(key)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether it is an `s3://` URL."""
        return S3StorageWriter.validate_checkpoint_id(checkpoint_id)


class _S3Storage(CheckpointStorage):
    """What both have in common."""

    _schemes = ("s3",)

    @property
    def path(self) -> str:
        """URL of the checkpoint."""
        return self.checkpoint_id


class S3StorageWriter(_S3Storage, StorageWriter):
    """Saves distributed checkpoints to S3: a `torchobj.checkpoint.StorageWriter` with s3torchconnector's signature.

    `fs` is an `S3FileSystem` with the same settings, and `path` the URL of the checkpoint.

    Args:
        region: Region of the bucket; None detects it.
        path: Folder of the checkpoint, `s3://bucket/folder`.
        s3client_config: An `S3ClientConfig`, or a `StoreConfig`.
        prefix_strategy: Chooses how the names of a rank's files start.
        thread_count: Number of files for the items of a rank.
        kwargs: Arguments of torch's `FileSystemWriter`. `overwrite` has the same meaning; those for syncing and copying
            are ignored.

    Raises:
        ConfigError: `path` is not an `s3://` URL, or the arguments name extensions or a format other than torch.save.
        TypeError: An argument is unknown.
    """

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
        overwrite = kwargs.pop("overwrite", True)
        extensions, form = kwargs.pop("_extensions", None), kwargs.pop("serialization_format", None)
        if extensions:
            raise ConfigError(f"_extensions={extensions!r}: must be empty; torchobj does not write through streams")
        if form is not None and form.value != "torch_save":
            raise ConfigError(f"serialization_format={form}: must be TORCH_SAVE")
        unknown = sorted(set(kwargs) - set(_IGNORED))
        if unknown:
            raise TypeError(f"S3StorageWriter() got an unexpected keyword argument {unknown[0]!r}")
        super().__init__(
            path,
            thread_count=thread_count,
            prefix_strategy=prefix_strategy,
            overwrite=overwrite,
            config=self.fs._config,
        )


class S3StorageReader(_S3Storage, StorageReader):
    """Loads distributed checkpoints from S3: a `torchobj.checkpoint.StorageReader` with s3torchconnector's signature.

    `fs` is an `S3FileSystem` with the same settings, and `path` the URL of the checkpoint.

    Args:
        region: Region of the bucket; None detects it.
        path: Folder of the checkpoint, `s3://bucket/folder`.
        s3client_config: An `S3ClientConfig`, or a `StoreConfig`.
        reader_constructor: Ignored: ranges are read into the memory of the tensors.

    Raises:
        ConfigError: `path` is not an `s3://` URL.
    """

    def __init__(
        self,
        region: str | None,
        path: str | os.PathLike[str],
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        reader_constructor: Any = None,  # noqa: ARG002  part of the signature
    ) -> None:
        self.fs = S3FileSystem(region, s3client_config=s3client_config)
        super().__init__(os.fspath(path), config=self.fs._config)
