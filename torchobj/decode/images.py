"""Decodes images to Pillow images and to tensors."""

import contextlib
import functools
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobj.decode.data import Data, file_of, memory_of
from torchobj.decode.libraries import TORCHCODEC, TORCHVISION, library, required
from torchobj.exceptions import ConfigError

if TYPE_CHECKING:
    import PIL.Image
    import torch

#: Position and content of the first bytes of an image, in the formats that TorchCodec and torchvision decode as Pillow
#: does. PNG is not among them: torchvision 0.29 ends the process with a segmentation fault at the first damaged byte.
_JPEG, _WEBP = (0, b"\xff\xd8\xff"), (8, b"WEBP")

#: The modes of Pillow and their names in TorchCodec and torchvision.
_MODES = {"L": "GRAY", "LA": "GRAY_ALPHA", "RGB": "RGB", "RGBA": "RGB_ALPHA"}

#: The tag of EXIF data that says how a picture is rotated and flipped, and its value if it is not.
_ORIENTATION, _UPRIGHT = 0x0112, 1

#: The tag of a TIFF with the number of bits of each channel.
_BITS_PER_SAMPLE = 258


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
    images = required("PIL.Image", "pillow", "pil")
    with images.open(file_of(data)) as picture:
        converted: PIL.Image.Image = _upright(picture, exif=exif).convert("RGB")
    return converted


def _upright(picture: Any, *, exif: bool) -> Any:
    return library("PIL.ImageOps").exif_transpose(picture) if exif else picture


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
    torch_module = library("torch")
    if mode not in _MODES:
        raise ConfigError(f"mode={mode!r}: must be one of {', '.join(_MODES)}")
    chosen = dtype or torch_module.uint8
    if not isinstance(chosen, torch_module.dtype) or not (chosen == torch_module.uint8 or chosen.is_floating_point):
        raise ConfigError(f"dtype={dtype!r}: must be torch.uint8 or a type of floating-point numbers")
    memory = memory_of(data)
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
def native_decoder() -> _NativeDecoder | None:
    """The decoder of TorchCodec or torchvision; None if neither is installed and fits torch."""
    for make in (_of_torchcodec, _of_torchvision):
        # A library that was compiled for another version of NumPy or torch may raise anything.
        with contextlib.suppress(Exception):
            return make()
    return None


def _of_torchcodec() -> _NativeDecoder:
    decode = library(TORCHCODEC).decode_image
    return _NativeDecoder(TORCHCODEC, lambda data, mode: decode(data, mode=_MODES[mode]), rotates=True)


def _of_torchvision() -> _NativeDecoder:
    modes = library(TORCHVISION).ImageReadMode
    # Not torchvision.io.decode_image, which warns at each call since 0.29 that TorchCodec will replace it.
    decode = library("torch").ops.image.decode_image
    return _NativeDecoder(TORCHVISION, lambda data, mode: decode(data, modes[_MODES[mode]].value), rotates=False)


def _decoded_natively(torch: Any, memory: memoryview, mode: str, *, exif: bool) -> Any:
    """A tensor of bytes; None if only Pillow decodes the object as is wanted."""
    # torchvision does not convert WebP to grey.
    formats = (_JPEG, _WEBP) if mode.startswith("RGB") else (_JPEG,)
    if not any(memory[at : at + len(start)] == start for at, start in formats):
        return None
    decoder = native_decoder()
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
        images = library("PIL.Image")
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
    images, numpy = required("PIL.Image", "pillow", "image"), library("numpy")
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
