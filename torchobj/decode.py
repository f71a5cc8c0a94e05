"""Decodes objects: images, arrays, JSON, text, tensors. The libraries are imported at the first call of a function, or
by a loader of torchobj before it starts workers (`import_libraries`).

The functions can be pickled, and take what datasets pass on: a reader, a `Buffer`, any object with the buffer protocol,
or the dict of `bytes` and `path` that a column of images or audio of Hugging Face datasets has. A reader is decoded
from its start, regardless of its position. Nothing here reads a bucket by itself.
"""

import contextlib
import functools
import importlib
import io
import json as json_module
import math
import pickle
import struct
import sys
import threading
import time
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from typing_extensions import Buffer as BufferProtocol

from torchobj._torchobj import ObjectReader
from torchobj.exceptions import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image
    import torch

__all__ = ["image", "json", "npy", "npz", "pil", "pt", "safetensors", "text"]

#: An object to decode.
Data = ObjectReader | BufferProtocol | dict[str, Any]

#: Position and content of the first bytes of an image, in the formats that TorchCodec and torchvision decode as Pillow
#: does. PNG is not among them: torchvision 0.29 ends the process with a segmentation fault at the first damaged byte.
_JPEG, _WEBP = (0, b"\xff\xd8\xff"), (8, b"WEBP")

#: The modes of Pillow and their names in TorchCodec and torchvision.
_MODES = {"L": "GRAY", "LA": "GRAY_ALPHA", "RGB": "RGB", "RGBA": "RGB_ALPHA"}

#: The tag of EXIF data that says how a picture is rotated and flipped, and its value if it is not.
_ORIENTATION, _UPRIGHT = 0x0112, 1

#: The tag of a TIFF with the number of bits of each channel.
_BITS_PER_SAMPLE = 258

#: Numbers of bytes before the header of an npy file, with the length of the header, by its major version.
_NPY_LENGTHS = {1: 10, 2: 12, 3: 12}

#: Maximum length of the header of an npy file: numpy refuses longer ones.
_MAX_NPY_HEADER_BYTES = 10_000

#: The first bytes of an object of `torch.save`: a zip archive, or a pickle of an older version.
_PT_STARTS = (b"PK\x03\x04", b"\x80")

#: Maximum size of the arrays of an npz file: this number of bytes, or this multiple of the file if that is more.
_MAX_NPZ_BYTES, _MAX_NPZ_RATIO = 1 << 30, 10


class _Imports(threading.local):
    """The time that this thread has spent on imports of libraries."""

    seconds = 0.0
    is_measuring = False


imports = _Imports()


def _module(name: str) -> Any:
    # As each decoded sample finds it.
    if name in sys.modules:
        return importlib.import_module(name)
    began, imports.is_measuring = time.perf_counter(), True
    try:
        return importlib.import_module(name)
    finally:
        imports.is_measuring = False
        imports.seconds += time.perf_counter() - began


def _imported(module: str, package: str, function: str) -> Any:
    try:
        return _module(module)
    except ImportError as error:
        raise ConfigError(f"torchobj.decode.{function} needs {package} ({error}): pip install {package}") from error


def _content(data: Data) -> ObjectReader | BufferProtocol:
    """The bytes in a dict of Hugging Face datasets, and anything else unchanged."""
    if not isinstance(data, dict):
        return data
    content: BufferProtocol | None = data.get("bytes")
    if content is None:
        path = data.get("path")
        reason = f"a dict of {', '.join(map(repr, data))}" if path is None else f"only the path {path!r}, and no bytes"
        raise ConfigError(f"torchobj.decode: {reason}: pass the bytes of the object, such as torchobj.get(url)")
    return content


def _memory(data: Data) -> memoryview:
    """The bytes, shared if they are in memory."""
    data = _content(data)
    if isinstance(data, ObjectReader):
        if data.buffer is not None:
            return data.getbuffer()
        data.seek(0)
        return memoryview(data.read())
    return memoryview(data).cast("B")


def _file(data: Data) -> BinaryIO:
    """The bytes as a file, at its start."""
    data = _content(data)
    if isinstance(data, ObjectReader):
        data.seek(0)
        return data
    return io.BytesIO(data)


def pil(data: Data, *, exif: bool = False) -> "PIL.Image.Image":
    """Decodes an image as torchvision's `ImageFolder` does.

    Values of pictures with 16 bits per channel that Pillow opens as such, as grey PNGs, are limited to 255, as Pillow
    converts them; `image` scales them.

    Args:
        data: The object.
        exif: Whether to rotate and flip the picture as its EXIF data says, as `PIL.ImageOps.exif_transpose` does.
            Cameras and phones store many pictures lying on their side. By default this is not done, as by Pillow and
            torchvision. Use `functools.partial` to pass it to a dataset.

    Returns:
        A loaded Pillow image of mode RGB.

    Raises:
        ConfigError: Pillow is not installed.
        PIL.UnidentifiedImageError: The bytes are not an image.
        OSError: The image is truncated or damaged. With damaged formats Pillow also raises ValueError, SyntaxError and
            others.
        PIL.Image.DecompressionBombError: It has more than twice `PIL.Image.MAX_IMAGE_PIXELS` pixels.

    Example:
        >>> import io, PIL.Image, torchobj
        >>> file = io.BytesIO()
        >>> PIL.Image.new("L", (4, 3), 128).save(file, "PNG")
        >>> torchobj.decode.pil(file.getvalue()).getpixel((0, 0))
        (128, 128, 128)
    """
    images = _imported("PIL.Image", "pillow", "pil")
    with images.open(_file(data)) as picture:
        converted: PIL.Image.Image = _upright(picture, exif=exif).convert("RGB")
    return converted


def _upright(picture: Any, *, exif: bool) -> Any:
    return _module("PIL.ImageOps").exif_transpose(picture) if exif else picture


def image(data: Data, mode: str = "RGB", dtype: "torch.dtype | None" = None, *, exif: bool = False) -> "torch.Tensor":
    """Decodes an image to a tensor: JPEG and WebP with TorchCodec 0.16 or newer, or torchvision, others with Pillow.

    Without these two, Pillow decodes every image, as it does those that EXIF data rotates where the others cannot.

    Pictures with 12 or 16 bits per channel are scaled to 8, PGM and PPM by their maximum value; `pil` limits the values
    of grey ones to 255 instead. Those of 32-bit integers or floats, as some TIFF are, have no known range and are
    refused. The number of pixels is limited by `PIL.Image.MAX_IMAGE_PIXELS` where Pillow is installed: it reads the
    header before a picture is decoded.

    Args:
        data: The object.
        mode: `RGB`, `RGBA`, `L` (grey) or `LA`. Use `functools.partial` to pass it to a dataset.
        dtype: `torch.uint8`, or a type of floating-point numbers, whose values are from 0 to 1. None: `torch.uint8`.
        exif: Whether to rotate and flip the picture as its EXIF data says, as for `pil`.

    Returns:
        Tensor of shape (channels, height, width), on the CPU, which owns its memory.

    Raises:
        ConfigError: An argument is invalid, Pillow is needed and not installed, or the picture is of 32-bit integers or
            floats.
        PIL.UnidentifiedImageError: The bytes are not an image.
        OSError: The image is truncated or damaged. With damaged formats Pillow also raises ValueError, SyntaxError and
            others.
        PIL.Image.DecompressionBombError: It has more than twice `PIL.Image.MAX_IMAGE_PIXELS` pixels. With more than
            this number, Pillow warns.

    Example:
        >>> import io, PIL.Image, torch, torchobj
        >>> file = io.BytesIO()
        >>> PIL.Image.new("L", (4, 3), 51).save(file, "PNG")
        >>> torchobj.decode.image(file.getvalue()).shape
        torch.Size([3, 3, 4])
        >>> torchobj.decode.image(file.getvalue(), "L", torch.float32)[0, 0, 0]
        tensor(0.2000)
    """
    torch_module = _module("torch")
    if mode not in _MODES:
        raise ConfigError(f"mode={mode!r}: must be one of {', '.join(_MODES)}")
    chosen = dtype or torch_module.uint8
    if not isinstance(chosen, torch_module.dtype) or not (chosen == torch_module.uint8 or chosen.is_floating_point):
        raise ConfigError(f"dtype={dtype!r}: must be torch.uint8 or a type of floating-point numbers")
    memory = _memory(data)
    decoded = _decoded_natively(torch_module, memory, mode, exif=exif)
    if decoded is None:
        decoded = _decoded_by_pillow(torch_module, memory, mode, exif=exif)
    scaled: torch.Tensor = decoded if chosen == torch_module.uint8 else decoded.to(chosen) / 255
    return scaled


class _NativeDecoder(NamedTuple):
    """Decodes JPEG and WebP to tensors."""

    module: str
    """Name of the module that it is from."""
    decode: Callable[[Any, str], Any]
    """Decodes a tensor of bytes to a mode."""
    rotates: bool
    """Whether it always rotates an image as its EXIF data says; otherwise never."""


@functools.cache
def _native_decoder() -> _NativeDecoder | None:
    """That of TorchCodec or torchvision; None if neither is installed and fits torch."""
    for make in (_of_torchcodec, _of_torchvision):
        with contextlib.suppress(ImportError, AttributeError, RuntimeError, OSError):
            return make()
    return None


def _of_torchcodec() -> _NativeDecoder:
    decode = _module("torchcodec.decoders").decode_image
    return _NativeDecoder("torchcodec", lambda data, mode: decode(data, mode=_MODES[mode]), rotates=True)


def _of_torchvision() -> _NativeDecoder:
    modes = _module("torchvision.io").ImageReadMode
    # Not torchvision.io.decode_image, which warns at each call since 0.29 that TorchCodec will replace it.
    decode = _module("torch").ops.image.decode_image
    return _NativeDecoder("torchvision", lambda data, mode: decode(data, modes[_MODES[mode]].value), rotates=False)


def _decoded_natively(torch: Any, memory: memoryview, mode: str, *, exif: bool) -> Any:
    """A tensor of bytes; None if only Pillow decodes the object as is wanted."""
    # torchvision does not convert WebP to grey.
    formats = (_JPEG, _WEBP) if mode.startswith("RGB") else (_JPEG,)
    if not any(memory[at : at + len(start)] == start for at, start in formats):
        return None
    decoder = _native_decoder()
    if decoder is None:
        return None
    is_upright = _is_upright(memory, needed=exif or decoder.rotates)
    if not is_upright and (exif or decoder.rotates):
        return None
    # torch warns about memory that is read-only.
    encoded = torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8)
    try:
        decoded = decoder.decode(encoded, mode)
    except (RuntimeError, ValueError, AttributeError):  # It is damaged, or this build lacks the decoder.
        return None
    # TorchCodec returns all images of an animation.
    return decoded if decoded.ndim == 3 else None


def _is_upright(memory: memoryview, *, needed: bool) -> bool:
    """Whether EXIF data does not rotate an image; read if `needed`. Nothing is decoded.

    Raises:
        Exception: That of Pillow for an image of too many pixels, or whose header is damaged.
    """
    try:
        images = _module("PIL.Image")
    except ImportError:
        return b"exif" not in bytes(memory).lower()
    with images.open(io.BytesIO(memory)) as picture:
        if not needed:
            return True
        try:
            return bool(picture.getexif().get(_ORIENTATION, _UPRIGHT) == _UPRIGHT)
        except Exception:  # noqa: BLE001  damaged EXIF data, of many types: Pillow reads it again if it matters
            return False


def _decoded_by_pillow(torch: Any, memory: memoryview, mode: str, *, exif: bool) -> Any:
    images, numpy = _imported("PIL.Image", "pillow", "image"), _module("numpy")
    with images.open(io.BytesIO(memory)) as opened:
        picture = _upright(opened, exif=exif)
        if picture.mode.startswith(("I", "F")):
            picture = _in_8_bits(images, numpy, picture, opened)
        pixels = numpy.array(picture.convert(mode))
    channels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    return torch.from_numpy(numpy.ascontiguousarray(channels.transpose(2, 0, 1)))


def _in_8_bits(images: Any, numpy: Any, picture: Any, opened: Any) -> Any:
    """A grey picture of more than 8 bits scaled to 8: `convert` would replace values above 255 by 255."""
    values = numpy.asarray(picture)
    if opened.format == "PPM" and picture.mode != "F":
        # Pillow has scaled it by its maxval to 16 bits; rounded, as Pillow scales coloured ones.
        scaled = (values.astype(numpy.int32) + 128) // 257
    elif opened.format == "PNG" or picture.mode.startswith("I;16"):
        is_of_12 = getattr(opened, "tag_v2", {}).get(_BITS_PER_SAMPLE) == (12,)
        scaled = values >> (4 if is_of_12 else 8)
    else:
        kind = "32-bit floats" if picture.mode == "F" else "32-bit integers"
        raise ConfigError(
            f"torchobj.decode.image: a {opened.format} picture of {kind}: its range is not known, so that it cannot be "
            "scaled to 8 bits; pass a function that opens it with PIL.Image.open and scales it"
        )
    grey = images.fromarray(scaled.astype(numpy.uint8))
    if isinstance(transparent := opened.info.get("transparency"), int):
        grey.putalpha(images.fromarray(numpy.where(values == transparent, 0, 255).astype(numpy.uint8)))
    return grey


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
        return _array(_memory(data))
    except (TypeError, SyntaxError, tokenize.TokenError, ArithmeticError, RecursionError, MemoryError) as error:
        # What numpy raises for a header that is no Python literal, or one of other values.
        raise ValueError(f"a damaged npy file: {error}") from error


def _array(memory: memoryview) -> "np.ndarray[Any, Any]":
    numpy = _module("numpy")
    form = _module("numpy.lib.format")
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
    file = _file(data)
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


def json(data: Data) -> Any:
    """Decodes JSON.

    Raises:
        json.JSONDecodeError: It is not JSON, or lists and objects are nested more deeply than Python's parser permits.
            It is a ValueError, as the others are.
        UnicodeDecodeError: It is not text in UTF-8, UTF-16 or UTF-32.
        ValueError: An integer has more digits than `sys.get_int_max_str_digits()`.
    """
    try:
        return json_module.loads(bytes(_memory(data)))
    except RecursionError:
        raise json_module.JSONDecodeError("Lists and objects are nested too deeply", "", 0) from None


def text(data: Data, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Decodes text.

    Args:
        data: The object.
        encoding: Name of the encoding.
        errors: What to do with bytes that are not text, as for `bytes.decode`.

    Raises:
        UnicodeDecodeError: It is not text in this encoding.
    """
    return str(_memory(data), encoding, errors)


def pt(data: Data, map_location: Any = "cpu") -> Any:
    """Decodes what `torch.save` wrote: tensors, and containers of these and of plain values.

    Args:
        data: The object.
        map_location: Where tensors are placed, as for `torch.load`.

    Raises:
        pickle.UnpicklingError: It contains other classes, which are not loaded, or is damaged.
        ValueError: It is not an object of `torch.save`, is truncated or damaged, or `map_location` is not available.
    """
    file, torch = _file(data), _module("torch")
    start = file.read(4)
    file.seek(0)
    if not start.startswith(_PT_STARTS):
        raise ValueError(f"not an object of torch.save: it begins with {start!r}")
    try:
        return torch.load(file, map_location=map_location, weights_only=True)
    except (pickle.UnpicklingError, torch.OutOfMemoryError):
        raise
    # What torch raises for a damaged file, which is of many types.
    except (
        RuntimeError,
        ValueError,
        TypeError,
        EOFError,
        AttributeError,
        LookupError,
        AssertionError,
        struct.error,
    ) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"an object that torch.load cannot load: {type(error).__name__}: {reason}") from error


def safetensors(data: Data) -> "dict[str, torch.Tensor]":
    """Decodes the tensors of a safetensors file, by name, on the CPU.

    Raises:
        ConfigError: safetensors is not installed.
        safetensors.SafetensorError: It is not a safetensors file.
    """
    load = _imported("safetensors.torch", "safetensors", "safetensors").load
    tensors: dict[str, torch.Tensor] = load(bytes(_memory(data)))
    return tensors


#: The modules that functions import at their first call; `image` also imports that of its native decoder.
_MODULES: dict[Callable[..., Any], tuple[str, ...]] = {
    image: ("torch", "numpy", "PIL.Image", "PIL.ImageOps"),
    json: (),
    npy: ("numpy", "numpy.lib.format"),
    # The encoding is that of names in zip archives.
    npz: ("numpy", "numpy.lib.format", "encodings.cp437"),
    pil: ("PIL.Image", "PIL.ImageOps"),
    pt: ("torch", "torch.utils.serialization.config"),
    safetensors: ("safetensors.torch",),
    text: (),
}


def import_libraries(functions: Iterable[Callable[..., Any]]) -> list[str]:
    """Imports what functions of this module import at their first call, as far as it is installed.

    Args:
        functions: Functions of this module; others are ignored.

    Returns:
        Names of the modules.
    """
    found: dict[str, None] = {}
    for function in functions:
        for name in _MODULES.get(function, ()):
            # Otherwise the call fails, with its own error.
            with contextlib.suppress(Exception):
                _module(name)
                found[name] = None
        if function is image and (decoder := _native_decoder()) is not None:
            found[decoder.module] = None
    if "PIL.Image" in found:
        # The modules of its formats, in the order in which images that it does not recognise import them.
        sys.modules["PIL.Image"].preinit()
        sys.modules["PIL.Image"].init()
    return list(found)
