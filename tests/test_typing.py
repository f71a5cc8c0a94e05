"""The public classes are generic at run time as torch's are; type checkers check the rest."""

import ast
import typing
from pathlib import Path

import pytest
import torch.utils.data

import torchobj

CLASSES = [
    torchobj.DataLoader,
    torchobj.ObjectDataset,
    torchobj.ObjectIterableDataset,
    torchobj.ObjectMapDataset,
    torchobj.S3IterableDataset,
    torchobj.S3MapDataset,
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_classes_are_generic_as_torchs_are(kind):
    named = kind[int]
    assert typing.get_origin(named) is kind
    assert typing.get_args(named) == (int,)

    class Mine(kind[int]):
        pass

    assert issubclass(Mine, kind)


def test_instances_of_a_parametrised_class_work():
    store = torchobj.Store("memory://typed")
    for number in range(3):
        store.put(str(number), bytes([number]))
    data = torchobj.ObjectMapDataset[int]("memory://typed/", transform=lambda reader: reader.read()[0])
    loader = torchobj.DataLoader[int](data, batch_size=3)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2]]
    assert isinstance(loader, torch.utils.data.DataLoader)
    attached = torchobj.attach(torch.utils.data.DataLoader[int](data, batch_size=3))
    assert [batch.tolist() for batch in attached] == [[0, 1, 2]]


def test_the_type_checked_file_uses_every_public_name():
    """`make lint` runs mypy and pyright on the file that uses every name."""
    tree = ast.parse((Path(__file__).parent / "typing" / "public_names.py").read_text())
    [imported] = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "torchobj"]
    assert {alias.name for alias in imported.names} == {*torchobj.__all__, *torchobj.s3torchconnector.names.__all__}
