"""Memory of batches is reused only after the last view of it is gone, however the view came about."""

import contextlib
import copy
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import torchobj
from tests.support.batches import in_block
from tests.support.long_tables import often
from torchobj import _torchobj
from torchobj._torchobj import NativeBlocks

SIZE = 4000


class Numbered(Dataset[torch.Tensor]):
    """Sample `i` is filled with a number of its index and of the process's past."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((SIZE,), index)


def loader(batches: int, **arguments: Any) -> Any:
    dataset = Numbered(4 * batches)
    return torchobj.DataLoader(dataset, **({"batch_size": 4, "num_workers": 1, "lookahead": 0} | arguments))


def copied() -> int:
    return int(_torchobj.prefetch_stats()["copied"])


VIEWS = {
    "tensor": lambda batch: batch,
    "slice": lambda batch: batch[2:, 5:],
    "element": lambda batch: batch[3, 7],
    "transposed": lambda batch: batch.t(),
    "other dtype": lambda batch: batch.view(torch.uint8),
    "detached": lambda batch: batch.detach(),
    "copy.copy": copy.copy,
    "numpy": lambda batch: batch.numpy(),
    "numpy of a slice": lambda batch: batch[1].numpy()[3:],
    "memoryview": lambda batch: memoryview(batch.numpy()),
    "from numpy": lambda batch: torch.from_numpy(batch.numpy()),
    "dlpack": lambda batch: torch.from_dlpack(batch),
    "numpy dlpack": lambda batch: numpy.from_dlpack(batch),
    "untyped storage": lambda batch: batch.untyped_storage(),
    "set": lambda batch: torch.empty(0, dtype=torch.int64).set_(batch.untyped_storage()),
    "parameter": lambda batch: torch.nn.Parameter(batch, requires_grad=False),
}


def content(view: Any) -> bytes:
    if isinstance(view, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8).set_(view).numpy().tobytes()
    array = view.detach().numpy() if isinstance(view, torch.Tensor) else numpy.asarray(view)
    return array.tobytes()


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_stays_unchanged_while_later_batches_arrive(name: str) -> None:
    views, expected = [], []
    for number, batch in enumerate(loader(24)):
        if number % 4 == 0:
            assert in_block(batch)
            view = VIEWS[name](batch)
            views.append(view)
            expected.append(content(view))
        del batch
    assert [content(view) for view in views] == expected


def test_memory_is_reused_when_batches_are_dropped() -> None:
    addresses = {batch.data_ptr() for batch in loader(60)}
    assert len(addresses) < 10


def test_labels_that_are_kept_do_not_keep_the_memory_of_images() -> None:
    data = [(torch.zeros(100_000), torch.tensor(index)) for index in range(128)]
    _torchobj.release_free_memory()
    epoch = torchobj.DataLoader(data, batch_size=4, num_workers=1, lookahead=0)
    labels = [label for _, label in epoch]
    assert torch.cat(labels).tolist() == list(range(128))
    assert epoch.stats().block_bytes <= 16 << 20


def test_batches_can_be_written_to() -> None:
    for batch in loader(12):
        expected = batch[:, 0].tolist()
        batch += 1
        assert batch[:, -1].tolist() == [number + 1 for number in expected]


def test_random_holding_and_dropping_over_many_epochs() -> None:
    picks = random.Random(5)
    held: list[tuple[torch.Tensor, int]] = []
    peaks = []
    _torchobj.release_free_memory()
    batches = loader(10, num_workers=2, persistent_workers=True, shuffle=True)
    for _ in range(40):
        for batch in batches:
            if picks.random() < 0.3:
                held.append((batch, int(batch.sum())))
            while len(held) > 10:
                held.pop(picks.randrange(len(held)))
        peaks.append(_torchobj.prefetch_stats()["block_bytes"])
    assert all(int(batch.sum()) == total for batch, total in held)
    # 11 batches held, and those that the workers fill, have sent, or keep to reuse. 120 batches were held in all.
    assert max(peaks) <= 24 * 2**17


def test_setting_the_memory_budget_again_releases_unused_memory() -> None:
    batch, *_ = list(loader(4))
    before = _torchobj.prefetch_stats()
    torchobj.set_memory_budget(before["budget_bytes"])
    after = _torchobj.prefetch_stats()["block_bytes"]
    assert 0 < after < before["block_bytes"]
    assert batch[:, -1].tolist() == [0, 1, 2, 3]


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates an accelerator if there is none: the pinning thread of torch copies into ordinary memory then."""
    if not torch.accelerator.is_available():
        # torch 2.6 asks `torch.cuda`, later versions `torch.accelerator`.
        for module, index in ((torch.accelerator, "device_index"), (torch.cuda, "device")):
            monkeypatch.setattr(module, "is_available", lambda: True)
            monkeypatch.setattr(module, f"current_{index}", lambda: 0, raising=False)
            monkeypatch.setattr(module, f"set_{index}", lambda _: None, raising=False)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor.clone())
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: not NativeBlocks.contains(tensor.data_ptr()))


@pytest.mark.usefixtures("pinning")
@pytest.mark.parametrize("persistent", [False, True])
def test_the_pinning_thread_copies_batches_and_their_memory_is_reused(persistent: bool) -> None:
    batches = loader(60, pin_memory=True, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        found = list(batches)
        assert all(batch.is_pinned() for batch in found)
        assert [batch[:, 9].tolist() for batch in found] == [[4 * number + i for i in range(4)] for number in range(60)]
    assert _torchobj.prefetch_stats()["block_bytes"] <= 24 * 2**17


@pytest.mark.parametrize(
    ("context", "workers", "epochs"),
    often(2, [("fork", 2, 2), ("forkserver", 2, 2), ("spawn", 1, 1), ("spawn", 2, 2)]),
)
def test_every_way_to_start_workers(context: str, workers: int, epochs: int) -> None:
    for _ in range(epochs):
        found = [batch[:, 9].tolist() for batch in loader(6, num_workers=workers, multiprocessing_context=context)]
        assert found == [[4 * number + i for i in range(4)] for number in range(6)]


def _receive(queue: Any, answers: Any) -> None:
    tensor = queue.get()
    answers.put(int(tensor.sum()))
    queue.get()
    answers.put(int(tensor.sum()))


def test_a_third_process_receives_a_copy_and_views_stay_valid() -> None:
    context = multiprocessing.get_context("fork")
    queue, answers = torch.multiprocessing.get_context("fork").Queue(), context.Queue()
    process = context.Process(target=_receive, args=(queue, answers))
    process.start()
    batches = iter(loader(30))
    batch = next(batches)
    view, total = batch.numpy(), int(batch.sum())
    queue.put(batch)
    assert answers.get(timeout=150) == total
    assert not batch.is_shared(), "its storage was not moved"
    del batch
    for later in batches:
        del later
    assert int(view.sum()) == total
    queue.put(None)
    assert answers.get(timeout=150) == total
    process.join(150)


@pytest.mark.parametrize("context", [pytest.param("spawn", marks=pytest.mark.matrix), "forkserver"])
def test_a_batch_is_an_argument_of_a_process_that_is_not_forked(context: str) -> None:
    answers = multiprocessing.get_context(context).Queue()
    for inline in (False, True):
        batch = next(iter(loader(2)))
        batch = next(iter(loader(2, collate_fn=_few_numbers))) if inline else batch
        arguments = (batch, _Asked(), answers)
        process = torch.multiprocessing.get_context(context).Process(target=_sum_when_asked, args=arguments)
        process.start()
        assert answers.get(timeout=150) == int(batch.sum())
        process.join(150)


class _Asked:
    def get(self) -> None: ...


def _few_numbers(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([sample[:50] for sample in samples])


@pytest.mark.parametrize("collate_fn", [None, _few_numbers])
@pytest.mark.parametrize("share", ["share_memory_", "queue", "from numpy"])
def test_views_of_numpy_stay_valid_when_torch_moves_their_storage(collate_fn: Any, share: str) -> None:
    queue = torch.multiprocessing.get_context("fork").Queue()
    held = []
    for batch in loader(30, collate_fn=collate_fn):
        view = batch.numpy()
        held.append((view, int(batch.sum())))
        if share == "queue":
            queue.put(batch)
            assert torch.equal(queue.get(timeout=150), batch)
        else:
            (batch if share == "share_memory_" else torch.from_numpy(view)).share_memory_()
        del batch, view
    assert [int(view.sum()) for view, _ in held] == [total for _, total in held]


_kept: list[Any] = []


def _keep_array(samples: list[torch.Tensor]) -> Any:
    batch = torchobj.collate.default_collate(samples)
    _kept.append((batch.numpy(), int(batch.sum())))
    batch.share_memory_()
    return batch, all(int(array.sum()) == total for array, total in _kept)


def test_arrays_that_a_worker_keeps_stay_valid_when_it_shares_their_batch() -> None:
    batches = list(loader(20, collate_fn=_keep_array))
    assert all(valid for _, valid in batches)
    assert [int(batch[0, 0]) for batch, _ in batches] == list(range(0, 80, 4))


def _sum_when_asked(batch: torch.Tensor, asked: Any, answers: Any) -> None:
    asked.get()
    answers.put(int(batch.sum()))


def test_a_forked_child_keeps_a_batch_that_its_parent_dropped() -> None:
    context = multiprocessing.get_context("fork")
    asked, answers = context.Queue(), context.Queue()
    batches = iter(loader(30))
    batch = next(batches)
    total, address = int(batch.sum()), batch.data_ptr()
    process = context.Process(target=_sum_when_asked, args=(batch, asked, answers))
    process.start()
    del batch
    assert all(later.data_ptr() != address for later in batches)
    asked.put(None)
    assert answers.get(timeout=150) == total
    process.join(150)


def _open_blocks() -> int:
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        # Other threads close descriptors meanwhile.
        with contextlib.suppress(FileNotFoundError):
            count += "torchobj-arena" in os.readlink(link)
    return count


def test_forks_while_batches_are_held_neither_leak_descriptors_nor_charge_the_budget() -> None:
    kept = None
    counts = []
    for _ in range(8):
        # The workers of each epoch are forked while the last batch of the previous one is held.
        for batch in loader(3):
            kept = batch
        counts.append((_open_blocks(), _torchobj.prefetch_stats()["block_bytes"]))
    assert kept is not None
    assert counts[-1][0] <= max(count for count, _ in counts[:3])
    assert counts[-1][1] <= max(size for _, size in counts[:3])


class _Keeping(Dataset[torch.Tensor]):
    """Keeps the tensors that it returned, and changes them later."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        for tensor in self._kept:
            tensor.fill_(-1)
        sample = torchobj.collate.empty((SIZE,), dtype=torch.int64).fill_(index)
        if index % 2:
            self._kept.append(sample)
        return sample


def test_a_worker_that_keeps_its_tensors_gets_its_memory_back_by_a_copy() -> None:
    before = copied()
    batches = torchobj.DataLoader(_Keeping(), batch_size=None, num_workers=1, lookahead=0, prefetch_factor=1)
    found = [int(sample[0]) for sample in batches]
    assert found[::2] == list(range(0, 40, 2))
    assert copied() > before


def _dies(samples: list[torch.Tensor]) -> Any:
    batch = torchobj.collate.empty((4, SIZE), dtype=torch.int64)
    if int(samples[0][0]) >= 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.stack(samples, out=batch)


def test_a_worker_that_dies_while_it_fills_a_block_is_an_error_and_its_memory_is_reused() -> None:
    for _ in range(3):
        batches = loader(6, collate_fn=_dies)
        with pytest.raises(RuntimeError, match="killed|exited"):
            list(batches)
    assert [batch[:, 0].tolist() for batch in loader(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


class _Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.full((SIZE,), number) for number in range(12)])


def test_batches_of_an_iterable_dataset_are_in_blocks() -> None:
    batches = list(torchobj.DataLoader(_Stream(), batch_size=4, num_workers=1))
    assert [batch[:, 0].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert all(map(in_block, batches))
