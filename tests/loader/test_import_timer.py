"""The measurement of imports, beside others who replace `builtins.__import__`."""

import builtins

import pytest
import torch.utils.data

import torchobj


class Hooking(torch.utils.data.Dataset):
    """Its third sample replaces `__import__` for good, as some libraries do when they are imported."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 2:
            original = builtins.__import__
            builtins.__import__ = lambda *args, **named: original(*args, **named)
        import string

        return index + len(string.digits)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_may_replace_the_import_function(monkeypatch, workers):
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    loader = torchobj.DataLoader(Hooking(), batch_size=2, num_workers=workers)
    for _ in range(3):
        assert [batch.tolist() for batch in loader] == [[10, 11], [12, 13], [14, 15], [16, 17]]


def test_the_import_function_is_that_of_before_outside_of_batches():
    before = builtins.__import__
    for _ in torchobj.DataLoader(list(range(4)), batch_size=2):
        assert builtins.__import__ is before
    assert builtins.__import__ is before
