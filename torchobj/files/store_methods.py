"""The methods of `Store` that transfer files. `transfers` implements them."""

from typing import TYPE_CHECKING, Unpack

from torchobj.files.attributes import ObjectAttributes
from torchobj.files.results import ProgressCallback, Transfer
from torchobj.files.transfers import FilePath, file_from_store, file_to_store

if TYPE_CHECKING:
    from torchobj import _torchobj

__all__ = ["FileMethods"]


class FileMethods:
    """Uploads and downloads files, for classes with a native store."""

    _native: "_torchobj.NativeStore"

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
        """Uploads a file, as `torchobj.files.upload_file`."""
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
        """Downloads an object to a file, as `torchobj.files.download_file`."""
        return file_from_store(
            self._native, key, path, version=version, skip_unchanged=skip_unchanged, progress=progress
        )
