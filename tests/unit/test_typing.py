"""The public classes take a type parameter at run time, as torch's do."""

import typing

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


def test_what_is_made_of_a_named_class_works():
    store = torchobj.Store("memory://typed")
    for number in range(3):
        store.put(str(number), bytes([number]))
    data = torchobj.ObjectMapDataset[int]("memory://typed/", transform=lambda reader: reader.read()[0])
    loader = torchobj.DataLoader[int](data, batch_size=3)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2]]
    assert isinstance(loader, torch.utils.data.DataLoader)
    attached = torchobj.attach(torch.utils.data.DataLoader[int](data, batch_size=3))
    assert [batch.tolist() for batch in attached] == [[0, 1, 2]]
