"""Objects to decode."""

import io

import numpy
import PIL.Image
import pytest

import torchobj


def encoded(picture, form):
    file = io.BytesIO()
    picture.save(file, form)
    return file.getvalue()


def noise(mode, size=(5, 7)):
    numbers = numpy.random.default_rng(3).integers(0, 256, (size[1], size[0], 4), dtype=numpy.uint8)
    picture = PIL.Image.fromarray(numbers, "RGBA")
    return (picture.convert("RGB") if mode == "P" else picture).convert(mode)


def reader_of(data):
    return torchobj.ObjectReader("memory://decode/key", "decode", "key", torchobj.Buffer(data))


def on_demand(data):
    torchobj.Store("memory://decode").put("on demand", data)
    return torchobj.open("memory://decode/on demand")


FORMS = {
    "bytes": bytes,
    "memoryview": memoryview,
    "Buffer": torchobj.Buffer,
    "reader": reader_of,
    "on demand": on_demand,
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def saved(write, value):
    file = io.BytesIO()
    write(file, value)
    return file.getvalue()
