"""Tensors are equal to those of torch."""

import contextlib
import pickle

import numpy
import pytest
import torch

import torchobj
from tests.support.decoding import saved
from torchobj import decode


class Evil:
    def __reduce__(self):
        return print, ("unpickled",)


def test_pt_loads_no_other_classes(capsys):
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        decode.pt(saved(lambda file, it: torch.save(it, file), Evil()))
    assert "unpickled" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "pickle"])
def test_a_damaged_object_of_torch_save_is_a_value_error_or_refused(is_zip):
    value = {"a": torch.arange(10.0), "b": [1, "x", {"c": torch.zeros(2, 2)}]}
    data = saved(lambda file, it: torch.save(it, file, _use_new_zipfile_serialization=is_zip), value)
    assert decode.pt(data)["b"][2]["c"].tolist() == [[0, 0], [0, 0]]
    for wrong in (
        b"",
        b"no pickle",
        b"<html>" + bytes(200),
        b"PK",
        b"PK\3\4" + bytes(100),
        b"\x80",
        data[:3],
        data[:99],
    ):
        with pytest.raises(ValueError, match="not an object of torch.save: it begins with|torch.load cannot load"):
            decode.pt(torchobj.Buffer(wrong))
    random = numpy.random.default_rng(5)
    for _ in range(300):
        damaged = bytearray(data[: random.integers(4, len(data))] if random.random() < 0.3 else data)
        for place in random.integers(0, len(damaged), 3):
            damaged[place] = random.choice([0, 255, random.integers(256)])
        with contextlib.suppress(ValueError, pickle.UnpicklingError):
            decode.pt(bytes(damaged))


def test_a_device_that_is_not_there_is_named_by_pt():
    data = saved(lambda file, it: torch.save(it, file), torch.ones(2))
    assert decode.pt(data, map_location="meta").device.type == "meta"
    with pytest.raises(ValueError, match="torch.load cannot load: .*nowhere"):
        decode.pt(data, map_location="nowhere")
