"""The list of a checkpoint's objects that stands beside its metadata: name, size, version and CRC-32 of each."""

import dataclasses
import json
from typing import Any, NamedTuple, Self

import torch

from torchobj import _torchobj
from torchobj.exceptions import CheckpointError

__all__ = ["Manifest", "WrittenFile"]

#: The number of this form. A reader refuses a larger one.
_FORMAT = 1


class WrittenFile(NamedTuple):
    """An object of a checkpoint."""

    name: str
    """Relative to the checkpoint's folder."""
    size: int
    """Bytes."""
    version: str | None
    """What the store calls it: on S3 the ETag, in its quotes."""
    crc32: int
    """Of the whole object."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The objects of a checkpoint. Written before the metadata: only that makes the checkpoint."""

    save_id: str
    """Of the save that wrote them; the metadata's `storage_meta.save_id` is the same when it is committed."""
    files: tuple[WrittenFile, ...]
    """All objects but the manifest itself and the metadata."""
    replaced: tuple[str, ...] = ()
    """Names of what the folder held before, for which this save has no more use: deleted when it is committed."""
    torch_version: str = torch.__version__
    torchobj_version: str = _torchobj.__version__

    def names(self) -> set[str]:
        """All objects that are of no use where the save was not committed, and what it would have replaced."""
        return {file.name for file in self.files} | set(self.replaced)

    def dump(self) -> bytes:
        """As JSON."""
        document = dataclasses.asdict(self) | {"format": _FORMAT}
        document["files"] = [file._asdict() for file in self.files]
        return json.dumps(document, indent=1).encode()

    @classmethod
    def load(cls, data: bytes, url: str) -> Self:
        """From JSON.

        Raises:
            CheckpointError: It is no manifest, or of a newer form; the message names `url`.
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
            raise CheckpointError(f"{url}: is no manifest of a checkpoint: an id or a name is no word")
        if newer:
            raise CheckpointError(f"{url}: was written by torchobj {manifest.torchobj_version}, which is newer")
        return manifest
