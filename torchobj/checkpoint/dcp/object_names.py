"""Names of the objects of a distributed checkpoint, relative to its folder. Does no I/O.

The name of a file of items is `<prefix><token>_<number>.distcp`. Each rank has a new token in each save, so a save
never overwrites a file of another one, and a listing shows which files were written together. The token begins with the
number of slashes in the prefix: a name alone tells the checkpoint's folder, and thereby the metadata that may name it.
Names of other programs have no such token.
"""

import re
import secrets
from typing import Any

from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX

from torchobj.checkpoint.checkpoint_dir import is_canonical
from torchobj.checkpoint.leftovers import Attempt
from torchobj.exceptions import ConfigError

__all__ = ["METADATA", "FileNames", "attempt_of", "is_item_file", "is_metadata", "rank_prefix", "ranked"]

#: The object that commits a checkpoint, as torch names it.
METADATA = ".metadata"

_METADATA = re.compile(rf"(?:__[0-9]+)?{re.escape(METADATA)}")

#: The token is a mark, the number of slashes in 3 hexadecimal digits, enough for the longest path, and 12 random ones.
_MARK = "tobj"
_FILE = re.compile(rf".*({_MARK}([0-9a-f]{{3}})[0-9a-f]{{12}})_[0-9]{{1,9}}{re.escape(DEFAULT_SUFFIX)}", re.DOTALL)


def rank_prefix(rank: int) -> str:
    """Returns how the names of a rank's files start, as torch names them."""
    return f"__{rank}_"


def ranked(name: str, rank: int | None) -> str:
    """Returns the name of the object that a rank writes for itself, as torch names `.metadata`; for None, `name`."""
    return name if rank is None else f"__{rank}{name}"


def is_metadata(name: str) -> bool:
    """Returns whether a name is that of the metadata of all ranks or of one rank."""
    return _METADATA.fullmatch(name) is not None


def is_item_file(name: Any) -> bool:
    """Returns whether an untrusted name from a checkpoint is that of a file of items in its folder."""
    return isinstance(name, str) and name.endswith(DEFAULT_SUFFIX) and is_canonical(name)


class FileNames:
    """The names of the files of one rank in one save.

    Args:
        prefix: Start of the names.

    Raises:
        ConfigError: The prefix leaves the checkpoint's folder, or has an empty component.
    """

    def __init__(self, prefix: str) -> None:
        #: The attempt of this rank, whose nonce is the token in the names.
        self.attempt = Attempt("", f"{_MARK}{prefix.count('/'):03x}{secrets.token_hex(6)}")
        self._beginning = f"{prefix}{self.attempt.nonce}_"
        if attempt_of(self.file(0)) is None:
            message = "must be components between single slashes, without '.', '..', backslashes and null characters"
            raise ConfigError(f"prefix_strategy: the prefix {prefix!r}: {message}")

    def file(self, number: int) -> str:
        """Returns the name of a file."""
        return f"{self._beginning}{number}{DEFAULT_SUFFIX}"


def attempt_of(name: str) -> Attempt[str] | None:
    """Returns the attempt that wrote a file: of one rank, with the folder of its checkpoint as the name tells it.

    None if no `StorageWriter` below the folder writes a file with this name.
    """
    found = _FILE.fullmatch(name)
    if found is None or not is_canonical(name):
        return None
    token, depth = found[1], int(found[2], 16)
    folders = name.split("/")[:-1]
    if depth > len(folders):
        return None
    return Attempt("".join(f"{folder}/" for folder in folders[: len(folders) - depth]), token)
