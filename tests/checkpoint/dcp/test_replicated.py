"""Tensors that several ranks load: which they are, and that a machine reads them once."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from tests.support.distributed_states import QUIET, assert_equal, blank, reader_of, writer_of
from tests.support.ranks import run_ranks
from tests.support.shared_reads import MIB, count_chunks, use_small_parts
from torchobj.checkpoint import StorageReader
from torchobj.checkpoint.dcp.replicated import replicated_items
from torchobj.exceptions import ConfigError
from torchobj.ranks.shared_read import reads

pytestmark = QUIET

TOTAL = 6 * MIB


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    use_small_parts(monkeypatch, slots=64)


def asked(name, kind=LoadItemType.TENSOR, offset=(0,), lengths=(4,)):
    index = MetadataIndex(name, torch.Size(offset))
    none = torch.Size((0,))
    return ReadItem(kind, index, none, index, none, torch.Size(lengths))


def test_items_are_replicated_if_several_ranks_request_the_same_slice_of_the_same_chunk(monkeypatch):
    monkeypatch.setattr(reads, "MIN_BYTES", 32)
    plans = [
        LoadPlan([asked("own 0"), asked("all"), asked("value", LoadItemType.BYTE_IO), asked("b"), asked("half")]),
        LoadPlan([asked("b"), asked("all"), asked("value", LoadItemType.BYTE_IO), asked("half", lengths=(2,))]),
        LoadPlan([asked("all"), asked("half", offset=(4,))]),
    ]

    tensor = TensorStorageMetadata(TensorProperties(torch.float64), torch.Size((4,)), [])
    metadata = Metadata(dict.fromkeys(("own 0", "all", "b", "half"), tensor))

    def found(machines):
        of_ranks = replicated_items(plans, machines, metadata)
        return [[(group.items, group.peers.ranks) for group in of_rank] for of_rank in of_ranks]

    assert found("aaa") == [[([1], 3), ([3], 2)], [([1], 3), ([0], 2)], [([0], 3)]]
    assert found("aba") == [[([1], 2)], [], [([0], 2)]]
    assert found("abc") == [[], [], []]
    nonces = [group.peers.nonce for group in replicated_items(plans, "aaa", metadata)[0]]
    assert len(set(nonces)) == 2
    # 64 bytes of three ranks.
    monkeypatch.setattr(reads, "MIN_BYTES", 33)
    assert found("aaa") == [[], [], []]


def state_of(rank):
    """What all ranks have, tied weights, and a tensor of each rank."""
    weight = torch.arange(MIB // 4, dtype=torch.float32)
    state = {f"layer.{number}": weight + number for number in range(5)} | {"small": torch.ones(3), "step": 7}
    return state | {"tied": weight, "also tied": weight, f"own.{rank}": torch.full((50_000,), float(rank))}


def loaded_by_rank(rank, bucket, format, share):
    """Whether a rank has what was saved, the bytes that it has read for all, and the error of a damaged file."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    state = state_of(rank)
    if format is not None:
        state.pop("step")
    dcp.save(state, storage_writer=writer_of(bucket, format=format))
    counted = count_chunks()
    found = blank(state)
    found["also tied"] = found["tied"]
    dist.barrier()
    dcp.load(found, storage_reader=reader_of(bucket, share=share))
    assert_equal(found, state)
    return counted[0]


@pytest.mark.parametrize("format", [None, "safetensors"])
def test_ranks_of_a_machine_read_what_they_load_replicated_once(bucket, format):
    counts = run_ranks(loaded_by_rank, bucket, format, "auto", size=3)
    # The bytes of the tensors, with their frames.
    assert TOTAL <= sum(counts) <= TOTAL + 16 * 2048, counts
    assert run_ranks(loaded_by_rank, bucket, format, None, size=2) == [0, 0]


def loaded_damaged(rank, bucket):
    dist.init_process_group("gloo")
    state = {"layer": torch.arange(2 * MIB // 4, dtype=torch.float32)}
    dcp.save(state, storage_writer=writer_of(bucket))
    if rank == 0:
        [key] = [key for key in bucket.keys() if key.endswith(".distcp")]
        data = bytearray(bucket.body(key))
        data[MIB] ^= 1
        bucket.boto.put_object(Bucket=bucket.name, Key=key, Body=bytes(data))
    dist.barrier()
    try:
        dcp.load(blank(state), storage_reader=reader_of(bucket))
    except BaseException as error:
        return str(error)
    return None


def test_damage_is_found_by_each_rank(bucket):
    for message in run_ranks(loaded_damaged, bucket):
        assert "layer: damaged: its CRC-32 is not that of the saved bytes" in message


def test_only_reads_that_are_not_collective_can_be_chosen():
    with pytest.raises(ConfigError, match="share='host': must be 'auto' or None"):
        StorageReader("memory://b/step", share="host")
