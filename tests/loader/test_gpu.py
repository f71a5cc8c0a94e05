"""Batches on their way to a GPU: the bytes of each batch arrive whole, whatever becomes of its memory meanwhile."""

import pytest
import torch

import torchobj
from tests.support.prefetching import all_free

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

COUNT, BYTES = 512, 50_000


def filled(reader):
    return torch.frombuffer(bytearray(reader.read()), dtype=torch.uint8), int(reader.key[-3:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objects")
    for number in range(COUNT):
        (folder / f"k{number:03}").write_bytes(bytes([number % 251]) * BYTES)
    return folder


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_batches_are_whole_when_their_copies_end_late(folder, workers, pin_memory):
    dataset = torchobj.ObjectMapDataset(f"file://{folder}/", transform=filled)
    loader = torchobj.DataLoader(dataset, 16, shuffle=True, num_workers=workers, pin_memory=pin_memory)
    on_gpu = []
    for data, numbers in loader:
        assert data.is_pinned() == pin_memory
        if not on_gpu:
            # The copies wait behind this, while the loader reuses the memory of earlier batches.
            torch.cuda._sleep(1_000_000_000)
        on_gpu.append((data.to("cuda", non_blocking=True), numbers.clone()))
        del data, numbers
    assert sum(len(numbers) for _, numbers in on_gpu) == COUNT
    for data, numbers in on_gpu:
        assert torch.equal(data.cpu(), (numbers % 251).to(torch.uint8)[:, None].expand(-1, BYTES))
    del loader, on_gpu, data, numbers
    assert all_free()


@pytest.mark.parametrize("workers", [0, 2])
def test_ragged_batches_are_pinned_and_moved(folder, workers):
    dataset = torchobj.ObjectMapDataset(f"file://{folder}/")
    loader = torchobj.DataLoader(dataset, 16, num_workers=workers, pin_memory=True)
    for number, batch in enumerate(loader):
        assert batch.data.is_pinned()
        moved = batch.to("cuda", non_blocking=True)
        first = number * 16
        assert [int(moved[index][0]) for index in (0, 15)] == [first % 251, (first + 15) % 251]
        assert moved.data.device.type == "cuda"
        assert moved.data.numel() == 16 * BYTES


def test_workers_are_forked_from_a_process_that_uses_the_gpu(folder):
    weights = torch.rand(4, device="cuda")
    dataset = torchobj.ObjectMapDataset(f"file://{folder}/", transform=filled)
    loader = torchobj.DataLoader(dataset, 64, num_workers=2, multiprocessing_context="fork", persistent_workers=True)
    for _ in range(2):
        assert sum(len(numbers) for _, numbers in loader) == COUNT
    assert weights.sum().isfinite()
