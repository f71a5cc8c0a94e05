"""The methods of `Store` for files. `transfers` implements those that transfer, `checkpoint.files` opens objects."""

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from torchobj._torchobj import ObjectReader
from torchobj.checkpoint import files
from torchobj.checkpoint.files import ObjectWriter, TextFile
from torchobj.files.attributes import ObjectAttributes
from torchobj.files.results import ProgressCallback, Transfer
from torchobj.files.transfers import FilePath, file_from_store, file_to_store

if TYPE_CHECKING:
    from torchobj import _torchobj
    from torchobj.config import StoreConfig

__all__ = ["FileMethods"]


class FileMethods:
    """Uploads and downloads files, and opens objects, for classes with a native store."""

    _native: "_torchobj.NativeStore"
    _url: str
    _config: "StoreConfig"

    @overload
    def open(self, key: str, mode: Literal["rb"] = "rb") -> ObjectReader: ...
    @overload
    def open(
        self, key: str, mode: Literal["wb", "xb"], *, overwrite: bool = True, if_version: str | None = None
    ) -> ObjectWriter: ...
    @overload
    def open(self, key: str, mode: Literal["r", "rt", "w", "wt", "x", "xt"], **arguments: Any) -> TextFile: ...
    @overload
    def open(self, key: str, mode: str, **arguments: Any) -> ObjectReader | ObjectWriter | TextFile: ...

    def open(self, key: str, mode: str = "rb", **arguments: Any) -> ObjectReader | ObjectWriter | TextFile:
        """Opens an object as a file, as `torchobj.open`.

        Args:
            key: The object.
            mode: `rb`, `wb` or `xb`; `r`, `w` or `x` for text.
            arguments: `overwrite` and `if_version`; for text also `encoding`, `errors` and `newline`.

        Raises:
            ConfigError: The mode is unknown, or does not take an argument.
            PreconditionFailedError: From `close()` of a file for writing: the condition does not hold.
        """
        return files.open(f"{self._url}/{key}", mode, config=self._config, **arguments)

    def upload_file(
        self,
        key: str,
        path: FilePath,
        *,
        overwrite: bool = True,
        if_version: str | None = None,
        skip_unchanged: bool = False,
        progress: ProgressCallback | None = None,
        **attributes: Unpack[ObjectAttributes],
    ) -> Transfer:
        """Uploads a file, as `torchobj.files.upload_file`.

        Args:
            key: The object.
            path: A regular file, or a symbolic link to one. It must not change meanwhile.
            overwrite: Whether an existing object may be replaced.
            if_version: Replaces only this version of the object.
            skip_unchanged: Whether to keep an object that is equal to the file.
            progress: Receives a `Progress` about every 0.1 s and at the end.
            attributes: `content_type`, `metadata`, `storage_class` and the other attributes of `put`.

        Raises:
            ObjectChangedError: The file changed while it was uploaded. Nothing is written.
            PreconditionFailedError: The condition is not met.
        """
        return file_to_store(
            self._native,
            key,
            path,
            overwrite=overwrite,
            if_version=if_version,
            skip_unchanged=skip_unchanged,
            progress=progress,
            **attributes,
        )

    def download_file(
        self,
        key: str,
        path: FilePath,
        *,
        version: str | None = None,
        skip_unchanged: bool = False,
        progress: ProgressCallback | None = None,
    ) -> Transfer:
        """Downloads an object to a file, as `torchobj.files.download_file`.

        Args:
            key: The object.
            path: The file, which appears complete or not at all. An existing one is replaced.
            version: The version to read.
            skip_unchanged: Whether to keep a file that is equal to the object.
            progress: Receives a `Progress` about every 0.1 s and at the end.

        Raises:
            ObjectNotFoundError: The object does not exist.
            IntegrityError: The bytes do not have the checksum of the object. The file does not appear.
        """
        return file_from_store(
            self._native, key, path, version=version, skip_unchanged=skip_unchanged, progress=progress
        )
