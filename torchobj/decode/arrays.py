"""Decodes arrays of NumPy."""

import io
import math
import struct
import tokenize
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

from torchobj.decode.data import Data, file_of, memory_of
from torchobj.decode.libraries import library

if TYPE_CHECKING:
    import numpy as np

#: Numbers of bytes before the header of an npy file, with the length of the header, by its major version.
_NPY_LENGTHS = {1: 10, 2: 12, 3: 12}

#: Maximum length of the header of an npy file: numpy refuses longer ones.
_MAX_NPY_HEADER_BYTES = 10_000

#: Maximum size of the arrays of an npz file: this number of bytes, or this multiple of the file if that is more.
_MAX_NPZ_BYTES, _MAX_NPZ_RATIO = 1 << 30, 10


def npy(data: Data) -> "np.ndarray[Any, Any]":
    """Decodes an array of `numpy.save`. Arrays of Python objects are refused, because they are pickles.

    Returns:
        An array that shares the memory of the object, without a copy; it is writable if the memory is.

    Raises:
        ValueError: It is not an npy file, is truncated or damaged, or contains Python objects.

    Example:
        >>> import io, numpy, torchobj
        >>> file = io.BytesIO()
        >>> numpy.save(file, numpy.arange(3))
        >>> torchobj.decode.npy(file.getvalue())
        array([0, 1, 2])
    """
    try:
        return _array(memory_of(data))
    except (TypeError, SyntaxError, tokenize.TokenError, ArithmeticError, RecursionError, MemoryError) as error:
        # What numpy raises for a header that is no Python literal, or one of other values.
        raise ValueError(f"a damaged npy file: {error}") from error


def _array(memory: memoryview) -> "np.ndarray[Any, Any]":
    numpy = library("numpy")
    form = library("numpy.lib.format")
    major, _ = version = form.read_magic(io.BytesIO(memory[:8]))
    if major not in _NPY_LENGTHS:
        raise ValueError(f"an npy file of version {version[0]}.{version[1]}: numpy has versions 1 to 3")
    begin = _NPY_LENGTHS[major]
    offset = begin + int.from_bytes(memory[8:begin], "little")
    if offset > begin + _MAX_NPY_HEADER_BYTES:
        raise ValueError(f"an npy file with a header of {offset - begin} bytes; numpy reads {_MAX_NPY_HEADER_BYTES}")
    if major == 1:
        shape, is_fortran, dtype = form.read_array_header_1_0(io.BytesIO(memory[8:offset]))
    else:
        header = bytes(memory[begin:offset])
        if major == 3:
            # UTF-8, which numpy has no public function for: other characters than Latin-1 are names, thus in literals.
            header = header.decode().encode("latin-1", "backslashreplace")
        file = io.BytesIO(len(header).to_bytes(4, "little") + header)
        shape, is_fortran, dtype = form.read_array_header_2_0(file, max_header_size=10 * _MAX_NPY_HEADER_BYTES)
    if dtype.hasobject:
        raise ValueError(f"an npy file of Python objects, {dtype}: these are pickles, which are not loaded")
    # Elements of no size, such as empty strings, could be of any number.
    is_endless = dtype.itemsize == 0 and math.prod(shape) > len(memory)
    if is_endless or any(not 0 <= length < 1 << 63 for length in shape):
        raise ValueError(f"a damaged npy file: an array of shape {shape}")
    size = math.prod(shape) * dtype.itemsize
    if len(memory) - offset < size:
        raise ValueError(f"a truncated npy file: {len(memory) - offset} of {size} bytes of an array of shape {shape}")
    array: np.ndarray[Any, Any] = numpy.ndarray(shape, dtype, memory, offset, order="F" if is_fortran else "C")
    return array


def npz(data: Data) -> "dict[str, np.ndarray[Any, Any]]":
    """Decodes the arrays of `numpy.savez`, by name. Arrays of Python objects are refused, because they are pickles.

    Together the arrays may have 1 GiB, or ten times the size of the file if that is more, so that a small damaged or
    malicious file does not fill the memory. Pass a reader to `numpy.load` for files that are compressed further.

    Raises:
        ValueError: It is not an npz file, is damaged, contains Python objects, or its arrays are too large.
    """
    file = file_of(data)
    is_array = file.read(6) == b"\x93NUMPY"
    if is_array:
        raise ValueError("not an npz file, but a single array: use torchobj.decode.npy")
    limit = max(_MAX_NPZ_BYTES, _MAX_NPZ_RATIO * file.seek(0, io.SEEK_END))
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            size = sum(member.file_size for member in members)
            if size > limit:
                raise ValueError(f"an npz file with {size} bytes of arrays, at most {limit}: load it with numpy.load")
            return {member.filename.removesuffix(".npy"): _npz_member(archive, member) for member in members}
    except (zipfile.BadZipFile, EOFError, zlib.error, struct.error, NotImplementedError) as error:
        raise ValueError(f"not an npz file, or damaged: {error}") from error


def _npz_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Any:
    """An array; the bytes of other members, as in numpy."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or member.flag_bits & 1:
        raise ValueError(f"an npz file whose member {member.filename!r} is encrypted or compressed in another way")
    with archive.open(member) as file:
        # Without a number of bytes, more could be decompressed than the directory declares.
        content = file.read(member.file_size)
    if len(content) < member.file_size:
        raise ValueError(f"a truncated npz file: {len(content)} of {member.file_size} bytes of {member.filename!r}")
    # An array is writable, as those of numpy.load.
    return npy(bytearray(content)) if content.startswith(b"\x93NUMPY") else content
