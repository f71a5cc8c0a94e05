"""Images are equal to those of torchvision and Pillow."""

import contextlib
import functools
import importlib.util
import io
import struct
import sys
import types
import zlib

import numpy
import PIL.Image
import PIL.ImageOps
import pytest
import torch

import torchobj
from tests.support.decoding import encoded, noise, reader_of
from torchobj import decode
from torchobj.decode import images

IMAGES = [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "PNG"), ("RGBA", "PNG"), ("LA", "PNG"),
          ("P", "PNG"), ("1", "PNG"), ("P", "GIF"), ("RGB", "BMP"), ("RGB", "TIFF"), ("RGB", "WEBP")]  # fmt: skip


@pytest.mark.parametrize(("mode", "form"), IMAGES)
def test_pil_is_what_torchvisions_loader_returns(tmp_path, mode, form):
    from torchvision.datasets.folder import pil_loader

    data = encoded(noise(mode), form)
    (tmp_path / "picture").write_bytes(data)
    expected, found = pil_loader(tmp_path / "picture"), decode.pil(reader_of(data))
    assert (found.mode, found.size, found.tobytes()) == ("RGB", expected.size, expected.tobytes())


def of_pillow(monkeypatch):
    """Decodes with Pillow only."""
    monkeypatch.setattr(images, "native_decoder", lambda: None)


def of_torchvision(monkeypatch):
    """Decodes with torchvision, whether TorchCodec is installed or not."""
    monkeypatch.setattr(images, "native_decoder", lambda: images._of_torchvision())


def of_torchcodec(monkeypatch):
    """Decodes with TorchCodec, or if it is not installed, with a function that rotates and fails as it does."""
    if importlib.util.find_spec("torchcodec") is None:
        module = types.SimpleNamespace(decode_image=like_torchcodec)
        monkeypatch.setitem(sys.modules, "torchcodec.decoders", module)
    monkeypatch.setattr(images, "native_decoder", lambda: images._of_torchcodec())


def like_torchcodec(source, *, mode="RGB", output_dtype=torch.uint8):
    modes = {"GRAY": "L", "GRAY_ALPHA": "LA", "RGB": "RGB", "RGB_ALPHA": "RGBA"}
    with PIL.Image.open(io.BytesIO(source.numpy().tobytes())) as picture:
        frames = getattr(picture, "n_frames", 1)
        try:
            upright = PIL.ImageOps.exif_transpose(picture).convert(modes[mode])
        except OSError as error:
            raise RuntimeError("The image is incomplete or truncated.") from error
    pixels = torch.from_numpy(numpy.array(upright).reshape(*upright.size[::-1], -1)).permute(2, 0, 1)
    return pixels if frames == 1 else pixels.expand(frames, *pixels.shape)


DECODERS = {"TorchCodec": of_torchcodec, "torchvision": of_torchvision, "Pillow": of_pillow}
by_each = pytest.mark.parametrize("choose", DECODERS.values(), ids=DECODERS)


@pytest.mark.parametrize("wanted", ["RGB", "RGBA", "L", "LA"])
@pytest.mark.parametrize(("mode", "form"), IMAGES)
def test_images_have_the_same_shape_and_type_by_each_decoder(monkeypatch, mode, form, wanted):
    data, found = encoded(noise(mode), form), []
    for choose in DECODERS.values():
        choose(monkeypatch)
        found.append(decode.image(torchobj.Buffer(data), wanted))
        assert found[-1].shape == (len(wanted), 7, 5)
        assert found[-1].dtype == torch.uint8
    if mode == wanted and form in ("PNG", "BMP", "TIFF"):
        assert found[0].tolist() == found[1].tolist() == found[2].tolist()


@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
def test_images_are_decoded_by_torchvision_where_it_has_the_format(monkeypatch):
    import torchvision

    data = encoded(noise("RGB"), "JPEG")
    expected = torchvision.io.decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    of_torchvision(monkeypatch)
    monkeypatch.setattr(PIL.Image.Image, "convert", None)
    assert torch.equal(decode.image(data), expected)


def modes_of_torchcodec(monkeypatch, decoded=None):
    """The modes to which TorchCodec decodes from now on. `decoded` is what it returns instead of images."""
    modes = []
    of_torchcodec(monkeypatch)
    inner = importlib.import_module("torchcodec.decoders").decode_image

    def decode_image(source, *, mode):
        modes.append(mode)
        return inner(source, mode=mode) if decoded is None else decoded

    monkeypatch.setitem(sys.modules, "torchcodec.decoders", types.SimpleNamespace(decode_image=decode_image))
    return modes


def test_torchcodec_decodes_what_it_does_not_rotate(monkeypatch):
    modes, plain = modes_of_torchcodec(monkeypatch), encoded(noise("RGB"), "JPEG")
    decode.image(plain)
    decode.image(plain, "LA", exif=True)
    decode.image(rotated("JPEG", 1))
    decode.image(encoded(noise("RGB"), "WEBP"), "RGBA")
    assert modes == ["RGB", "GRAY_ALPHA", "RGB", "RGB_ALPHA"]
    decode.image(rotated("JPEG", 6))
    decode.image(encoded(noise("RGB"), "PNG"))
    assert len(modes) == 4


def test_the_first_image_of_an_animation_is_decoded(monkeypatch):
    file, frames = io.BytesIO(), [noise("RGB"), noise("RGB").transpose(PIL.Image.Transpose.ROTATE_180)]
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    for choose in DECODERS.values():
        choose(monkeypatch)
        assert numpy.array_equal(decode.image(file.getvalue()).permute(1, 2, 0), frames[0])


@pytest.mark.parametrize("exif", [True, False])
def test_without_pillow_an_image_that_may_be_rotated_is_not_decoded_by_torchcodec(monkeypatch, exif):
    plain, turned = encoded(noise("RGB"), "JPEG"), rotated("JPEG", 6)
    modes = modes_of_torchcodec(monkeypatch, decoded=torch.zeros(3, 7, 5))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert decode.image(plain, exif=exif).shape == (3, 7, 5)
    with pytest.raises(torchobj.exceptions.ConfigError, match="needs pillow"):
        decode.image(turned, exif=exif)
    assert modes == ["RGB"]


@pytest.mark.parametrize("module", [None, types.SimpleNamespace()], ids=["missing", "without images"])
def test_torchvision_decodes_where_torchcodec_does_not(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", module)
    images.native_decoder.cache_clear()
    try:
        assert images.native_decoder().module == "torchvision.io"
        monkeypatch.setitem(sys.modules, "torchvision.io", None)
        images.native_decoder.cache_clear()
        assert images.native_decoder() is None
        monkeypatch.setitem(sys.modules, "torchcodec.decoders", types.SimpleNamespace(decode_image=like_torchcodec))
        images.native_decoder.cache_clear()
        assert images.native_decoder().module == "torchcodec.decoders"
    finally:
        images.native_decoder.cache_clear()


@by_each
def test_an_image_of_16_bits_keeps_the_upper_8(monkeypatch, choose):
    data = encoded(PIL.Image.fromarray(numpy.array([[0, 255, 256, 65535]], dtype=numpy.uint16)), "PNG")
    choose(monkeypatch)
    assert decode.image(data, "L").tolist() == [[[0, 0, 1, 255]]]


def pnm(kind, maxval, values, width):
    """A PGM or PPM, plain or binary."""
    channels = 3 if kind in ("P3", "P6") else 1
    head = f"{kind}\n# a comment\n{width} {len(values) // width // channels}\n{maxval}\n".encode()
    plain = " ".join(map(str, values)).encode()
    return head + (plain if kind in ("P2", "P3") else numpy.array(values, ">u2" if maxval > 255 else "u1").tobytes())


def tiff(values, bits, *, order="<", kind=1):
    """A TIFF of one row of grey values; of 12 bits, two of which are in three bytes."""
    if bits == 12:
        data = int("".join(f"{value:012b}" for value in values), 2).to_bytes(len(values) * 12 // 8, "big")
    else:
        data = numpy.array(values, f"{order}{'f' if kind == 3 else 'i' if kind == 2 else 'u'}{bits // 8}").tobytes()
    fields = {256: len(values), 257: 1, 258: bits, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: len(data), 339: kind}
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in fields.items())
    head = struct.pack(f"{order}2sHI", b"II" if order == "<" else b"MM", 42, 8 + len(data) + len(data) % 2)
    directory = struct.pack(f"{order}H", len(fields)) + entries + bytes(4)
    return head + data + bytes(len(data) % 2) + directory


def png(kind, values, *, chunks=b""):
    """A PNG of one row of 16 bits per channel."""
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[kind]

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", len(values) // channels, 1, 16, kind, 0, 0, 0)
    body = b"\0" + numpy.array(values, ">u2").tobytes()
    extra = chunk(b"tRNS", chunks) if chunks else b""
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra
    return start + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["P5", "P2", "P6", "P3"])
def test_values_of_pgm_and_ppm_are_scaled_by_their_maximum(kind):
    for maxval in (1, 100, 255, 256, 300, 1023, 4095, 4096, 65534, 65535):
        values = sorted({0, 1, maxval // 3, maxval // 2, maxval - 1, maxval})
        values += [0] * (-len(values) % 6)
        found = decode.image(pnm(kind, maxval, values, 2), "RGB" if kind in ("P3", "P6") else "L")
        expected = [round(value * 255 / maxval) for value in values]
        assert found.permute(1, 2, 0).flatten().tolist() == expected, maxval


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (tiff([0, 16, 2048, 4095], 12), [0, 1, 128, 255]),
        (tiff([0, 255, 256, 65535], 16), [0, 0, 1, 255]),
        (tiff([0, 255, 256, 65535], 16, order=">"), [0, 0, 1, 255]),
        (png(0, [0, 255, 256, 65535]), [0, 0, 1, 255]),
    ],
    ids=["TIFF of 12 bits", "TIFF", "TIFF, big-endian", "PNG"],
)
def test_grey_pictures_of_more_than_8_bits_keep_the_upper_8(data, expected):
    for mode in ("L", "RGB"):
        assert decode.image(data, mode)[0, 0].tolist() == expected


def test_pngs_of_16_bits_keep_the_upper_8_and_their_transparency():
    values = [0, 255, 256, 65535, 32768, 511, 128, 1000]
    upper = [value >> 8 for value in values]
    rgba = decode.image(png(6, values), "RGBA")
    assert rgba.permute(1, 2, 0).flatten().tolist() == upper
    assert decode.image(png(2, values[:6])).permute(1, 2, 0).flatten().tolist() == upper[:6]
    grey = decode.image(png(4, values), "LA")
    assert grey.permute(1, 2, 0).flatten().tolist() == upper
    # One grey value is transparent, and another one of the same upper 8 bits is not.
    marked = decode.image(png(0, [256, 257, 512], chunks=b"\x01\x00"), "RGBA")
    assert marked.permute(1, 2, 0).tolist() == [[[1, 1, 1, 0], [1, 1, 1, 255], [2, 2, 2, 255]]]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (tiff([0, 70000], 32), "TIFF picture of 32-bit integers"),
        (tiff([-1, 70000], 32, kind=2), "TIFF picture of 32-bit integers"),
        (tiff([-1, 700], 16, kind=2, order=">"), "TIFF picture of 32-bit integers"),
        (tiff([0.5, 1], 32, kind=3), "TIFF picture of 32-bit floats"),
        (tiff([0.5, 1], 32, kind=3, order=">"), "TIFF picture of 32-bit floats"),
        (b"Pf\n2 1\n-1.0\n" + numpy.array([0.5, 1], "<f4").tobytes(), "PPM picture of 32-bit floats"),
    ],
    ids=["unsigned", "signed", "signed, 16 bits", "float", "float, big-endian", "PFM"],
)
def test_pictures_without_a_known_range_are_refused(data, kind):
    with pytest.raises(torchobj.exceptions.ConfigError, match=kind):
        decode.image(data)
    assert decode.pil(data).mode == "RGB"


@pytest.mark.parametrize(
    ("mode", "form"), [("1", "TIFF"), ("1", "PPM"), ("CMYK", "TIFF"), ("LA", "TIFF"), ("P", "TIFF"), ("RGBA", "TIFF")]
)
@pytest.mark.parametrize("wanted", ["L", "LA", "RGB", "RGBA"])
def test_other_modes_are_converted_as_by_pillow(mode, form, wanted):
    data = encoded(noise(mode), form)
    with PIL.Image.open(io.BytesIO(data)) as picture:
        expected = numpy.atleast_3d(numpy.array(picture.convert(wanted)))
    assert numpy.array_equal(decode.image(data, wanted).permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("wanted", ["LA", "RGB", "RGBA"])
def test_a_palette_with_a_transparent_colour_is_converted_as_by_pillow(wanted):
    file = io.BytesIO()
    picture = noise("P")
    picture.save(file, "PNG", transparency=picture.getpixel((0, 0)))
    expected = numpy.atleast_3d(numpy.array(PIL.Image.open(file).convert(wanted)))
    assert numpy.array_equal(decode.image(file.getvalue(), wanted).permute(1, 2, 0).numpy(), expected)


def test_floating_point_images_are_those_of_to_tensor():
    import torchvision

    data = encoded(noise("RGB"), "PNG")
    expected = torchvision.transforms.ToTensor()(decode.pil(data))
    assert torch.equal(decode.image(data, dtype=torch.float32), expected)


@pytest.mark.parametrize(
    "data", [b"", b"no image", encoded(noise("RGB"), "PNG")[:60], encoded(noise("RGB"), "JPEG")[:300]]
)
def test_bytes_that_are_no_image_are_pillows_error(data):
    for function in (decode.pil, decode.image):
        with pytest.raises(OSError, match=r"cannot identify|[Tt]runcated|broken"):
            function(torchobj.Buffer(data))


@pytest.mark.parametrize("cut", [True, False], ids=["truncated", "changed"])
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_a_damaged_image_does_not_end_the_process(form, cut):
    data = encoded(noise("RGB", (64, 64)), form)
    for place in range(60, len(data), len(data) // 20):
        damaged = data[:place] if cut else data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :]
        for function in (decode.pil, decode.image):
            with contextlib.suppress(OSError, ValueError, SyntaxError):
                function(damaged)


def rotated(form, orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    settings = {"quality": 95, "subsampling": 0} if form == "JPEG" else {"lossless": True} if form == "WEBP" else {}
    PIL.Image.fromarray(numpy.arange(24 * 16 * 3, dtype=numpy.uint8).reshape(16, 24, 3)).save(
        file, form, exif=exif, **settings
    )
    return file.getvalue()


@by_each
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_rotated_by_their_exif_data_on_request_only(monkeypatch, form, choose):
    choose(monkeypatch)
    for orientation in range(9):
        data = rotated(form, orientation)
        as_stored = PIL.Image.open(io.BytesIO(data)).convert("RGB")
        upright = PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data))).convert("RGB")
        for exif, expected in ((False, as_stored), (True, upright)):
            settings = {"exif": True} if exif else {}
            assert numpy.array_equal(decode.pil(reader_of(data), **settings), expected)
            for mode in ("RGB", "L"):
                found = decode.image(data, mode, **settings).permute(1, 2, 0).numpy().astype(int)
                pixels = numpy.asarray(expected.convert(mode)).reshape(found.shape)
                # A JPEG contains its greys, which differ from those of its colours.
                assert numpy.abs(found - pixels).max() <= (8 if (form, mode) == ("JPEG", "L") else 0)


@by_each
def test_an_orientation_in_xmp_is_that_of_pillow(monkeypatch, choose):
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    file = io.BytesIO()
    noise("RGB").save(file, "JPEG", xmp=xmp)
    choose(monkeypatch)
    assert decode.image(file.getvalue()).shape == (3, 7, 5)
    upright = PIL.ImageOps.exif_transpose(PIL.Image.open(file))
    assert upright.size == (7, 5)
    assert numpy.array_equal(decode.image(file.getvalue(), exif=True).permute(1, 2, 0), upright)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_data_does_not_change_an_image(monkeypatch):
    data, exif = encoded(noise("RGB"), "JPEG"), b"Exif\0\0II*\0\xff\xff\xff\xff" + bytes(9)
    damaged = data[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + data[2:]
    expected = torch.from_numpy(numpy.array(decode.pil(damaged))).permute(2, 0, 1)
    for choose in DECODERS.values():
        choose(monkeypatch)
        assert torch.equal(decode.image(damaged), expected)


def test_a_dataset_rotates_with_a_partial_function():
    data = rotated("PNG", 6)
    torchobj.Store("memory://decode-exif").put("a/1.png", data)
    for function, shape in ((decode.image, (3, 24, 16)), (functools.partial(decode.pil, exif=True), (16, 24))):
        loader = functools.partial(function, exif=True)
        image, _ = torchobj.ImageFolder("memory://decode-exif", loader=loader)[0]
        assert (image.shape if function is decode.image else image.size) == shape


def test_wrong_arguments_of_image_are_refused():
    with pytest.raises(torchobj.exceptions.ConfigError, match="mode='rgb': must be one of L, LA, RGB, RGBA"):
        decode.image(b"", "rgb")
    for wrong in (torch.int64, "float32"):
        with pytest.raises(
            torchobj.exceptions.ConfigError, match=r"must be torch\.uint8 or a type of floating-point numbers"
        ):
            decode.image(b"", dtype=wrong)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("function", [decode.image, decode.pil])
def test_images_of_too_many_pixels_are_refused_as_by_pillow(monkeypatch, form, function):
    data = encoded(noise("RGB", (20, 21)), form)
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 209)
    with pytest.raises(PIL.Image.DecompressionBombError, match="420 pixels"):
        function(data)
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 210)
    with pytest.warns(PIL.Image.DecompressionBombWarning):
        function(data)
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", None)
    function(data)
