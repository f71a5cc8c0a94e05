"""Members of tar shards: their names, headers and encoded values. Writes nothing.

Names are divided into key and field as webdataset does. Values that are not bytes are encoded by the field, as by the
`TarWriter` of webdataset, for types where the encoding is evident. numpy, Pillow and torch are imported for their own
values only.
"""

import gzip
import io
import json
import operator
import re
import sys
import tarfile
from collections.abc import Callable, Mapping
from typing import Any, cast

from torchobj.config.checks import check

__all__ = ["BLOCK_BYTES", "encoded", "end_of_archive", "header", "members_of", "padding", "split_name"]

#: Headers and contents fill whole blocks (POSIX, pax interchange format), archives whole records.
BLOCK_BYTES, _RECORD_BYTES = tarfile.BLOCKSIZE, tarfile.RECORDSIZE

#: Permissions of members, those of webdataset: all may read.
_MODE = 0o444

#: A name with a field: `base_plus_ext` of webdataset 1.0 (tariterators.py).
_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")

#: Names that webdataset skips as metadata: `skip_meta` of `tar_file_iterator`.
_META = re.compile(r"__[^/]*__($|/)")


def split_name(name: str) -> tuple[str, str] | None:
    """Divides the name of a member, or a key, into the key of its sample and its field. None if it has no field.

    Example:
        >>> split_name("train/0001.seg.PNG"), split_name("train.v2/0001"), split_name(".hidden")
        (('train/0001', 'seg.png'), None, None)
    """
    found = _NAME.match(name)
    if found is None or _META.match(name):
        return None
    return found[1], found[2].lower()


def header(name: str, size: int) -> bytes:
    """The header of a file, in whole blocks. It depends on nothing else: time and owner are 0.

    A name of more than 100 bytes or with characters that ASCII lacks, and a size of 8 GiB or more, are in a pax header.
    """
    if len(name) <= tarfile.LENGTH_NAME and name.isascii() and size < 8**11:
        # As tarfile does, in 2 us instead of 40.
        encoded, octal = name.encode(), b"%011o\0" % size
        checksum = b"%06o\0 " % (_SUM + sum(encoded) + sum(octal))
        return b"".join(
            (encoded.ljust(tarfile.LENGTH_NAME, b"\0"), _MODE_TO_SIZE, octal, _TIME, checksum, _TYPE_TO_END)
        )
    return _made_by_tarfile(name, size)


def _made_by_tarfile(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, _MODE
    return info.tobuf(tarfile.PAX_FORMAT)


#: The parts of a header that do not depend on the member: from mode to group, the time, and from the type to the end;
#: and the sum of their bytes, with spaces in place of the checksum (POSIX, ustar interchange format).
_EMPTY = _made_by_tarfile("", 0)
_MODE_TO_SIZE, _TIME, _TYPE_TO_END = _EMPTY[100:124], _EMPTY[136:148], _EMPTY[156:]
_SUM = sum(_MODE_TO_SIZE) + sum(_TIME) + sum(_TYPE_TO_END) + 8 * ord(" ")


def padding(size: int) -> bytes:
    """The zeros after a content."""
    return bytes(-size % BLOCK_BYTES)


def end_of_archive(size: int) -> bytes:
    """The zeros after the last member of an archive of `size` bytes: two blocks or more."""
    return bytes(2 * BLOCK_BYTES + -(size + 2 * BLOCK_BYTES) % _RECORD_BYTES)


def members_of(sample: Mapping[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    """The key of a sample, and its fields with their bytes, in the order of their names.

    Fields that begin with an underscore, such as `__url__`, are omitted.

    Raises:
        ConfigError: The sample has no key or no fields, or readers would find other ones in its names.
        TypeError: A value is of a type that cannot be encoded.
    """
    check("sample", sample, 'a dict, such as {"__key__": "0001", "jpg": data}', ok=isinstance(sample, Mapping))
    key: Any = sample.get("__key__")
    names = sorted(name for name in sample if isinstance(name, str) and not name.startswith("_"))
    unknown = [name for name in sample if not isinstance(name, str) or name == ""]
    check("__key__", key, "the name of the sample, a string", ok=isinstance(key, str) and key != "")
    check("fields", list(sample), f"names such as 'jpg', in sample {key!r}", ok=not unknown)
    check("fields", list(sample), f"one field or more besides __key__, in sample {key!r}", ok=bool(names))
    for name in names:
        ok = split_name(f"{key}.{name}") == (key, name.lower()) and "\0" not in key + name
        check("__key__", key, f"a name that readers divide from {name!r}, without a dot after the last slash", ok=ok)
    lower = [name.lower() for name in names]
    check("fields", names, f"different in lower case, in sample {key!r}", ok=len(set(lower)) == len(lower))
    return key, [(name, encoded(name, sample[name], key)) for name in names]


def encoded(field: str, value: Any, key: str) -> Any:
    """The bytes of a value: bytes-like objects as they are, others encoded by the last part of the field.

    Raises:
        TypeError: The field has no encoding for the type; the message names both.
    """
    raw = _raw(value)
    extension = field.lower().removesuffix(".gz").rpartition(".")[2]
    if raw is not None and not (extension in _ARRAYS and _is_array(value)):
        return raw
    try:
        data = value.encode() if isinstance(value, str) else _ENCODERS[extension](value)
    except (LookupError, TypeError, ValueError, OSError) as error:
        reason = "" if isinstance(error, KeyError) else f" ({error})"
        raise TypeError(
            f"field {field!r} of sample {key!r}: a {type(value).__module__}.{type(value).__qualname__} has no "
            f"encoding{reason}; pass the encoded bytes"
        ) from error
    # The time in the header would change the bytes of the shard.
    return gzip.compress(data, mtime=0) if field.lower().endswith(".gz") else data


def _raw(value: Any) -> memoryview | None:
    """The memory of a bytes-like object; None for others, and for arrays that are not a row of bytes."""
    if isinstance(value, str):
        return None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        is_row = value.dtype == torch.uint8 and value.dim() == 1 and value.device.type == "cpu"
        value = value.detach().numpy() if is_row else None
    try:
        view = memoryview(value)
    except (TypeError, BufferError):
        return None
    is_row = view.ndim == 1 and view.format in ("B", "b", "c") and view.c_contiguous
    return view.cast("B") if is_row and (view.format == "B" or not _is_array(value)) else None


def _is_array(value: Any) -> bool:
    """Whether it is an array of numpy, or a tensor of torch."""
    return hasattr(value, "__array__")


def _integer(value: Any) -> bytes:
    return str(int(operator.index(value))).encode()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _npy(value: Any) -> bytes:
    import numpy as np  # noqa: PLC0415  only for values that need it

    if not _is_array(value):
        raise TypeError("must be an array")
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(value), allow_pickle=False)
    return file.getvalue()


def _npz(value: Any) -> bytes:
    import numpy as np  # noqa: PLC0415  only for values that need it

    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError("must be a dict of arrays")
    arrays = {name: np.asarray(array) for name, array in value.items()}
    if any(array.dtype.hasobject for array in arrays.values()):
        raise TypeError("an array of objects would be pickled")
    file = io.BytesIO()
    np.savez_compressed(file, **cast("Any", arrays))
    return file.getvalue()


def _torch_save(value: Any) -> bytes:
    import torch  # noqa: PLC0415  only for values that need it

    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _image(form: str, **options: Any) -> Callable[[Any], bytes]:
    def encode(value: Any) -> bytes:
        if not (type(value).__module__.startswith("PIL.") and hasattr(value, "save")):
            raise TypeError("must be an image of Pillow")
        file = io.BytesIO()
        value.save(file, format=form, **options)
        return file.getvalue()

    return encode


#: Encoders by the last part of the field, with the formats and options of webdataset's `make_handlers`. Its pickles are
#: not among them: reading them would run code from the bucket.
_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), _integer),
    **dict.fromkeys(("json", "jsn"), _json),
    "npy": _npy,
    "npz": _npz,
    **dict.fromkeys(("pt", "pth"), _torch_save),
    **dict.fromkeys(("jpg", "jpeg", "img", "image"), _image("JPEG", quality=100)),
    "png": _image("PNG"),
    **dict.fromkeys(("pbm", "pgm", "ppm"), _image("PPM")),
    **dict.fromkeys(("tif", "tiff"), _image("TIFF", quality=100)),
}

#: Fields whose arrays are encoded, also rows of bytes.
_ARRAYS = frozenset({"npy", "npz", "pt", "pth"})
