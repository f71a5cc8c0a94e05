"""Shards of ranks are joined to files of whole tensors, in bounded memory, and the index is written last."""

import json
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchobj
from tests.support.distributed_states import QUIET, assert_equal
from tests.support.ranks import run_ranks
from tests.support.sharded_weights import joined, sharded, whole
from torchobj import exceptions
from torchobj.checkpoint import StorageWriter
from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.checkpoint.dcp import consolidation
from torchobj.checkpoint.dcp.consolidation import consolidate
from torchobj.checkpoint.dcp.folder_metadata import folder_metadata
from torchobj.checkpoint.dcp.removal import DistributedDir
from torchobj.checkpoint.safetensors import names

pytestmark = QUIET

consolidate_hf = pytest.importorskip("torch.distributed.checkpoint._consolidate_hf_safetensors")

INDEX = "model.safetensors.index.json"


FILE = "model-00001-of-00001.safetensors"


def put_shards(url, number, tensors, config=None):
    """Writes a file with parts of tensors: pairs of an offset and a tensor, by name."""
    parts = {name: {"saved_offsets": offsets} for name, (offsets, _) in tensors.items()}
    torchobj.save(
        {name: tensor.contiguous() for name, (_, tensor) in tensors.items()},
        f"{url}/{names.tensor_shard(number, 1, 1)}",
        metadata={"DCP_SHARDING_INFO": json.dumps(parts)},
        config=config,
    )


def join(url, config=None):
    shards, sizes = CheckpointDir(f"{url}/sharded", config), {}
    files = consolidate(shards, folder_metadata(shards, config), DistributedDir(url, config), lambda _: FILE, sizes)
    return files, sizes


def test_blocks_end_anywhere_in_a_tensor_and_hold_several_small_ones(monkeypatch):
    monkeypatch.setattr(consolidation, "_BLOCK_BYTES", 100)
    url = "memory://joined/blocks"
    state = {
        "cube": torch.arange(3 * 4 * 30, dtype=torch.int16).view(3, 4, 30),
        "long": torch.arange(77.0),
        "deep": torch.arange(60, dtype=torch.int64).view(2, 1, 1, 30),
        **{f"small {number}": torch.full((number,), number, dtype=torch.uint8) for number in range(30)},
        "scalar": torch.tensor(3.5),
    }
    first = {name: ([0] * tensor.ndim, tensor) for name, tensor in state.items() if name not in ("cube", "long")}
    put_shards(
        f"{url}/sharded", 1, {"cube": ([0, 0, 0], state["cube"][:, :3]), "long": ([0], state["long"][:50]), **first}
    )
    put_shards(f"{url}/sharded", 2, {"cube": ([0, 3, 0], state["cube"][:, 3:]), "long": ([50], state["long"][50:])})
    files, sizes = join(url)
    assert files == dict.fromkeys(state, FILE)
    # The file is that of a save of the whole state.
    expected = torchobj.save(state, f"{url}/expected.safetensors", metadata={"format": "pt"})
    assert sizes == {FILE: expected.size}
    folder = CheckpointDir(url, None)
    assert folder.get(FILE) == folder.get("expected.safetensors")


def test_few_blocks_are_in_memory(monkeypatch, bucket, config):
    monkeypatch.setattr(consolidation, "_BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(consolidation, "_SENT_BYTES", 5 << 20)
    read, alive, most = consolidation._read, [], 0

    def counted(*arguments):
        nonlocal most
        block = read(*arguments)
        alive.append(weakref.ref(block))
        most = max(most, sum(each() is not None for each in alive))
        return block

    monkeypatch.setattr(consolidation, "_read", counted)
    state = {"large": torch.arange(float(8 << 20))}
    for number, part in enumerate(state["large"].chunk(2)):
        put_shards(f"{bucket.url}/step 1/sharded", number + 1, {"large": ([number * len(part)], part)}, config)
    join(f"{bucket.url}/step 1", config=config)
    assert len(alive) == 32
    # Those of the parts of 5 MiB that are sent, and those of the next one.
    assert most <= 16
    assert_equal(torchobj.load(f"{bucket.url}/step 1/{FILE}", config=config), state)


def saved_and_joined(rank, folder):
    mesh = joined()
    state = sharded(mesh)
    # torch joins no integers, and writes scalars as zeros.
    floats = {name: tensor for name, tensor in state.items() if tensor.is_floating_point() and tensor.ndim}
    mapping = {name: 1 + number % 2 for number, name in enumerate(whole())}
    for each, saved, given in (("one", state, None), ("two", state, mapping), ("floats", floats, mapping)):
        writer = writer_to(f"file://{folder}/{each}", fqn_to_index_mapping=given)
        metadata = dcp.save(saved, storage_writer=writer)
    if rank == 0:
        theirs = {name: mapping[name] for name in floats}
        (Path(folder) / "theirs").mkdir()
        consolidate_hf.consolidate_safetensors_files(f"{folder}/floats/sharded", f"{folder}/theirs", theirs)
    return sorted({info.relative_path for info in metadata.storage_data.values()})


def test_the_shards_of_two_ranks_become_a_folder_of_weights(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    first, second = run_ranks(saved_and_joined, str(tmp_path))
    assert first == second
    assert {name.split("/")[0] for name in first} == {"sharded"}
    for each in ("one", "two"):
        assert_equal(torchobj.load(f"file://{tmp_path}/{each}/"), whole())
    assert sorted(path.name for path in (tmp_path / "two" / "sharded").iterdir()) == sorted(
        names.tensor_shard(rank, number, 2) for rank in (1, 2) for number in (1, 2)
    )
    index, theirs = (json.loads((tmp_path / each / INDEX).read_text()) for each in ("floats", "theirs"))
    assert index == theirs
    for name in set(index["weight_map"].values()):
        ours, expected = (safetensors.load_file(tmp_path / each / name) for each in ("floats", "theirs"))
        assert_equal(ours, expected)


def writer_to(url, config=None, **settings):
    return StorageWriter(url, format="safetensors", consolidate=True, config=config, **settings)


def refused_and_saved(rank, url, config):
    mesh = joined()
    dcp.save(sharded(mesh), storage_writer=writer_to(f"{url}/step 1", config))


def test_a_file_that_cannot_be_joined_fails_all_ranks_and_leaves_nothing(bucket, control):
    action = {"status": 403, "code": "AccessDenied"}
    control.faults({"operation": "PutObject", "key": "step 1/model-", "action": action})
    for name, text, _ in run_ranks(refused_and_saved, bucket.url, bucket.config):
        assert name == "CheckpointException"
        assert "AccessDenied" in text
    assert bucket.keys() == []
    assert bucket.uploads() == []


def test_a_shard_that_is_lost_before_it_is_joined_is_an_error(tmp_path):
    url = f"file://{tmp_path}"
    put_shards(f"{url}/sharded", 1, {"a": ([0], torch.rand(3))})
    put_shards(f"{url}/sharded", 3, {"a": ([5], torch.rand(3))})
    with pytest.raises(exceptions.CheckpointError, match="do not cover"):
        join(url)


def test_whole_tensors_of_one_rank_are_joined_to_nothing(tmp_path):
    state = {"weight": torch.rand(3)}
    dcp.save(state, storage_writer=writer_to(f"file://{tmp_path}"), no_dist=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE, INDEX]
    assert_equal(torchobj.load(f"file://{tmp_path}/"), state)
