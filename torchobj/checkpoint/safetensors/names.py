"""Names of files of safetensors, and of those in a folder, as `huggingface_hub` chooses them."""

import re
from typing import Any, Literal, TypeAlias

from torchobj.exceptions import CheckpointError, ConfigError

__all__ = [
    "INDEX",
    "WHOLE",
    "Format",
    "check_shard",
    "is_folder",
    "is_index",
    "is_of_model",
    "is_safetensors",
    "is_tensor_shard",
    "shard",
    "tensor_shard",
]

#: The argument `format` of `save` and `load`. None: by the name.
Format: TypeAlias = Literal["safetensors"] | None

#: The only file of a folder without an index.
WHOLE = "model.safetensors"

#: Names the file of each tensor of a folder.
INDEX = "model.safetensors.index.json"

_OF_MODEL = re.compile(r"(shard-\d{5,}-(?=model-))?model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")


def is_safetensors(url: Any, format: Format) -> bool:  # noqa: A002  the argument of `save` and `load`
    """Returns whether a URL is that of a file of safetensors, by its name or by `format`.

    Raises:
        ConfigError: `format` is invalid.

    Example:
        >>> is_safetensors("s3://bucket/model.safetensors", None), is_safetensors("s3://bucket/model.pt", None)
        (True, False)
    """
    if format not in (None, "safetensors"):
        raise ConfigError(f"format={format!r}: must be 'safetensors', or None for the format of the URL's suffix")
    return format is not None or (isinstance(url, str) and url.lower().endswith(".safetensors"))


def is_folder(url: Any) -> bool:
    """Returns whether a URL is that of a folder: whether it ends with a slash."""
    return isinstance(url, str) and url.endswith("/")


def is_index(url: Any) -> bool:
    """Returns whether a URL is that of the index of a folder."""
    return isinstance(url, str) and url.endswith(".safetensors.index.json")


def is_of_model(name: str) -> bool:
    """Returns whether a name is one of those that a folder of weights has.

    Example:
        >>> is_of_model("model-00001-of-00002.safetensors"), is_of_model("model.fp16.safetensors")
        (True, False)
    """
    return _OF_MODEL.fullmatch(name) is not None


def shard(number: int, count: int) -> str:
    """Returns the name of a shard; numbers begin at 1.

    Example:
        >>> shard(1, 2)
        'model-00001-of-00002.safetensors'
    """
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def tensor_shard(writer: int, number: int, count: int) -> str:
    """Returns the name of what one rank has of a shard, as torch's `HuggingFaceStorageWriter` names it.

    Example:
        >>> tensor_shard(3, 1, 2)
        'shard-00003-model-00001-of-00002.safetensors'
    """
    return f"shard-{writer:05d}-{shard(number, count)}"


def is_tensor_shard(name: str) -> bool:
    """Returns whether a name is one that `tensor_shard` returns.

    Example:
        >>> is_tensor_shard("shard-00003-model-00001-of-00002.safetensors"), is_tensor_shard("model.safetensors")
        (True, False)
    """
    return name.startswith("shard-") and is_of_model(name)


def check_shard(name: str) -> None:
    """Checks a name of a shard in an index: an index must not name files outside of its folder.

    Raises:
        CheckpointError: It is absolute, a URL, contains `..`, or is not a file of safetensors.
    """
    parts = re.split(r"[/\\]", name)
    if not name.endswith(".safetensors") or ":" in parts[0] or {"", ".", ".."} & set(parts):
        raise CheckpointError(f"it names the file {name[:100]!r}: not a file of safetensors in the folder of the index")
