"""What the ranks of a machine restore alike is read once."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from tests.support.managers import of_ranks
from tests.support.ranks import run_ranks
from tests.support.shared_reads import MIB, count_chunks, use_small_parts
from torchobj import AdvancedOptions


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    use_small_parts(monkeypatch, slots=64)


def restored(rank, url, config, sharded, own_dtype):
    """Whether a rank has what was saved, and the bytes that it has read for all."""
    manager = of_ranks(url, config, sharded=sharded)
    state = {"weight": torch.arange(4 * MIB // 4, dtype=torch.float32), "step": 3}
    manager.save(1, state)
    counted = count_chunks()
    dtype = torch.float64 if rank == own_dtype else torch.float32
    into = {"weight": torch.zeros(MIB, dtype=dtype), "step": 0}
    try:
        manager.restore(1, into)
    except Exception as error:
        return type(error).__name__, counted[0]
    dist.barrier()
    return torch.equal(into["weight"], state["weight"]) and into["step"] == 3, counted[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_of_a_machine_read_once(bucket, sharded):
    config = dataclasses.replace(bucket.config, advanced=AdvancedOptions(whole_below_bytes=MIB))
    found = run_ranks(restored, f"{bucket.url}/run", config, sharded, None, size=3)
    assert [right for right, _ in found] == [True] * 3
    assert 3 * MIB <= sum(count for _, count in found) <= 4 * MIB + 4096, found


@pytest.mark.filterwarnings("ignore")
def test_a_rank_that_differs_fails_on_all_ranks(bucket):
    config = dataclasses.replace(bucket.config, advanced=AdvancedOptions(whole_below_bytes=MIB))
    found = run_ranks(restored, f"{bucket.url}/run", config, False, 1, size=2)
    assert [name for name, _ in found] == ["CheckpointError"] * 2
