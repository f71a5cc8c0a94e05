"""Ranks write safetensors with the names and the metadata of torch's HuggingFaceStorageWriter."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import Shard

import torchobj
from tests.support.distributed_states import QUIET, assert_equal, blank, error_of
from tests.support.ranks import run_ranks
from tests.support.sharded_weights import blank as blank_shards
from tests.support.sharded_weights import differing, joined, sharded, whole
from torchobj import exceptions
from torchobj.checkpoint import StorageReader, StorageWriter
from torchobj.checkpoint.dcp import save_items
from torchobj.checkpoint.dcp.tensor_files import TensorFiles
from torchobj.checkpoint.safetensors.header import header_end, parse

pytestmark = QUIET

ROOT = Path(__file__).parents[3]

hf_storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage", reason="torch 2.8 has these classes")
safetensors = pytest.importorskip("safetensors.torch")


def state_of_one():
    return {
        "weight": torch.rand(300, 200),
        "turned": torch.rand(300, 200).t(),
        "half": torch.rand(5).bfloat16(),
        "number": torch.arange(7),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "flag": torch.tensor([True]),
    }


def writer_to(folder, **settings):
    return StorageWriter(f"file://{folder}", format="safetensors", **settings)


def save(folder, state, **settings):
    return dcp.save(state, storage_writer=writer_to(folder, **settings), no_dist=True)


def save_to(bucket, state, **settings):
    writer = StorageWriter(f"{bucket.url}/step 1", format="safetensors", config=bucket.config, **settings)
    return dcp.save(state, storage_writer=writer, no_dist=True)


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def metadata_in(path):
    data = path.read_bytes()
    return parse(data[: header_end(data, len(data))], len(data)).metadata


def test_whole_tensors_of_one_rank_are_a_folder_of_weights(tmp_path):
    state = state_of_one()
    save(tmp_path / "ours", state)
    contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
    dcp.save(contiguous, storage_writer=hf_storage.HuggingFaceStorageWriter(str(tmp_path / "theirs")), no_dist=True)
    names = names_in(tmp_path / "ours")
    assert (
        names == names_in(tmp_path / "theirs") == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    )
    ours, theirs = (json.loads((tmp_path / each / names[1]).read_text()) for each in ("ours", "theirs"))
    assert ours["weight_map"] == theirs["weight_map"]
    assert ours["metadata"] == {"total_size": sum(tensor.nbytes for tensor in state.values())}
    assert_equal(safetensors.load_file(tmp_path / "ours" / names[0]), state)
    assert_equal(torchobj.load(f"file://{tmp_path}/ours/"), state)
    for reader in (
        StorageReader(f"file://{tmp_path}/ours"),
        hf_storage.HuggingFaceStorageReader(str(tmp_path / "ours")),
    ):
        found = blank(state)
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert_equal(found, state)


def test_the_metadata_of_a_file_has_what_that_of_torch_has(tmp_path):
    state = {"weight": torch.rand(3, 2), "scalar": torch.tensor(1)}
    save(tmp_path / "ours", state)
    dcp.save(state, storage_writer=hf_storage.HuggingFaceStorageWriter(str(tmp_path / "theirs")), no_dist=True)
    ours, theirs = (metadata_in(tmp_path / each / "model-00001-of-00001.safetensors") for each in ("ours", "theirs"))
    parts, expected = json.loads(ours.pop("DCP_SHARDING_INFO")), json.loads(theirs.pop("DCP_SHARDING_INFO"))
    assert ours == theirs
    assert {name: {"saved_offsets": part["saved_offsets"]} for name, part in parts.items()} == expected


def test_a_mapping_divides_the_tensors_into_files(tmp_path):
    state = {name: torch.rand(3) for name in ("a", "b", "c")}
    for each, writer in (("ours", writer_to), ("theirs", hf_storage.HuggingFaceStorageWriter)):
        mapping = {"a": 3, "b": 1, "c": 3, "other": 2}
        dcp.save(state, storage_writer=writer(str(tmp_path / each), fqn_to_index_mapping=mapping), no_dist=True)
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
    ours, theirs = (
        json.loads((tmp_path / each / "model.safetensors.index.json").read_text()) for each in ("ours", "theirs")
    )
    assert ours["weight_map"] == theirs["weight_map"]
    assert_equal(torchobj.load(f"file://{tmp_path}/ours/"), state)


def test_a_tensor_without_a_number_is_refused_before_anything_is_deleted(tmp_path):
    save(tmp_path, {"a": torch.rand(3)})
    before = names_in(tmp_path)
    error = error_of(lambda: save(tmp_path, {"a": torch.rand(3), "b": torch.rand(3)}, fqn_to_index_mapping={"a": 1}))
    assert isinstance(error, exceptions.ConfigError)
    assert "b" in str(error)
    assert names_in(tmp_path) == before


def test_values_that_are_not_tensors_are_refused_by_name(tmp_path):
    error = error_of(lambda: save(tmp_path, {"weight": torch.rand(3), "optimizer": {"lr": 0.1, "betas": (1, 2)}}))
    assert isinstance(error, exceptions.ConfigError)
    assert "optimizer.betas, optimizer.lr: not tensors (2 of 3 items)" in str(error)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "value", [torch.rand(3).to_sparse(), torch.rand(3).to(torch.complex128)], ids=["sparse", "complex"]
)
def test_a_tensor_that_safetensors_lacks_is_refused_and_leaves_nothing(tmp_path, value):
    mapping = {"first": 1, "second": 2}
    error = error_of(lambda: save(tmp_path, {"first": torch.rand(3), "second": value}, fqn_to_index_mapping=mapping))
    assert isinstance(error, exceptions.ConfigError)
    assert "second" in str(error)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"format": "torch"},
        {"consolidate": True},
        {"fqn_to_index_mapping": {"a": 1}},
        {"format": "safetensors", "thread_count": 2},
        {"format": "safetensors", "prefix_strategy": str},
        {"format": "safetensors", "consolidate": "yes"},
        {"format": "safetensors", "fqn_to_index_mapping": {}},
        {"format": "safetensors", "fqn_to_index_mapping": {"a": 0}},
        {"format": "safetensors", "fqn_to_index_mapping": {"a": True}},
        {"format": "safetensors", "fqn_to_index_mapping": ["a"]},
    ],
    ids=str,
)
def test_an_argument_that_is_invalid_or_of_another_format_is_refused(settings):
    with pytest.raises(exceptions.ConfigError):
        StorageWriter("memory://arguments/folder", **settings)


def test_each_rank_by_itself_is_refused(tmp_path):
    writer = writer_to(tmp_path)
    with pytest.raises(exceptions.ConfigError, match="use_collectives"):
        writer.set_up_storage_writer(is_coordinator=True, rank=0, use_collectives=False)


def test_the_weights_in_the_folder_are_replaced_whole(tmp_path):
    (tmp_path / "sharded").mkdir()
    stale = ["model.safetensors", "shard-00003-model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    kept = ["config.json", "adapter_model.safetensors", "sharded/model.safetensors", "sharded/notes.txt"]
    for name in [*stale, "sharded/shard-00001-model-00001-of-00001.safetensors", *kept]:
        (tmp_path / name).write_bytes(b"stale")
    dcp.save({"old": torch.rand(3), "step": 5}, storage_writer=StorageWriter(f"file://{tmp_path}"), no_dist=True)
    state = {"weight": torch.rand(3)}
    save(tmp_path, state)
    assert names_in(tmp_path) == sorted(["model-00001-of-00001.safetensors", "model.safetensors.index.json", *kept])
    found = blank(state)
    dcp.load(found, storage_reader=StorageReader(f"file://{tmp_path}"), no_dist=True)
    assert_equal(found, state)


@pytest.mark.parametrize("format", ["safetensors", None])
def test_what_exists_is_not_overwritten_unless_it_may_be(tmp_path, format):
    old = {"weight": torch.rand(3)}
    dcp.save(old, storage_writer=StorageWriter(f"file://{tmp_path}", format=format), no_dist=True)
    error = error_of(lambda: save(tmp_path, {"weight": torch.rand(3)}, overwrite=False))
    assert isinstance(error, exceptions.CheckpointError)
    assert "overwrite=False" in str(error)
    found = blank(old)
    dcp.load(found, storage_reader=StorageReader(f"file://{tmp_path}"), no_dist=True)
    assert_equal(found, old)
    save(tmp_path / "new", old, overwrite=False)


def test_a_state_whose_plan_is_cached_is_saved_again(tmp_path):
    if "enable_plan_caching" not in DefaultSavePlanner.__init__.__code__.co_varnames:
        pytest.skip("this torch caches no plans")
    for _ in range(3):
        state = {"weight": torch.rand(3), "bias": torch.rand(2)}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=writer_to(tmp_path), planner=planner, no_dist=True)
        assert_equal(torchobj.load(f"file://{tmp_path}/"), state)


def test_progress_counts_the_bytes_of_the_file(tmp_path):
    seen = []
    save(tmp_path, {"weight": torch.rand(300, 200), "turned": torch.rand(20, 30).t()}, progress=seen.append)
    size = (tmp_path / "model-00001-of-00001.safetensors").stat().st_size
    assert (seen[-1].bytes_done, seen[-1].bytes_total) == (size, size)


def test_a_save_in_the_background_is_one(tmp_path):
    state = {"weight": torch.rand(300, 200)}
    saving = dcp.async_save(state, storage_writer=writer_to(tmp_path), no_dist=True)
    getattr(saving, "upload_completion", saving).result()
    assert_equal(torchobj.load(f"file://{tmp_path}/"), state)


def test_a_part_that_fails_fails_the_save_and_leaves_no_file(bucket, control):
    control.faults({"operation": "PutObject", "key": "00002-of", "action": {"status": 403, "code": "AccessDenied"}})
    state, mapping = {"a": torch.rand(3), "b": torch.rand(3)}, {"a": 1, "b": 2}
    error = error_of(lambda: save_to(bucket, state, fqn_to_index_mapping=mapping))
    assert isinstance(error, exceptions.AccessDeniedError)
    assert bucket.keys() == []


def test_an_index_that_is_refused_leaves_no_file(bucket, control):
    control.faults({"operation": "PutObject", "key": "index", "action": {"status": 403, "code": "AccessDenied"}})
    error = error_of(lambda: save_to(bucket, {"a": torch.rand(3)}))
    assert isinstance(error, exceptions.AccessDeniedError)
    assert bucket.keys() == []


def test_a_new_folder_needs_no_permission_to_delete_and_the_index_is_last(bucket, control):
    save_to(bucket, {"a": torch.rand(3)})
    assert [(request.operation, request.key) for request in control.requests()] == [
        ("ListObjectsV2", None),
        ("ListObjectsV2", None),
        ("PutObject", "step 1/model-00001-of-00001.safetensors"),
        ("PutObject", "step 1/model.safetensors.index.json"),
    ]


def test_the_old_index_is_deleted_first(bucket, control):
    save_to(bucket, {"a": torch.rand(3)})
    control.clear_requests()
    control.faults({"operation": "DeleteObject", "skip": 1, "action": {"status": 403, "code": "AccessDenied"}})
    error = error_of(lambda: save_to(bucket, {"a": torch.rand(3)}))
    assert isinstance(error, exceptions.AccessDeniedError)
    assert bucket.keys() == ["step 1/model-00001-of-00001.safetensors"]


def two_ranks(rank, folder):
    """Saves shards, and loads them by both readers with the same sharding and another one."""
    mesh = joined()
    state = sharded(mesh)
    dcp.save(state, storage_writer=writer_to(f"{folder}/ours"))
    theirs = hf_storage.HuggingFaceStorageWriter(f"{folder}/theirs", save_distributed=True)
    dcp.save(sharded(mesh), storage_writer=theirs)
    other = {"rows": Shard(1), "columns": Shard(0), "middle": Shard(2), "replicated": Shard(0)}
    failed = {}
    for reader, placements in (
        (StorageReader(f"file://{folder}/ours"), None),
        (StorageReader(f"file://{folder}/ours"), other),
        (StorageReader(f"file://{folder}/ours"), {}),
        (hf_storage.HuggingFaceStorageReader(f"{folder}/ours"), other),
        (StorageReader(f"file://{folder}/theirs"), None),
        (StorageReader(f"file://{folder}/theirs"), other),
    ):
        found = blank_shards(sharded(mesh, placements))
        dcp.load(found, storage_reader=reader)
        failed[f"{type(reader).__name__} {len(failed)}"] = differing(found)
    replicated = {f"tensor {number}": torch.arange(10.0 * number + 5) for number in range(8)}
    dcp.save(replicated, storage_writer=writer_to(f"{folder}/replicated"))
    dcp.save(replicated, storage_writer=writer_to(f"{folder}/joined", consolidate=True))
    return failed


def test_the_shards_of_two_ranks_are_those_of_torch(tmp_path):
    for failed in run_ranks(two_ranks, str(tmp_path)):
        assert isinstance(failed, dict), failed
        assert len(failed) == 6
        assert not any(failed.values()), failed
    expected = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs") == expected
    # Replicated tensors are written once, each by one rank.
    replicated = {f"tensor {number}": torch.arange(10.0 * number + 5) for number in range(8)}
    assert_equal(torchobj.load(f"file://{tmp_path}/replicated/"), replicated)
    assert names_in(tmp_path / "replicated") == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert_equal(torchobj.load(f"file://{tmp_path}/joined/"), replicated)
    assert [name for name in names_in(tmp_path / "joined") if not name.startswith("sharded/")] == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    assert whole().keys() == {name for path in (tmp_path / "ours").iterdir() for name in safetensors.load_file(path)}


def one_rank_fails(rank, folder):
    mesh = joined()

    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item):
            if rank == 1:
                raise ZeroDivisionError("rank 1 failed")
            return super().resolve_data(write_item)

    dcp.save(sharded(mesh), storage_writer=writer_to(folder), planner=Failing())


def test_a_rank_that_fails_fails_all_ranks_and_leaves_no_file(tmp_path):
    for name, text, _ in run_ranks(one_rank_fails, str(tmp_path)):
        assert name == "CheckpointException"
        assert "ZeroDivisionError: rank 1 failed" in text
    assert names_in(tmp_path) == []


def test_a_large_tensor_that_is_not_contiguous_is_copied_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(save_items, "_PIECE_BYTES", 50_000)
    state = {
        "turned": torch.rand(400, 900).t(),
        "cube": torch.rand(3, 200, 100).transpose(0, 2),
        "plain": torch.rand(99),
    }
    save(tmp_path, state)
    assert_equal(torchobj.load(f"file://{tmp_path}/"), state)


def test_many_small_tensors_are_one_file(tmp_path):
    state = {f"bias {number}": torch.full((number % 5 * 1000,), float(number)) for number in range(500)}
    save(tmp_path, state)
    found = blank(state)
    dcp.load(found, storage_reader=StorageReader(f"file://{tmp_path}"), no_dist=True)
    assert_equal(found, state)


def test_a_second_part_of_one_rank_is_in_another_file():
    def item(name, start):
        chunk = ChunkStorageMetadata(torch.Size([start]), torch.Size([2]))
        data = TensorWriteData(chunk, TensorProperties(), torch.Size([8]))
        return WriteItem(MetadataIndex(name, [start]), WriteItemType.SHARD, tensor_data=data)

    plans = [SavePlan([item("a", 0), item("a", 2), item("b", 0)]), SavePlan([]), SavePlan([item("a", 4), item("b", 2)])]
    files = TensorFiles(None, consolidate=False).names(plans)
    assert [[int(name.split("-")[1]) for name in of_rank] for of_rank in files] == [[1, 2, 1], [], [4, 4]]


def test_a_file_that_two_ranks_wrote_is_an_error(tmp_path):
    class Twice(StorageWriter):
        def finish(self, metadata, results):
            super().finish(metadata, [*results, *results])

    writer = Twice(f"file://{tmp_path}", format="safetensors")
    error = error_of(lambda: dcp.save({"a": torch.rand(3)}, storage_writer=writer, no_dist=True))
    assert isinstance(error, exceptions.CheckpointError)
    assert "2 ranks wrote model-00001-of-00001.safetensors" in str(error)
    assert names_in(tmp_path) == []


OLD = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from torchobj.checkpoint import StorageReader, StorageWriter
state = torch.load(sys.argv[1] + "/state.pt")
found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
dcp.load(found, storage_reader=StorageReader("file://" + sys.argv[1]))
assert all(torch.equal(found[name], state[name]) for name in state)
dcp.save(found, storage_writer=StorageWriter("file://" + sys.argv[1] + "/again", format="safetensors"))
print(torch.__version__)
"""


@pytest.mark.matrix
def test_an_old_torch_loads_what_the_newest_saved_and_saves_it_again(tmp_path, old_python):
    state = state_of_one()
    torch.save(state, tmp_path / "state.pt")
    save(tmp_path, state)
    done = subprocess.run([old_python, "-c", OLD, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2.6.")
    assert_equal(torchobj.load(f"file://{tmp_path}/again/"), state)
