"""What the functions of `torchobj.decode` take."""

import numpy
import pytest
import torch

import torchobj
from tests.support.decoding import encoded, forms, noise, reader_of, saved
from torchobj import decode


@forms
def test_every_function_takes_readers_buffers_and_bytes(form):
    array = numpy.arange(6).reshape(2, 3)
    assert numpy.array_equal(decode.npy(form(saved(numpy.save, array))), array)
    assert numpy.array_equal(decode.npz(form(saved(lambda file, it: numpy.savez(file, a=it), array)))["a"], array)
    assert decode.json(form(b'{"a": [1, null]}')) == {"a": [1, None]}
    assert decode.text(form("é".encode())) == "é"
    assert decode.text(form("é".encode("latin-1")), "latin-1") == "é"
    assert decode.pt(form(saved(lambda file, it: torch.save(it, file), {"x": torch.ones(2)})))["x"].tolist() == [1, 1]
    picture = encoded(noise("RGB"), "PNG")
    assert decode.pil(form(picture)).tobytes() == noise("RGB").tobytes()
    assert decode.image(form(picture)).shape == (3, 7, 5)


@forms
def test_safetensors_are_tensors_by_name(form):
    of_torch = pytest.importorskip("safetensors.torch")
    assert decode.safetensors(form(of_torch.save({"x": torch.ones(2)})))["x"].tolist() == [1, 1]


def test_a_reader_is_decoded_from_its_start():
    reader = reader_of(encoded(noise("RGB"), "PNG"))
    reader.read()
    assert decode.pil(reader).size == decode.pil(reader).size == (5, 7)


def test_a_dict_of_bytes_and_path_as_hugging_face_has_for_images_is_decoded():
    data = encoded(noise("RGB"), "PNG")
    for column in ({"bytes": data, "path": None}, {"bytes": data, "path": "a.png"}):
        assert torch.equal(decode.image(column), decode.image(data))
        assert decode.pil(column).tobytes() == decode.pil(data).tobytes()
    assert decode.text({"bytes": b"text", "path": None}) == "text"
    for column, message in (
        ({"bytes": None, "path": "a.png"}, r"only the path 'a\.png', and no bytes: pass the bytes"),
        ({"image": data}, "a dict of 'image': pass the bytes"),
    ):
        with pytest.raises(torchobj.exceptions.ConfigError, match=message):
            decode.image(column)
