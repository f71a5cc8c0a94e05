"""The full table of `test_samples_and_their_order_are_those_of_torch`: every kind of loader and every start method."""

import itertools

import pytest
import torch

import torchobj
from tests.loader.test_loader import COUNT, KINDS, body, epochs
from tests.support.prefetching import all_free

CONTEXTS = ["fork", "spawn", "forkserver"]
TABLE = list(itertools.product(KINDS, CONTEXTS, [1, 2], [False, True]))


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"k{number:02}").write_bytes(body(number))
    return tmp_path


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "context", "workers", "persistent"), TABLE)
def test_samples_and_their_order_are_those_of_torch_for_three_epochs(folder, kind, context, workers, persistent):
    settings = KINDS[kind] | {"num_workers": workers, "persistent_workers": persistent}
    stock = epochs(torch.utils.data.DataLoader, folder, settings)
    ours = epochs(torchobj.DataLoader, folder, settings | {"multiprocessing_context": context})
    if kind == "not in order":
        stock, ours = ([sorted(epoch) for epoch in found] for _, found, _ in (stock, ours))
    assert ours == stock
    assert all_free()
