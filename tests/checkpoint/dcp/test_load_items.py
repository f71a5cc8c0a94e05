"""Which memory a distributed checkpoint goes through, what is read of it, and by which rank."""

import weakref
import zlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from tests.support.distributed_states import (
    QUIET,
    assert_equal,
    blank,
    download,
    files_of,
    loaded,
    reader_of,
    save,
    writer_of,
)
from tests.support.ranks import run_ranks
from torchobj.checkpoint import StorageReader, StorageWriter
from torchobj.checkpoint.dcp import load_items, save_items

pytestmark = QUIET


def test_a_large_tensor_that_is_not_contiguous_is_copied_in_pieces(bucket, monkeypatch):
    monkeypatch.setattr(save_items, "_PIECE_BYTES", 100_000)
    monkeypatch.setattr(save_items, "_COPIED_BYTES", 300_000)
    state = {"plain": torch.rand(500, 500), "transposed": torch.rand(400, 900).t(), "small": torch.rand(90, 90).t()}
    writer = writer_of(bucket)
    dcp.save(state, storage_writer=writer)
    assert len(files_of(bucket)) == 2
    assert_equal(loaded(bucket, state), state)
    assert writer.checksums == {key.removeprefix("step 1/"): zlib.crc32(bucket.body(key)) for key in files_of(bucket)}


def test_copies_that_wait_to_be_sent_are_few(bucket, monkeypatch):
    stage, alive, most = save_items._staged_whole, [], 0

    def staged(tensor):
        nonlocal most
        copy = stage(tensor)
        alive.append(weakref.ref(copy))
        most = max(most, sum(ref() is not None for ref in alive))
        return copy

    monkeypatch.setattr(save_items, "_staged_whole", staged)
    # Of 8 MiB each, and laid out as they are not written.
    turned = torch.rand(1024, 2048).t()
    save(bucket, {f"turned {number}": turned for number in range(40)})
    assert len(alive) == 40
    # Twelve by the bounds, and those that were sent and are not yet let go.
    assert most <= 20


def test_destinations_may_be_of_another_dtype_or_layout(bucket, monkeypatch):
    monkeypatch.setattr(load_items, "_TILE_BYTES", 50_000)
    monkeypatch.setattr(load_items, "_WAVE_BYTES", 100_000)
    state = {"weight": torch.rand(300, 200), "small": torch.rand(30, 20)}
    save(bucket, state)
    found = {"weight": torch.zeros(300, 400, dtype=torch.float64)[:, ::2], "small": torch.zeros(20, 30).half().t()}
    dcp.load(found, storage_reader=reader_of(bucket))
    assert torch.equal(found["weight"].float(), state["weight"])
    assert torch.equal(found["small"], state["small"].half())


def test_destinations_may_share_memory_as_tied_weights_do(bucket):
    weight, small = torch.rand(300, 200), torch.rand(10)
    state = {"weight": weight, "tied": weight, "part": weight[100:200], "small": small, "small tied": small}
    save(bucket, state)
    target, small_target = torch.zeros(300, 200), torch.zeros(10)
    found = {"weight": target, "tied": target, "part": target[100:200]}
    found |= {"small": small_target, "small tied": small_target}
    dcp.load(found, storage_reader=reader_of(bucket))
    assert torch.equal(target, weight)
    assert torch.equal(small_target, small)


def test_a_destination_knows_that_it_was_written(bucket):
    save(bucket, {"weight": torch.rand(300, 200)})
    target = torch.zeros(300, 200)
    before = target._version
    dcp.load({"weight": target}, storage_reader=reader_of(bucket))
    assert target._version > before


def test_a_destination_of_another_size_is_refused(bucket):
    save(bucket, {"weight": torch.rand(300)})
    with pytest.raises(CheckpointException, match="weight"):
        dcp.load({"weight": torch.zeros(200)}, storage_reader=reader_of(bucket))


class Committing(DefaultLoadPlanner):
    def set_up_planner(self, *args, **kwargs):
        super().set_up_planner(*args, **kwargs)
        self.committed = []

    def commit_tensor(self, read_item, tensor):
        self.committed.append((read_item.dest_index.fqn, float(tensor.sum())))


def test_each_tensor_is_committed_when_it_is_there(bucket):
    state = {"large": torch.rand(300, 200), "small": torch.rand(3)}
    save(bucket, state)
    planner = Committing()
    dcp.load(blank(state), storage_reader=reader_of(bucket), planner=planner)
    assert sorted(planner.committed) == sorted((key, float(value.sum())) for key, value in state.items())


def read_bytes(control):
    return sum(request.bytes_sent for request in control.requests("GetObject") if request.key.endswith(".distcp"))


def test_one_percent_of_the_tensors_is_one_percent_of_the_bytes(bucket, control):
    state = {f"layer {number}": torch.rand(64, 512) for number in range(200)}
    state |= {f"bias {number}": torch.rand(512) for number in range(200)}
    save(bucket, state)
    total = sum(len(bucket.body(key)) for key in files_of(bucket))
    wanted = {name: state[name] for name in ("layer 17", "layer 99", "bias 3", "bias 150")}
    control.clear_requests()
    assert_equal(loaded(bucket, wanted), wanted)
    assert read_bytes(control) <= 0.015 * total
    # Nothing is asked twice, and nothing by HEAD.
    assert len(control.requests()) <= 1 + len(wanted)


def test_everything_is_read_once(bucket, control):
    state = {f"layer {number}": torch.rand(64, 512) for number in range(50)}
    state |= {f"bias {number}": torch.rand(512) for number in range(50)}
    save(bucket, state, thread_count=2)
    total = sum(len(bucket.body(key)) for key in files_of(bucket))
    control.clear_requests()
    assert_equal(loaded(bucket, state), state)
    assert read_bytes(control) <= 1.02 * total


def saved_by_two(rank, url, config):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    state = {
        name: distribute_tensor(tensor, mesh, [Shard(dimension)]) for name, (tensor, dimension) in sharded().items()
    }
    dcp.save(state, storage_writer=StorageWriter(f"{url}/step 1", config=config, thread_count=2))
    return "saved"


def sharded():
    elements = torch.arange(512 * 1024, dtype=torch.float32)
    return {
        "rows": (elements.view(512, 1024), 0),
        "columns": (elements.view(512, 1024) + 1, 1),
        "narrow": (elements.view(-1, 64) + 2, 1),
        "deep": (elements.view(8, 64, 1024) + 3, 1),
        "uneven": (elements.view(512, 1024)[:5] + 4, 0),
    }


def loaded_by_two(rank, url, config):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole = sharded()
    state = {
        name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(dimension)])
        for name, (tensor, dimension) in whole.items()
    }
    dcp.load(state, storage_reader=StorageReader(f"{url}/step 1", config=config))
    expected = {name: distribute_tensor(tensor, mesh, [Shard(dim)]) for name, (tensor, dim) in whole.items()}
    assert all(torch.equal(state[name].to_local(), expected[name].to_local()) for name in whole)
    return "equal"


def test_two_ranks_save_and_one_loads(bucket, tmp_path):
    assert run_ranks(saved_by_two, bucket.url, bucket.config) == ["saved"] * 2
    expected = {name: tensor for name, (tensor, _) in sharded().items()}
    assert_equal(loaded(bucket, expected), expected)
    found = blank(expected)
    dcp.load(found, storage_reader=dcp.FileSystemReader(download(bucket, tmp_path)))
    assert_equal(found, expected)


def test_two_ranks_load_what_one_saved_and_each_reads_its_rows_only(bucket, control):
    state = {name: tensor for name, (tensor, _) in sharded().items()}
    save(bucket, state)
    control.clear_requests()
    assert run_ranks(loaded_by_two, bucket.url, bucket.config) == ["equal"] * 2
    by_rows = sum(tensor.nbytes for name, tensor in state.items() if name in ("rows", "uneven", "deep"))
    # Halves of rows of 4 KiB and less are read with what is between them, by both.
    by_columns = 2 * sum(tensor.nbytes for name, tensor in state.items() if name in ("columns", "narrow"))
    # What lies between is read with it where that is an eighth at most.
    assert read_bytes(control) <= 1.13 * (by_rows + by_columns)
