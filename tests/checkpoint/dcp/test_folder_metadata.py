"""Folders of safetensors, of any program, are read as checkpoints, and are checked before they are trusted."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import state_dict_loader

import torchobj
from tests.support.distributed_states import QUIET, assert_equal, blank
from torchobj import exceptions
from torchobj.checkpoint import StorageReader, StorageWriter
from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.checkpoint.dcp import storage
from torchobj.checkpoint.dcp.folder_metadata import folder_metadata

pytestmark = QUIET

INDEX = "model.safetensors.index.json"


def put(url, name, tensors, parts=None, **settings):
    """Writes a file of tensors, with its metadata for torch: an object, or its JSON."""
    text = parts if isinstance(parts, str) else json.dumps(parts)
    metadata = {} if parts is None else {"DCP_SHARDING_INFO": text}
    torchobj.save(tensors, f"{url}/{name}", metadata=metadata, **settings)


def put_bytes(url, name, data):
    folder = CheckpointDir(url, None)
    folder.store.put(folder.key(name), data)


def loaded(url, state, **settings):
    found = blank(state)
    dcp.load(found, storage_reader=StorageReader(url, **settings), no_dist=True)
    return found


def refused(url):
    with pytest.raises(exceptions.CheckpointError) as caught:
        StorageReader(url).read_metadata()
    return str(caught.value)


@pytest.fixture
def url(request):
    return f"memory://{abs(hash(request.node.nodeid))}/folder"


def test_a_folder_with_an_index_is_a_checkpoint_of_whole_tensors(url):
    state = {f"layer.{number}": torch.rand(30, 20 + number) for number in range(5)}
    torchobj.save(state, f"{url}/", format="safetensors", max_shard_bytes=5000)
    put(url, "adapter_model.safetensors", {"layer.0": torch.rand(1)})
    assert_equal(loaded(url, state), state)
    metadata = StorageReader(url).read_metadata()
    assert metadata.state_dict_metadata["layer.1"].size == (30, 21)
    assert metadata.state_dict_metadata["layer.1"].properties.dtype is torch.float32


def test_one_file_is_a_checkpoint_of_whole_tensors(url):
    state = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "large": torch.rand(300, 200),
        "b": torch.rand(4).half(),
    }
    torchobj.save(state, f"{url}/model.safetensors")
    put(url, "model.fp16.safetensors", state)
    assert_equal(loaded(url, state), state)
    assert_equal(loaded(f"{url}/", {"large": state["large"]}), {"large": state["large"]})


def test_files_without_an_index_are_one_checkpoint(url):
    state = {"a": torch.rand(3), "b": torch.rand(4)}
    put(url, "first.safetensors", {"a": state["a"]})
    put(url, "second.safetensors", {"b": state["b"]}, parts="")
    put(url, "below/third.safetensors", {"a": torch.rand(1)})
    put_bytes(url, "config.json", b"{}")
    assert_equal(loaded(url, state), state)


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
def test_a_folder_is_loaded_without_a_template_too(url):
    state = {"a": torch.rand(3), "b.c": torch.rand(4)}
    torchobj.save(state, f"{url}/model.safetensors")
    found = state_dict_loader._load_state_dict_from_keys(storage_reader=StorageReader(url))
    assert_equal(found, state)


def test_a_checkpoint_of_torchs_own_format_goes_first(url):
    state = {"a": torch.rand(3)}
    put(url, "model.safetensors", {"a": torch.rand(3)})
    dcp.save(state, storage_writer=StorageWriter(url), no_dist=True)
    assert_equal(loaded(url, state), state)


@pytest.mark.parametrize("name", [None, "config.json", "weights.pt"])
def test_where_there_are_no_weights_it_says_that_there_is_no_checkpoint(url, name):
    put_bytes(url, name or "other/file", b"")
    with pytest.raises(exceptions.ObjectNotFoundError, match=r"\.metadata"):
        StorageReader(url).read_metadata()


def test_a_rank_has_no_metadata_of_its_own_in_it(url):
    put(url, "model.safetensors", {"a": torch.rand(3)})
    with pytest.raises(exceptions.ObjectNotFoundError, match=r"__1\.metadata"):
        StorageReader(url).read_metadata(rank=1)


def test_of_a_slice_only_its_rows_are_read(bucket, control):
    state = {"large": torch.arange(2 << 20, dtype=torch.float32).view(2048, 1024)}
    url = f"{bucket.url}/step 1"
    put(url, "model.safetensors", state, config=bucket.config)
    reader = StorageReader(url, config=bucket.config)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    control.clear_requests()
    rows = torch.zeros(1, 1024)
    found = dcp.planner_helpers.create_read_items_for_chunk_list(
        "large",
        reader._metadata.state_dict_metadata["large"],
        [dcp.metadata.ChunkStorageMetadata(torch.Size([1500, 0]), torch.Size([1, 1024]))],
    )

    class Planner(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            return rows

        def commit_tensor(self, read_item, tensor):
            pass

    reader.read_data(dcp.LoadPlan(found), Planner()).wait()
    assert torch.equal(rows, state["large"][1500:1501])
    requests = control.requests("GetObject")
    assert len(requests) == 2
    assert sum(request.bytes_sent for request in requests) < 10_000


PARTS = {"a": ((0, 0), (2, 3)), "b": ((2, 0), (2, 1)), "c": ((2, 1), (2, 2))}
"""Offsets and shapes of parts of a tensor of shape (4, 3): rows, and rows that are divided into columns."""


def put_parts(url, parts, tensor, shape=None):
    for name, ((row, column), (rows, columns)) in parts.items():
        part = {"saved_offsets": [row, column]} | ({} if shape is None else {"global_shape": shape})
        slice_ = tensor[row : row + rows, column : column + columns].contiguous()
        put(url, f"{name}.safetensors", {"x": slice_}, {"x": part})


def test_parts_may_be_divided_in_any_dimension(url):
    state = {"x": torch.arange(12.0).view(4, 3)}
    put_parts(url, PARTS, state["x"])
    assert_equal(loaded(url, state), state)


@pytest.mark.parametrize("lost", PARTS)
@pytest.mark.parametrize("shape", [None, [4, 3]])
def test_a_file_that_is_missing_is_an_error(url, lost, shape):
    put_parts(url, {name: part for name, part in PARTS.items() if name != lost}, torch.rand(4, 3), shape)
    assert "'x': its 2 parts do not cover its shape (4, 3)" in refused(url)


def test_the_last_rows_are_known_to_be_missing_by_the_shape(url):
    put(url, "a.safetensors", {"x": torch.rand(2)}, {"x": {"saved_offsets": [0], "global_shape": [4]}})
    assert "its 1 parts do not cover its shape (4,)" in refused(url)
    put(url, "a.safetensors", {"x": torch.rand(0)}, {"x": {"saved_offsets": [4], "global_shape": [4]}})
    assert "its 1 parts do not cover its shape (4,)" in refused(url)


def test_a_tensor_in_two_files_is_an_error_that_names_them(url):
    for name in ("model-00001-of-00001.safetensors", "consolidated.safetensors"):
        put(url, name, {"x": torch.rand(2)})
    text = refused(url)
    assert "'x': its 2 parts do not cover its shape (2,) once" in text
    assert "consolidated.safetensors" in text
    assert "model-00001-of-00001.safetensors" in text


@pytest.mark.parametrize(
    "parts",
    [
        "[",
        "[]",
        "{}",
        '{"x": {}, "x": {}}',
        {"y": {"saved_offsets": [0]}},
        {"x": [0]},
        {"x": {"saved_offsets": 0}},
        {"x": {"saved_offsets": []}},
        {"x": {"saved_offsets": [0, 0]}},
        {"x": {"saved_offsets": [-1]}},
        {"x": {"saved_offsets": [True]}},
        {"x": {"saved_offsets": [0.0]}},
        {"x": {"saved_offsets": [1 << 63]}},
        {"x": {"saved_offsets": [0], "global_shape": [2, 1]}},
        {"x": {"saved_offsets": [0], "global_shape": "2"}},
        {"x": {"saved_offsets": [0], "global_shape": [-2]}},
        {"x": {"saved_offsets": [0] * 10_000}},
        '{"x": ' + "[" * 100_000,
    ],
    ids=lambda parts: str(parts)[:50],
)
def test_damaged_places_are_an_error_that_names_the_file(url, parts):
    put(url, "a.safetensors", {"x": torch.rand(2)}, parts)
    text = refused(url)
    assert "a.safetensors: its DCP_SHARDING_INFO is damaged" in text
    assert len(text) < 500


@pytest.mark.parametrize(
    ("offset", "shape"), [(1, None), (1 << 60, None), (0, [3]), (0, [1]), (0, [1 << 60]), (0, [0]), (1, [2])]
)
def test_places_that_leave_gaps_are_an_error(url, offset, shape):
    part = {"saved_offsets": [offset]} | ({} if shape is None else {"global_shape": shape})
    put(url, "a.safetensors", {"x": torch.rand(2)}, {"x": part})
    assert "do not cover" in refused(url)


@pytest.mark.parametrize(
    "other",
    [torch.rand(2).half(), torch.rand(2, 1), torch.rand(())],
    ids=["dtype", "dimensions", "scalar"],
)
def test_parts_of_several_tensors_are_an_error(url, other):
    put(url, "a.safetensors", {"x": torch.rand(2)}, {"x": {"saved_offsets": [0]}})
    put(url, "b.safetensors", {"x": other}, {"x": {"saved_offsets": [2, 0][: other.ndim]}})
    assert "has parts of several tensors" in refused(url)


def test_a_header_or_an_index_that_is_damaged_is_an_error(url):
    put_bytes(url, "shard.safetensors", (1 << 60).to_bytes(8, "little") + b"{}")
    assert "not a file of safetensors" in refused(url)
    put_bytes(url, INDEX, json.dumps({"weight_map": {"x": "../x.safetensors"}}).encode())
    assert "not a file of safetensors in the folder" in refused(url)
    put_bytes(url, INDEX, json.dumps({"weight_map": {"x": "x.safetensors"}}).encode())
    assert "does not exist" in refused(url)


@st.composite
def cut(draw, start=(0, 0, 0), end=(4, 5, 6), rounds=3):
    """Cuts a box into boxes, as shardings over several dimensions of a mesh do."""
    dimension = draw(st.integers(0, 2))
    if not rounds or not draw(st.booleans()) or end[dimension] - start[dimension] < 2:
        return [(start, end)]
    at = draw(st.integers(start[dimension] + 1, end[dimension] - 1))
    middle = lambda index: (*index[:dimension], at, *index[dimension + 1 :])  # noqa: E731  of this dimension
    return draw(cut(start, middle(end), rounds - 1)) + draw(cut(middle(start), end, rounds - 1))


@given(cut(), st.data())
def test_any_sharding_is_read_whole_and_none_with_a_part_too_few_or_too_many(boxes, data):
    url, tensor = "memory://any-sharding/folder", torch.arange(120.0).view(4, 5, 6)
    folder = CheckpointDir(url, None)
    folder.delete([info.key for info in folder.objects("")])
    for number, (start, end) in enumerate(boxes):
        part = tensor[tuple(map(slice, start, end))].contiguous()
        put(url, f"{number}.safetensors", {"x": part}, {"x": {"saved_offsets": start, "global_shape": [4, 5, 6]}})
    assert_equal(loaded(url, {"x": tensor}), {"x": tensor})
    number = data.draw(st.integers(0, len(boxes) - 1))
    kept = folder.get(f"{number}.safetensors")
    put_bytes(url, "again.safetensors", kept)
    assert "do not cover" in refused(url)
    folder.delete(["again.safetensors", f"{number}.safetensors"])
    if len(boxes) > 1:
        assert "do not cover" in refused(url)


@pytest.mark.parametrize("shape", [(300, 200), (30, 20), (100, 200)], ids=["same", "small", "shorter"])
def test_a_file_that_is_replaced_after_its_header_was_read_is_an_error(tmp_path, monkeypatch, shape):
    url = f"file://{tmp_path}"
    put(url, "model.safetensors", {"x": torch.rand(300, 200)})
    load_items = storage.load_items

    def replaced(*arguments, **settings):
        put(url, "model.safetensors", {"x": torch.rand(shape)})
        load_items(*arguments, **settings)

    monkeypatch.setattr(storage, "load_items", replaced)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        loaded(url, {"x": torch.rand(300, 200)})
    [(error, _)] = caught.value.failures.values()
    assert isinstance(error, exceptions.ObjectChangedError)
    assert "model.safetensors" in str(error)


@pytest.mark.parametrize("folder", ["", "step 1", "step 1/"])
def test_a_folder_is_found_by_its_url_on_any_store(any_bucket, folder):
    state, url = {"a": torch.rand(300, 200), "b": torch.rand(4)}, f"{any_bucket.url}/{folder}"
    mapping = {"a": 2, "b": 1}
    writer = StorageWriter(url, format="safetensors", fqn_to_index_mapping=mapping, config=any_bucket.config)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert_equal(loaded(url, state, config=any_bucket.config), state)


def test_the_metadata_of_a_folder_is_none_if_it_has_no_weights(url):
    assert folder_metadata(CheckpointDir(url, None), None) is None
