"""The outline of a pickle of torch.save: its names, without running it."""

import io
import pickle
import zipfile

import pytest
import torch

from tests.support.saved_objects import stock
from torchobj.checkpoint.archive.pickling import Outline, uses_in
from torchobj.exceptions import CheckpointError


def test_an_outline_runs_no_code_and_lists_all_names():
    class Code:
        def __reduce__(self):
            return (exec, ("raise SystemError",))

    shared = torch.ones(3)
    value = {
        "model": {"weight": shared, "list": [torch.zeros(2), (shared[1:], 5)]},
        "code": Code.__new__(Code),
        "sparse": torch.eye(2).to_sparse(),
        3: torch.nn.Parameter(torch.ones(1)),
    }
    data = zipfile.ZipFile(io.BytesIO(stock(value))).read("archive/data.pkl")
    outline = Outline(data)
    assert "builtins.exec" in outline.globals
    assert list(outline.names.values()) == ["model.weight", "model.list.0", "sparse", "sparse", "3"]
    assert [(use.path, use.dense) for use in uses_in(outline.tree)] == [
        ("model.weight", True),
        ("model.list.0", True),
        ("model.list.1.0", True),
        ("sparse", False),
        ("sparse", False),
        ("3", True),
    ]
    assert [storage.nbytes for storage in outline.storages.values()] == [12, 8, 32, 8, 4]


@pytest.mark.parametrize("data", [b"", b"text", pickle.dumps({"a": 1})[:-1], b"\x80\x02(U\x04textq\x00Q."])
def test_other_data_than_a_pickle_of_torch_has_no_outline(data):
    with pytest.raises(CheckpointError, match=r"data\.pkl is not a pickle of torch\.save"):
        Outline(data)
