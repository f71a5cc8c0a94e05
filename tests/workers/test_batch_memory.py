"""The memory of one batch: which tensors have it, and when it is used again."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchobj._torchobj import Buffer, process_number
from torchobj.workers.batch_memory import BatchMemory, view

MIB = 1 << 20


class Blocks:
    """Grants blocks of ordinary memory."""

    def __init__(self) -> None:
        self.granted: list[tuple[int, int]] = []

    def block(self, size: int, preferred: int, worker: int) -> Buffer:
        self.granted.append((max(size, preferred), worker))
        return Buffer(bytes(max(size, preferred)))


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture
def memory(blocks: Any) -> BatchMemory:
    return BatchMemory(blocks)


def tensor(memory: BatchMemory, size: int) -> torch.Tensor:
    part = memory.allocate(size)
    assert part is not None
    return view(part, torch.uint8, offset=0, count=size)


def test_there_is_memory_only_while_a_batch_is_built(memory: BatchMemory, blocks: Blocks) -> None:
    assert memory.allocate(MIB) is None
    with memory.allocating():
        assert memory.allocate(MIB) is not None
    assert memory.allocate(MIB) is None
    memory.allocate_always()
    assert memory.allocate(MIB) is not None
    assert len(blocks.granted) == 2


def test_the_memory_of_deleted_tensors_is_used_again_within_a_batch(memory: BatchMemory, blocks: Blocks) -> None:
    for _ in range(3):
        with memory.allocating():
            for _ in range(50):
                tensor(memory, MIB)
    assert [size for size, _ in blocks.granted] == [MIB] * 3


@pytest.mark.parametrize("growth", [0, 4096])
def test_a_batch_of_kept_and_deleted_tensors_takes_little_more_than_what_is_kept(
    memory: BatchMemory, blocks: Blocks, growth: int
) -> None:
    for _ in range(3):
        blocks.granted.clear()
        with memory.allocating():
            kept = []
            for number in range(40):
                large = tensor(memory, MIB + number * growth)
                kept.append(tensor(memory, 8192).fill_(number))
                large.fill_(255)
                del large
            assert [int(small.sum()) for small in kept] == [8192 * number for number in range(40)]
            live = [block for block in memory._blocks if block.kept_bytes()]
            assert sum(len(block.buffer) for block in live) <= 4 * MIB
            del kept


def test_many_small_tensors_have_few_blocks_and_no_search_after_a_refusal(memory: BatchMemory, blocks: Any) -> None:
    with memory.allocating():
        kept = [tensor(memory, 5000) for _ in range(2000)]
        assert len(blocks.granted) <= 20
        grant, blocks.block = blocks.block, lambda *_: None
        while (part := memory.allocate(5000)) is not None:
            kept.append(view(part, torch.uint8, offset=0, count=5000))
        parts = memory._blocks[0]._parts
        assert memory.allocate(5000) is None
        # Not looked through again before a tensor is deleted.
        assert memory._blocks[0]._parts is parts
        del kept[0]
        assert memory.allocate(5000) is not None
        blocks.block = grant
        block = weakref.ref(memory._blocks[0])
    gc.disable()
    try:
        del kept, part, parts
        # Not only by the garbage collector.
        assert block() is None
    finally:
        gc.enable()


def test_tensors_that_live_have_memory_of_their_own_in_any_order_of_deletion(memory: BatchMemory) -> None:
    with memory.allocating():
        first = [tensor(memory, 10_000 * (1 + number % 3)).fill_(number) for number in range(30)]
        del first[::2]
        then = [tensor(memory, 5_000 * (1 + number % 4)).fill_(100 + number) for number in range(30)]
        assert all(bool((one == number).all()) for number, one in zip(range(1, 30, 2), first, strict=True))
        assert all(bool((one == 100 + number).all()) for number, one in enumerate(then))


def test_a_view_keeps_the_memory_of_its_tensor(memory: BatchMemory) -> None:
    with memory.allocating():
        array = tensor(memory, MIB).fill_(7).numpy()[5:]
        for _ in range(10):
            tensor(memory, MIB).fill_(9)
        assert int(array[0]) == 7


def test_an_error_of_a_collate_function_ends_its_batch(memory: BatchMemory, blocks: Blocks) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="half way"), memory.allocating():
            tensor(memory, MIB)
            raise ValueError("half way")
    gc.collect()
    assert (memory._blocks, memory.allocate(MIB)) == ([], None)


def test_workers_are_told_apart_by_more_than_their_process_ids() -> None:
    reclaimed: list[int] = []
    blocks: Any = SimpleNamespace(owner=process_number(), reclaim=reclaimed.extend)
    for memory in (BatchMemory(blocks), BatchMemory(blocks)):
        memory.reclaim([SimpleNamespace(pid=7, exitcode=0), SimpleNamespace(pid=8, exitcode=None)])
    assert len(set(reclaimed)) == 2
