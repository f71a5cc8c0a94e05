"""The header of a file of safetensors: the length of a JSON object, and the object with the place of each tensor.

A header is untrusted: `parse` checks everything that a reader relies on, so that the ranges of its tensors cover the
rest of the object, each byte once. Reads no store.
"""

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchobj.checkpoint.safetensors.json_text import JsonText
from torchobj.exceptions import CheckpointError, ConfigError

__all__ = ["DTYPES", "LENGTH_BYTES", "Header", "StoredTensor", "encoded", "header_end", "parse"]

#: Size of the length before the JSON object, little-endian.
LENGTH_BYTES = 8

#: Maximum size of the JSON object (safetensors, src/tensor.rs, `MAX_HEADER_SIZE`).
_MAX_BYTES = 100_000_000

#: torch counts elements and bytes with 63 bits.
_MAX_ELEMENTS = (1 << 63) - 1

#: The name of the file's metadata, which is the name of no tensor.
_METADATA = "__metadata__"

#: The name of each dtype in files. Files have the tensors of the last ones first.
_DTYPES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

#: The dtypes that this torch has, by their names in files.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype) for name, dtype in _DTYPES.items() if hasattr(torch, dtype)
}

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: number for number, dtype in enumerate(DTYPES.values())}


class StoredTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    end: int


class Header(NamedTuple):
    """What a file contains."""

    tensors: list[StoredTensor]
    """In the order of their bytes."""
    metadata: dict[str, str]


def header_end(start: bytes, size: int) -> int:
    """Returns the offset of the first byte after the header.

    Args:
        start: The first bytes of the file.
        size: Size of the file in bytes.

    Raises:
        CheckpointError: There can be no header of this length.
    """
    if size < LENGTH_BYTES:
        raise CheckpointError(f"it is not a file of safetensors: it has {size} bytes")
    if start.startswith(b"PK\x03\x04"):
        raise CheckpointError("it is not a file of safetensors; it looks like one of torch.save: rename it to .pt")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length > min(_MAX_BYTES, size - LENGTH_BYTES):
        limit = f"the limit is {_MAX_BYTES:,}" if length > _MAX_BYTES else f"the object has {size:,}"
        raise CheckpointError(f"it is not a file of safetensors, or truncated: a header of {length:,} bytes; {limit}")
    return LENGTH_BYTES + length


def parse(header: bytes, size: int) -> Header:
    """Returns what a file contains.

    Args:
        header: The file up to `header_end`.
        size: Size of the file in bytes.

    Raises:
        CheckpointError: The header is not valid, or this torch lacks a dtype.
    """
    text = JsonText(header[LENGTH_BYTES:])
    metadata: dict[str, str] = {}
    tensors: list[StoredTensor] = []
    try:
        for name, value in text.members(lambda name: text.strings() if name == _METADATA else text.value()):
            if name == _METADATA:
                metadata = value
            else:
                tensors.append(_tensor(name, value, len(header)))
        text.end()
        tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
        _check_cover(tensors, len(header), size)
    except CheckpointError as error:
        raise CheckpointError(f"its header is damaged: {error}") from None
    return Header(tensors, metadata)


def _tensor(name: str, value: Any, data_start: int) -> StoredTensor:
    shown = reprlib.repr(name)
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise CheckpointError(f"{shown}: {reprlib.repr(value)}: expected dtype, shape and data_offsets")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{shown}: torch {torch.__version__} has no dtype for {reprlib.repr(value['dtype'])}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{shown}: shape {reprlib.repr(shape)}, data_offsets {reprlib.repr(offsets)}: not sizes")
    if dtype is DTYPES.get("F4"):
        # torch has two elements in one.
        if not shape or shape[-1] % 2:
            raise CheckpointError(f"{shown}: shape {reprlib.repr(shape)}: F4 needs an even number of columns")
        shape = [*shape[:-1], shape[-1] // 2]
    elements = 1
    for length in shape:
        # An empty tensor must not have lengths whose product torch cannot represent.
        elements *= max(length, 1)
        if elements * dtype.itemsize > _MAX_ELEMENTS:
            raise CheckpointError(f"{shown}: shape {reprlib.repr(shape)}: too large")
    nbytes = 0 if 0 in shape else elements * dtype.itemsize
    start, end = offsets
    if end - start != nbytes:
        raise CheckpointError(
            f"{shown}: data_offsets {offsets}: {end - start} bytes, but {value['dtype']} of shape "
            f"{reprlib.repr(shape)} has {nbytes}"
        )
    return StoredTensor(name, dtype, tuple(shape), data_start + start, data_start + end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MAX_ELEMENTS for value in values)


def _check_cover(tensors: Sequence[StoredTensor], start: int, size: int) -> None:
    """Checks that sorted tensors cover the bytes `start..size`, each once."""
    at = start
    for tensor in tensors:
        if tensor.start != at:
            what = "a gap before" if tensor.start > at else "an overlap with"
            raise CheckpointError(
                f"{reprlib.repr(tensor.name)}: data_offsets {tensor.start - start}..{tensor.end - start}: there is "
                f"{what} it, expected a start of {at - start}"
            )
        at = tensor.end
    if at != size:
        raise CheckpointError(f"its tensors end at byte {at:,}, but the object has {size:,} bytes")


def encoded(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> tuple[bytes, list[str]]:
    """Returns the header of a file of these tensors, with its length, and the names in the order of the file.

    Raises:
        ConfigError: A name, a dtype or the metadata cannot be in a file.
    """
    members: dict[str, Any] = {}
    if metadata is not None:
        texts = (*metadata, *metadata.values()) if isinstance(metadata, Mapping) else (None,)
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"metadata={reprlib.repr(metadata)}: must be a dict of str, such as {{'format': 'pt'}}")
        members[_METADATA] = dict(metadata)
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == _METADATA:
            raise ConfigError(f"{reprlib.repr(name)}: must be a str other than {_METADATA}, to name a tensor")
        if tensor.dtype not in _NAMES or (tensor.dtype is DTYPES.get("F4") and not tensor.ndim):
            raise ConfigError(f"{name}: a tensor of {tensor.dtype} and shape {tuple(tensor.shape)}: not in safetensors")
    # As safetensors: by falling alignment, then by name.
    names = sorted(sorted(tensors), key=lambda name: -_ORDER[tensors[name].dtype])
    at = 0
    for name in names:
        tensor = tensors[name]
        shape = list(tensor.shape)
        if tensor.dtype is DTYPES.get("F4"):
            shape[-1] *= 2
        offsets = [at, at + tensor.nbytes]
        members[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": offsets}
        at += tensor.nbytes
    try:
        text = json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"a name, or the metadata, has a character that UTF-8 cannot represent: {error}") from None
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"a header of {len(text):,} bytes: readers of safetensors refuse more than {_MAX_BYTES:,}")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, names
