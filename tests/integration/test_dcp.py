"""Distributed checkpoints: whole or not there, read by torch's own and s3torchconnector, and theirs by ours."""

import datetime
import io
import json
import multiprocessing
import os
import pickle
import signal
import weakref
import zlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import torchobj
import torchobj.dcp
from tests.interrupting import interrupted
from tests.prefetching import eventually
from tests.ranks import LONGEST_S, run_ranks, started
from torchobj import exceptions
from torchobj.checkpoint import StorageReader, StorageWriter
from torchobj.checkpoint.dcp import item, reading, transfer, wave, writing
from torchobj.checkpoint.dcp import place as places

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*quantize"),
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:Validating sparse"),
]

SIZES = {"small": (7, 5), "large": (300, 70), "scalar": (), "empty": (0, 3)}


def random_tensor(dtype, shape):
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


def every_kind():
    """A tensor of every dtype and size, and such as are laid out in other ways."""
    state = {
        f"{str(dtype).removeprefix('torch.')} {name}": random_tensor(dtype, shape)
        for dtype in sorted(item._DTYPES, key=str)
        for name, shape in SIZES.items()
        if dtype is not torch.bool
    }
    shared = torch.arange(100_000.0)
    return state | {
        "bool": torch.rand(100) > 0.5,
        "transposed": torch.rand(300, 200).t(),
        "strided": torch.rand(100, 100)[:, ::2],
        "conjugated": torch.rand(40, dtype=torch.complex64).conj(),
        "view": shared[1000:2000],
        "other view": shared[50_000:],
        "parameter": torch.nn.Parameter(torch.rand(33, 3)),
        "nested": {"list": [torch.ones(3), 5, "word"], "number": 7},
        "tied": shared,
        "tied too": shared,
    }


def blank(state):
    if isinstance(state, torch.Tensor):
        return torch.empty(state.shape, dtype=state.dtype)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [blank(value) for value in state] if isinstance(state, list) else None


def same_bytes(one, other):
    one, other = (tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


def assert_equal(found, state):
    assert found.keys() == state.keys()
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype
            assert same_bytes(found[key], value), key
        elif isinstance(value, dict):
            assert_equal(found[key], value)
        elif isinstance(value, list):
            assert_equal(dict(enumerate(found[key])), dict(enumerate(value)))
        else:
            assert found[key] == value, key


def writer_of(place, **settings):
    return StorageWriter(f"{place.url}/step 1", config=place.config, **settings)


def reader_of(place, **settings):
    return StorageReader(f"{place.url}/step 1", config=place.config, **settings)


def save(place, state, **settings):
    return dcp.save(state, storage_writer=writer_of(place, **settings))


def loaded(place, state, **settings):
    found = blank(state)
    dcp.load(found, storage_reader=reader_of(place, **settings))
    return found


def download(place, folder):
    for key in place.keys():
        name = key.removeprefix("step 1/")
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(place.body(key))
    return folder


def upload(place, folder):
    for path in folder.rglob("*"):
        if path.is_file():
            place.boto.put_object(Bucket=place.bucket, Key=f"step 1/{path.relative_to(folder)}", Body=path.read_bytes())


def files_of(place):
    return sorted(key for key in place.keys() if key.endswith(".distcp"))


def error_of(call):
    """The error of one rank that torch hides in one of all ranks."""
    with pytest.raises(CheckpointException) as caught:
        call()
    [error] = caught.value.failures.values()
    return error[0]


# Round trips


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_saved_is_loaded(any_place, threads):
    state = every_kind()
    metadata = save(any_place, state, thread_count=threads)
    assert_equal(loaded(any_place, state), state)
    assert len(files_of(any_place)) == threads
    assert metadata.storage_meta.checkpoint_id == f"{any_place.url}/step 1"
    assert any_place.uploads() == []


def test_torch_reads_what_torchobj_wrote(place, tmp_path):
    state = every_kind()
    save(place, state, thread_count=3, prefix_strategy=torchobj.dcp.HexPrefixStrategy(epoch_num=2))
    download(place, tmp_path)
    for reader in (dcp.FileSystemReader(tmp_path), fsspec_reader(tmp_path)):
        found = blank(state)
        dcp.load(found, storage_reader=reader)
        assert_equal(found, state)


def fsspec_reader(folder):
    try:
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader
    except ImportError:  # up to torch 2.14
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(f"file://{folder}")


@pytest.mark.parametrize("threads", [1, 3])
def test_torchobj_reads_what_torch_wrote(place, tmp_path, threads, monkeypatch):
    monkeypatch.setattr(reading, "_LOOKED_ITEMS", 2)
    state = every_kind() | {str(number): torch.rand(9, number + 2).t() for number in range(5)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=threads))
    upload(place, tmp_path)
    assert_equal(loaded(place, state), state)


def test_sparse_tensors_go_by_torch(place):
    state = {"sparse": torch.eye(50).to_sparse(), "bias": torch.rand(3)}
    save(place, state)
    found = {"sparse": torch.zeros(50, 50).to_sparse(), "bias": torch.zeros(3)}
    dcp.load(found, storage_reader=reader_of(place))
    assert torch.equal(found["sparse"].to_dense(), torch.eye(50))
    error = error_of(lambda: dcp.load({"sparse": torch.zeros(50, 50)}, storage_reader=reader_of(place)))
    assert isinstance(error, exceptions.CheckpointError)
    assert "sparse cannot be loaded" in str(error)


def test_quantized_tensors_go_by_torch(place):
    state = {"quantized": torch.quantize_per_tensor(torch.rand(30), 0.1, 0, torch.qint8)}
    save(place, state)
    found = {"quantized": torch.quantize_per_tensor(torch.zeros(30), 0.1, 0, torch.qint8)}
    dcp.load(found, storage_reader=reader_of(place))
    assert torch.equal(found["quantized"].int_repr(), state["quantized"].int_repr())


def inverting():
    """An extension of torch's streams that inverts each byte."""
    from torch.distributed.checkpoint._extension import StreamTransformExtension

    class Inverted(io.RawIOBase):
        def __init__(self, file):
            self.file = file

        def writeable(self):
            return True

        def readable(self):
            return True

        def write(self, data):
            return self.file.write(bytes(byte ^ 255 for byte in memoryview(data).cast("B")))

        def readinto(self, buffer):
            data = self.file.read(len(buffer))
            buffer[: len(data)] = bytes(byte ^ 255 for byte in data)
            return len(data)

        def seekable(self):
            return False

        def flush(self):
            self.file.flush()

    class Inverting(StreamTransformExtension):
        @staticmethod
        def registry_name():
            return "stream.inverted"

        @staticmethod
        def from_descriptor(version):
            return Inverting()

        def get_descriptor(self):
            return "stream.inverted/1"

        def transform_to(self, output):
            return Inverted(output)

        def transform_from(self, input):
            return Inverted(input)

    return Inverting


def test_what_was_saved_through_an_extension_is_loaded_if_it_is_known(place, tmp_path, monkeypatch):
    from torch.distributed.checkpoint import _extension

    state = {"weight": torch.rand(100, 30), "words": ["a", "b"], "small": torch.rand(3)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[inverting()()]))
    upload(place, tmp_path)
    error = error_of(lambda: loaded(place, state))
    assert isinstance(error, exceptions.CheckpointError)
    assert "stream.inverted/1" in str(error)
    known = _extension.ExtensionRegistry.__init__

    def knowing(registry):
        known(registry)
        registry.register(inverting())

    monkeypatch.setattr(_extension.ExtensionRegistry, "__init__", knowing)
    assert_equal(loaded(place, state), state)


@pytest.fixture
def connector(versitygw_server, monkeypatch):
    """Arguments of s3torchconnector's classes, for the server of `versitygw_place`."""
    s3torchconnector = pytest.importorskip("s3torchconnector")
    monkeypatch.setenv("AWS_ENDPOINT_URL", versitygw_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", versitygw_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", versitygw_server.secret_key)
    config = s3torchconnector.S3ClientConfig(force_path_style=True)
    return {"region": "us-east-1", "s3client_config": config}


@pytest.fixture
def versitygw_place(request, versitygw_server):
    from tests.conftest import _place

    return _place("versitygw", versitygw_server)


@pytest.mark.filterwarnings("ignore")
def test_s3torchconnector_reads_ours_and_we_read_theirs(versitygw_place, connector):
    import s3torchconnector.dcp as theirs

    state, url = every_kind(), f"{versitygw_place.url}/step 1"
    save(versitygw_place, state, thread_count=2, prefix_strategy=torchobj.dcp.BinaryPrefixStrategy())
    found = blank(state)
    dcp.load(found, storage_reader=theirs.S3StorageReader(path=url, **connector))
    assert_equal(found, state)
    dcp.save(state, storage_writer=theirs.S3StorageWriter(path=url, thread_count=2, **connector))
    assert_equal(loaded(versitygw_place, state), state)


def test_the_names_of_s3torchconnector_save_and_load(place):
    state, url = every_kind(), f"{place.url}/step 1"
    strategy = torchobj.dcp.RoundRobinPrefixStrategy(["a", "b"], epoch_num=1)
    writer = torchobj.dcp.S3StorageWriter(None, url, place.config, strategy, 2, overwrite=False, sync_files=True)
    dcp.save(state, storage_writer=writer)
    found = blank(state)
    dcp.load(found, storage_reader=torchobj.dcp.S3StorageReader(None, url, place.config))
    assert_equal(found, state)
    assert all(key.startswith("step 1/a/epoch_1/__0_") for key in files_of(place))
    with pytest.raises(TypeError, match="nonsense"):
        torchobj.dcp.S3StorageWriter(None, url, nonsense=1)


def test_torch_saves_and_loads_through_the_file_system(place):
    files = torchobj.dcp.S3FileSystem(None, s3client_config=place.config)
    state, url = {"weight": torch.rand(1000)}, f"{place.url}/step 1"
    writer, reader = dcp.FileSystemWriter("unused", sync_files=False), dcp.FileSystemReader("unused")
    for each in (writer, reader):
        each.fs, each.path = files, files.init_path(url)
    dcp.save(state, storage_writer=writer)
    found = blank(state)
    dcp.load(found, storage_reader=reader)
    assert_equal(found, state)
    assert not files.exists(f"{url}/.metadata.tmp")
    with pytest.raises(ZeroDivisionError), files.create_stream(f"{url}/half", "wb") as stream:
        stream.write(b"x")
        raise ZeroDivisionError
    assert not files.exists(f"{url}/half")


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_it_is_saved_meanwhile(place, kind):
    if kind == "process":
        [first, second] = run_ranks(saved_by_a_process, place.url, place.config)
        assert first == second == "saved"
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            state = {"weight": torch.rand(1000), "step": 3}
            kept = {"weight": state["weight"].clone(), "step": 3}
            future = dcp.async_save(state, storage_writer=writer_of(place))
            state["weight"].zero_()
            future.result()
        finally:
            dist.destroy_process_group()
        assert_equal(loaded(place, kept), kept)


def saved_by_a_process(rank, url, config):
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    dist.init_process_group("gloo")
    state = {"weight": torch.full((1000,), 3.0)}
    writer = pickle.loads(pickle.dumps(StorageWriter(f"{url}/step 1", config=config, thread_count=2)))
    dcp.async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
    found = {"weight": torch.zeros(1000)}
    dcp.load(found, storage_reader=pickle.loads(pickle.dumps(StorageReader(f"{url}/step 1", config=config))))
    assert torch.equal(found["weight"], state["weight"])
    return "saved"


def test_each_rank_can_have_metadata_of_its_own(place, tmp_path):
    state = every_kind()
    dcp.save(state, storage_writer=writer_of(place), use_collectives=False)
    assert "step 1/__0.metadata" in place.keys()
    assert "step 1/.metadata" not in place.keys()
    assert_equal(loaded(place, state), state)
    found = blank(state)
    dcp.load(found, storage_reader=dcp.FileSystemReader(download(place, tmp_path)))
    assert_equal(found, state)


def test_the_manifest_names_each_object_with_size_version_and_checksum(place):
    save(place, every_kind(), thread_count=3)
    manifest = json.loads(place.body("step 1/_torchobj_manifest.json"))
    assert [f"step 1/{entry['name']}" for entry in manifest["files"]] == files_of(place)
    for entry in manifest["files"]:
        body = place.body(f"step 1/{entry['name']}")
        head = place.boto.head_object(Bucket=place.bucket, Key=f"step 1/{entry['name']}")
        assert (entry["size"], entry["crc32"], entry["version"]) == (len(body), zlib.crc32(body), head["ETag"])


def test_a_large_tensor_that_is_not_contiguous_is_copied_in_pieces(place, monkeypatch):
    monkeypatch.setattr(writing, "_PIECE_BYTES", 100_000)
    monkeypatch.setattr(writing, "_COPIED_BYTES", 300_000)
    state = {"plain": torch.rand(500, 500), "transposed": torch.rand(400, 900).t(), "small": torch.rand(90, 90).t()}
    save(place, state)
    assert len(files_of(place)) == 2
    assert_equal(loaded(place, state), state)
    manifest = json.loads(place.body("step 1/_torchobj_manifest.json"))
    assert all(zlib.crc32(place.body(f"step 1/{file['name']}")) == file["crc32"] for file in manifest["files"])


def test_copies_that_wait_to_be_sent_are_few(place, monkeypatch):
    stage, alive, most = writing._staged_whole, [], 0

    def staged(tensor):
        nonlocal most
        copy = stage(tensor)
        alive.append(weakref.ref(copy))
        most = max(most, sum(ref() is not None for ref in alive))
        return copy

    monkeypatch.setattr(writing, "_staged_whole", staged)
    # Of 8 MiB each, and laid out as they are not written.
    turned = torch.rand(1024, 2048).t()
    save(place, {f"turned {number}": turned for number in range(40)})
    assert len(alive) == 40
    # Twelve by the bounds, and those that were sent and are not yet let go.
    assert most <= 20


# Destinations


def test_destinations_may_be_of_another_dtype_or_layout(place, monkeypatch):
    monkeypatch.setattr(transfer, "_TILE_BYTES", 50_000)
    monkeypatch.setattr(reading, "_WAVE_BYTES", 100_000)
    state = {"weight": torch.rand(300, 200), "small": torch.rand(30, 20)}
    save(place, state)
    found = {"weight": torch.zeros(300, 400, dtype=torch.float64)[:, ::2], "small": torch.zeros(20, 30).half().t()}
    dcp.load(found, storage_reader=reader_of(place))
    assert torch.equal(found["weight"].float(), state["weight"])
    assert torch.equal(found["small"], state["small"].half())


def test_destinations_may_share_memory_as_tied_weights_do(place):
    weight, small = torch.rand(300, 200), torch.rand(10)
    state = {"weight": weight, "tied": weight, "part": weight[100:200], "small": small, "small tied": small}
    save(place, state)
    target, small_target = torch.zeros(300, 200), torch.zeros(10)
    found = {"weight": target, "tied": target, "part": target[100:200]}
    found |= {"small": small_target, "small tied": small_target}
    dcp.load(found, storage_reader=reader_of(place))
    assert torch.equal(target, weight)
    assert torch.equal(small_target, small)


def test_a_destination_knows_that_it_was_written(place):
    save(place, {"weight": torch.rand(300, 200)})
    target = torch.zeros(300, 200)
    before = target._version
    dcp.load({"weight": target}, storage_reader=reader_of(place))
    assert target._version > before


def test_a_destination_of_another_size_is_refused(place):
    save(place, {"weight": torch.rand(300)})
    with pytest.raises(CheckpointException, match="weight"):
        dcp.load({"weight": torch.zeros(200)}, storage_reader=reader_of(place))


class Committing(DefaultLoadPlanner):
    def set_up_planner(self, *args, **kwargs):
        super().set_up_planner(*args, **kwargs)
        self.committed = []

    def commit_tensor(self, read_item, tensor):
        self.committed.append((read_item.dest_index.fqn, float(tensor.sum())))


def test_each_tensor_is_committed_when_it_is_there(place):
    state = {"large": torch.rand(300, 200), "small": torch.rand(3)}
    save(place, state)
    planner = Committing()
    dcp.load(blank(state), storage_reader=reader_of(place), planner=planner)
    assert sorted(planner.committed) == sorted((key, float(value.sum())) for key, value in state.items())


# Requests


def read_bytes(control):
    return sum(request.bytes_sent for request in control.requests("GetObject") if request.key.endswith(".distcp"))


def test_one_percent_of_the_tensors_is_one_percent_of_the_bytes(place, control):
    state = {f"layer {number}": torch.rand(64, 512) for number in range(200)}
    state |= {f"bias {number}": torch.rand(512) for number in range(200)}
    save(place, state)
    total = sum(len(place.body(key)) for key in files_of(place))
    wanted = {name: state[name] for name in ("layer 17", "layer 99", "bias 3", "bias 150")}
    control.forget_requests()
    assert_equal(loaded(place, wanted), wanted)
    assert read_bytes(control) <= 0.015 * total
    # Nothing is asked twice, and nothing by HEAD.
    assert len(control.requests()) <= 1 + len(wanted)


def test_everything_is_read_once(place, control):
    state = {f"layer {number}": torch.rand(64, 512) for number in range(50)}
    state |= {f"bias {number}": torch.rand(512) for number in range(50)}
    save(place, state, thread_count=2)
    total = sum(len(place.body(key)) for key in files_of(place))
    control.forget_requests()
    assert_equal(loaded(place, state), state)
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


def test_two_ranks_save_and_one_loads(place, tmp_path):
    assert run_ranks(saved_by_two, place.url, place.config) == ["saved"] * 2
    expected = {name: tensor for name, (tensor, _) in sharded().items()}
    assert_equal(loaded(place, expected), expected)
    found = blank(expected)
    dcp.load(found, storage_reader=dcp.FileSystemReader(download(place, tmp_path)))
    assert_equal(found, expected)


def test_two_ranks_load_what_one_saved_and_each_reads_its_rows_only(place, control):
    state = {name: tensor for name, (tensor, _) in sharded().items()}
    save(place, state)
    control.forget_requests()
    assert run_ranks(loaded_by_two, place.url, place.config) == ["equal"] * 2
    by_rows = sum(tensor.nbytes for name, tensor in state.items() if name in ("rows", "uneven", "deep"))
    # Halves of rows of 4 KiB and less are read with what is between them, by both.
    by_columns = 2 * sum(tensor.nbytes for name, tensor in state.items() if name in ("columns", "narrow"))
    # What lies between is read with it where that is an eighth at most.
    assert read_bytes(control) <= 1.13 * (by_rows + by_columns)


# Failures


PART = {"operation": "UploadPart"}
REFUSED = {"action": {"status": 403, "code": "AccessDenied"}}


def with_an_old_one(place):
    old = {"weight": torch.full((100,), 7.0)}
    save(place, old)
    return old


def still_good(place, old):
    assert_equal(loaded(place, old), old)
    assert place.uploads() == []
    return True


def test_a_part_of_one_file_that_fails_fails_the_save(place, control):
    old = with_an_old_one(place)
    state = {name: torch.rand(6 << 20) for name in "abc"}
    control.faults({**PART, "key": "_1\\.distcp$", "skip": 1, "action": {"status": 403, "code": "AccessDenied"}})
    error = error_of(lambda: save(place, state, thread_count=3))
    assert isinstance(error, exceptions.AccessDeniedError)
    assert "_1.distcp" in str(error)
    control.clear_faults()
    assert still_good(place, old)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_save_that_is_interrupted_ends_at_once_and_leaves_the_old_checkpoint(place, control, threads):
    old = with_an_old_one(place)
    state = {name: torch.rand(6 << 20) for name in "abc"}
    with interrupted(control, **PART):
        error = error_of(lambda: save(place, state, thread_count=threads))
    assert isinstance(error, KeyboardInterrupt)
    assert eventually(lambda: place.uploads() == [])
    assert still_good(place, old)


class Failing(DefaultSavePlanner):
    def resolve_data(self, write_item):
        if write_item.index.fqn == "bad":
            raise ZeroDivisionError("the planner failed")
        return super().resolve_data(write_item)


def test_an_item_that_cannot_be_resolved_fails_the_save(place):
    old = with_an_old_one(place)
    state = {"a": torch.rand(5 << 20), "bad": torch.rand(6 << 20), "c": torch.rand(7 << 20)}
    for threads in (1, 3):
        writer = writer_of(place, thread_count=threads)
        error = error_of(lambda writer=writer: dcp.save(state, storage_writer=writer, planner=Failing()))
        assert isinstance(error, ZeroDivisionError)
        assert still_good(place, old)


def test_an_object_that_cannot_be_pickled_fails_the_save(place):
    old = with_an_old_one(place)
    error = error_of(lambda: save(place, {"a": torch.rand(100), "bad": lambda: 1}))
    assert "lambda" in str(error)
    assert still_good(place, old)


@pytest.mark.parametrize("name", ["\\.metadata$", "_torchobj_manifest"])
def test_a_save_whose_last_objects_fail_leaves_the_old_checkpoint(place, control, name):
    old = with_an_old_one(place)
    control.faults({"operation": "PutObject", "key": name, "action": {"status": 403, "code": "AccessDenied"}})
    error = error_of(lambda: save(place, {"weight": torch.rand(100)}))
    assert isinstance(error, exceptions.AccessDeniedError)
    control.clear_faults()
    assert still_good(place, old)
    assert len(files_of(place)) == 1
    new = {"weight": torch.rand(100)}
    save(place, new)
    assert still_good(place, new)
    assert len(files_of(place)) == 1


def test_a_save_whose_old_files_cannot_be_deleted_is_saved_and_warns(place, control, caplog):
    with_an_old_one(place)
    [old] = files_of(place)
    control.faults({**REFUSED, "operation": "DeleteObjects"})
    new = {"weight": torch.rand(100)}
    save(place, new)
    control.clear_faults()
    assert still_good(place, new)
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"{place.url}/step 1 is saved" in warning
    assert old.removeprefix("step 1/") in warning
    assert old in files_of(place)


@pytest.mark.parametrize("name", ["../step 2/__0_0.distcp", "config.json", ".metadata", "/x.distcp", 5, ("a",), ["a"]])
def test_what_is_no_file_of_the_checkpoint_is_never_deleted(place, name, caplog):
    save(place, {"weight": torch.rand(100)})
    place.boto.delete_object(Bucket=place.bucket, Key="step 1/_torchobj_manifest.json")
    metadata = pickle.loads(place.body("step 1/.metadata"))
    [info] = metadata.storage_data.values()
    info.relative_path = name
    place.boto.put_object(Bucket=place.bucket, Key="step 1/.metadata", Body=pickle.dumps(metadata))
    before = {f"step 1/{name}", "step 2/__0_0.distcp", *files_of(place)} - {"step 1/.metadata"}
    for key in before:
        place.boto.put_object(Bucket=place.bucket, Key=key, Body=b"kept")
    new = {"weight": torch.rand(100)}
    save(place, new)
    assert_equal(loaded(place, new), new)
    assert before <= set(place.keys())
    assert "kept" in caplog.text


def one_rank_fails(rank, url, config):
    dist.init_process_group("gloo")
    state = {f"rank {rank}": torch.rand(1000), f"bad{rank}": torch.rand(1000)}

    class FailingOnOne(DefaultSavePlanner):
        def resolve_data(self, write_item):
            if write_item.index.fqn == "bad1":
                raise ZeroDivisionError("rank 1 failed")
            return super().resolve_data(write_item)

    writer = StorageWriter(f"{url}/step 1", config=config)
    dcp.save(state, storage_writer=writer, planner=FailingOnOne(dedup_save_to_lowest_rank=True))


def test_a_rank_that_fails_fails_all_ranks_with_its_error(place):
    old = with_an_old_one(place)
    for name, text, _ in run_ranks(one_rank_fails, place.url, place.config):
        assert name == "CheckpointException"
        assert "ZeroDivisionError: rank 1 failed" in text
    assert still_good(place, old)


def test_a_result_that_is_missing_fails_the_save(place):
    class Forgetful(StorageWriter):
        def finish(self, metadata, results):
            super().finish(metadata, [of_rank[1:] for of_rank in results])

    writer = Forgetful(f"{place.url}/step 1", config=place.config)
    state = {"first": torch.rand(3), "second": torch.rand(3)}
    error = error_of(lambda: dcp.save(state, storage_writer=writer))
    assert isinstance(error, exceptions.CheckpointError)
    assert "first" in str(error)
    assert "no rank wrote it" in str(error)
    assert "step 1/.metadata" not in place.keys()


def test_a_checkpoint_is_replaced_whole_and_leaves_nothing(place):
    save(place, {"weight": torch.zeros(1000)}, thread_count=3)
    before = files_of(place)
    new = {"weight": torch.rand(1000), "bias": torch.rand(5)}
    save(place, new, thread_count=2)
    assert_equal(loaded(place, new), new)
    assert len(files_of(place)) == 2
    assert not set(before) & set(files_of(place))


def test_a_checkpoint_of_torch_is_replaced_too(place, tmp_path):
    dcp.save({"weight": torch.zeros(1000)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    upload(place, tmp_path)
    new = {"weight": torch.rand(1000)}
    save(place, new)
    assert still_good(place, new)
    assert "step 1/__0_0.distcp" not in place.keys()


def test_the_manifest_of_a_save_that_failed_is_not_believed(place, control):
    with_an_old_one(place)
    before = set(files_of(place))
    refused = {"operation": "PutObject", "key": "\\.metadata$", "times": 1}
    control.faults({**refused, "action": {"status": 403, "code": "AccessDenied"}})
    new = {"weight": torch.rand(100)}
    error_of(lambda: save(place, new))
    assert before <= set(files_of(place))
    save(place, new)
    assert not before & set(files_of(place))


def test_a_checkpoint_whose_manifest_is_damaged_is_replaced_too(place):
    with_an_old_one(place)
    before = set(files_of(place))
    place.boto.put_object(Bucket=place.bucket, Key="step 1/_torchobj_manifest.json", Body=b"{")
    save(place, {"weight": torch.rand(100)})
    assert not before & set(files_of(place))


def test_an_existing_checkpoint_is_not_overwritten_unless_it_may_be(place):
    old = with_an_old_one(place)
    error = error_of(lambda: save(place, {"weight": torch.rand(3)}, overwrite=False))
    assert isinstance(error, exceptions.CheckpointError)
    # torch's own writer begins with the same words.
    assert str(error).startswith("Checkpoint already exists")
    assert "overwrite=False" in str(error) and "step 1/.metadata" in str(error)
    assert still_good(place, old)


def test_of_two_writers_that_may_not_overwrite_one_wins(place):
    class Late(StorageWriter):
        def finish(self, metadata, results):
            save(place, {"weight": torch.full((3,), 1.0)}, overwrite=False)
            super().finish(metadata, results)

    writer = Late(f"{place.url}/step 1", config=place.config, overwrite=False)
    error = error_of(lambda: dcp.save({"weight": torch.zeros(3)}, storage_writer=writer))
    assert isinstance(error, exceptions.CheckpointError)
    assert torch.equal(loaded(place, {"weight": torch.zeros(3)})["weight"], torch.ones(3))


def test_a_put_of_the_metadata_whose_answer_is_lost_is_no_other_writer(place, control):
    control.faults({"operation": "PutObject", "key": "\\.metadata$", "times": 1, "action": {"lose_response": True}})
    state = {"weight": torch.rand(3)}
    save(place, state, overwrite=False)
    assert still_good(place, state)


@pytest.mark.parametrize("name", ["small", "large"])
def test_a_flipped_byte_is_an_error_that_names_tensor_and_file(place, name):
    state = {"small": torch.rand(100), "large": torch.rand(100_000)}
    save(place, state)
    [key] = files_of(place)
    body = bytearray(place.body(key))
    body[bytes(body).index(state[name].numpy().tobytes()) + 13] ^= 1
    place.boto.put_object(Bucket=place.bucket, Key=key, Body=bytes(body))
    error = error_of(lambda: loaded(place, state))
    assert isinstance(error, exceptions.IntegrityError)
    assert name in str(error)
    assert key in str(error)
    loaded(place, state, verify=False)


def test_a_byte_flipped_around_a_tensor_is_an_error_or_no_harm(place):
    state = {"weight": torch.rand(5000)}
    save(place, state)
    [key] = files_of(place)
    good = place.body(key)
    start = good.index(state["weight"].numpy().tobytes())
    for position in (5, 70, 130, 215, start - 40, start + 20_000, start + 20_006):
        body = bytearray(good)
        body[position] ^= 4
        place.boto.put_object(Bucket=place.bucket, Key=key, Body=bytes(body))
        found = blank(state)
        try:
            dcp.load(found, storage_reader=reader_of(place))
        except CheckpointException as failed:
            [(error, _)] = failed.failures.values()
            assert isinstance(error, exceptions.TorchobjError), position
        else:
            assert_equal(found, state)


def test_a_short_object_is_an_error(place):
    state = {"weight": torch.rand(100_000)}
    save(place, state)
    [key] = files_of(place)
    place.boto.put_object(Bucket=place.bucket, Key=key, Body=place.body(key)[:200_000])
    error = error_of(lambda: loaded(place, state))
    assert isinstance(error, exceptions.StoreError)
    assert key in str(error)


def test_a_file_that_another_save_replaces_in_the_middle_of_a_load_is_an_error(any_place, tmp_path, monkeypatch):
    def put(value):
        state = {str(number): torch.full((9000 + number,), value) for number in range(6)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
        upload(any_place, tmp_path)
        return state

    first = put(1.0)
    monkeypatch.setattr(reading, "_WAVE_BYTES", 10_000)
    read = wave.Wave.read

    def read_and_replace(self):
        monkeypatch.setattr(wave.Wave, "read", read)
        read_items = read(self)
        put(2.0)
        return read_items

    monkeypatch.setattr(wave.Wave, "read", read_and_replace)
    # Of another dtype, so that they are read through buffers, in waves.
    found = {name: torch.zeros(tensor.shape, dtype=torch.float16) for name, tensor in first.items()}
    error = error_of(lambda: dcp.load(found, storage_reader=reader_of(any_place)))
    assert isinstance(error, exceptions.ObjectChangedError)
    assert "__0_0.distcp" in str(error)


def test_a_file_that_is_gone_is_an_error(place):
    state = {"weight": torch.rand(100)}
    save(place, state)
    [key] = files_of(place)
    place.boto.delete_object(Bucket=place.bucket, Key=key)
    assert isinstance(error_of(lambda: loaded(place, state)), exceptions.ObjectNotFoundError)


def test_a_store_that_asks_for_less_is_asked_again(place, control):
    slow = {"status": 503, "code": "SlowDown"}
    control.faults(
        {"operation": "UploadPart", "probability": 0.1, "seed": 1, "action": slow},
        {"operation": "GetObject", "probability": 0.1, "seed": 2, "action": slow},
    )
    state = {str(number): torch.rand(3 << 20) for number in range(12)}
    save(place, state, thread_count=2)
    assert_equal(loaded(place, state), state)
    assert control.fault_report()[0]["fired"]
    assert place.uploads() == []


# Bad input


@pytest.mark.parametrize("url", ["/a/folder", "gs://bucket/x", "s3://", 5])
def test_what_is_no_url_is_refused(url):
    for kind in (StorageWriter, StorageReader):
        assert not kind.validate_checkpoint_id(url)
        with pytest.raises(exceptions.ConfigError):
            kind(url)
        with pytest.raises(exceptions.ConfigError):
            kind("memory://x/y").reset(url)


def test_a_path_is_refused_for_it_has_lost_a_slash(tmp_path):
    with pytest.raises(exceptions.ConfigError, match="must be a URL as a str"):
        StorageWriter(tmp_path)


def test_a_checkpoint_id_names_another_checkpoint(place):
    writer = StorageWriter(f"{place.url}/unused", config=place.config)
    dcp.save({"weight": torch.ones(3)}, storage_writer=writer, checkpoint_id=f"{place.url}/step 1/")
    assert writer.checkpoint_id == f"{place.url}/step 1"
    found = {"weight": torch.zeros(3)}
    reader = StorageReader(f"{place.url}/unused", config=place.config)
    dcp.load(found, storage_reader=reader, checkpoint_id=f"{place.url}/step 1")
    assert torch.equal(found["weight"], torch.ones(3))


def test_where_there_is_no_checkpoint_it_says_so(place):
    with pytest.raises(CheckpointException, match="no such object|not found|NoSuchKey|404"):
        loaded(place, {"weight": torch.rand(3)})


def test_where_a_checkpoint_lies():
    place = places.Place("file:///a/b/", torchobj.StoreConfig())
    assert (place.url, place.key("x")) == ("file:///a/b", "a/b/x")
    assert places.Place("s3://bucket", torchobj.StoreConfig()).key("x") == "x"
    assert pickle.loads(pickle.dumps(place)).url == place.url


def dies_in_the_middle(rank, url, config, results):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))

    class Dying(DefaultSavePlanner):
        def resolve_data(self, write_item):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().resolve_data(write_item)

    try:
        state = {f"rank {rank}": torch.rand(1000), "shared": torch.rand(10)}
        dcp.save(state, storage_writer=StorageWriter(f"{url}/step 1", config=config), planner=Dying())
    except BaseException as error:
        results.put(f"{type(error).__name__}: {error}")
    else:
        results.put("saved")
    os._exit(0)


def test_a_rank_that_dies_leaves_the_old_checkpoint(place):
    old = with_an_old_one(place)
    results = multiprocessing.get_context("fork").SimpleQueue()
    with started(dies_in_the_middle, place.url, place.config, results) as ranks:
        for rank in ranks:
            rank.join(LONGEST_S / 2)
    assert [rank.exitcode for rank in ranks] == [0, -signal.SIGKILL]
    assert results.get() != "saved"
    assert still_good(place, old)
