"""The manifest of a checkpoint: name, size, version and CRC-32 of each object."""

import dataclasses
import json
from typing import Any, NamedTuple, Self

import torch

from torchobj import _torchobj
from torchobj.exceptions import CheckpointError

__all__ = ["Manifest", "WrittenFile"]

#: Version of the format. Readers reject a later one.
_FORMAT = 1


class WrittenFile(NamedTuple):
    """An object of a checkpoint."""

    name: str
    """Name, relative to the checkpoint's folder."""
    size: int
    """Size in bytes."""
    version: str | None
    """Version in the store; on S3 the ETag, with its quotes."""
    crc32: int
    """CRC-32 of the whole object."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The objects of a checkpoint. Written before the metadata, which commits the checkpoint."""

    save_id: str
    """Id of the save that wrote them. The same as the metadata's `storage_meta.save_id` if the save is committed."""
    files: tuple[WrittenFile, ...]
    """All objects except the manifest and the metadata."""
    replaced: tuple[str, ...] = ()
    """Names of the files that this save replaces, and deletes once it is committed."""
    torch_version: str = torch.__version__
    torchobj_version: str = _torchobj.__version__

    def names(self) -> set[str]:
        """Returns the names of the files of this save, and of the files that it replaces."""
        return {file.name for file in self.files} | set(self.replaced)

    def dump(self) -> bytes:
        """Returns the manifest as JSON."""
        document = dataclasses.asdict(self) | {"format": _FORMAT}
        document["files"] = [file._asdict() for file in self.files]
        return json.dumps(document, indent=1).encode()

    @classmethod
    def load(cls, data: bytes, url: str) -> Self:
        """Parses JSON.

        Raises:
            CheckpointError: It is not a manifest, or has a later format; the message names `url`.
        """
        try:
            document: dict[str, Any] = json.loads(data)
            newer = int(document.pop("format")) > _FORMAT
            files = tuple(WrittenFile(**file) for file in document.pop("files"))
            manifest = cls(files=files, replaced=tuple(document.pop("replaced")), **document)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{url}: is no manifest of a checkpoint: {error}") from error
        words = (manifest.save_id, *(file.name for file in files), *manifest.replaced)
        if not manifest.save_id or not all(isinstance(word, str) for word in words):
            raise CheckpointError(f"{url}: is no manifest of a checkpoint: an id or a name is not a string")
        if not _is_utf8(manifest.save_id):
            raise CheckpointError(f"{url}: is no manifest of a checkpoint: the id has no UTF-8 encoding")
        if newer:
            raise CheckpointError(f"{url}: was written by torchobj {manifest.torchobj_version}, which is newer")
        return manifest


def _is_utf8(text: str) -> bool:
    """Whether a text can be encoded. JSON can contain a lone surrogate, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
