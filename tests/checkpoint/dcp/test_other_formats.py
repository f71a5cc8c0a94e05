"""Distributed checkpoints are read by torch's own and s3torchconnector, and theirs by ours."""

import io
import pickle
import zlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torchobj
import torchobj.s3torchconnector.dcp
from tests.support.distributed_states import (
    QUIET,
    assert_equal,
    blank,
    download,
    error_of,
    files_of,
    loaded,
    reader_of,
    save,
    upload,
    writer_of,
)
from tests.support.long_tables import GCS_IN_MATRIX, often
from tests.support.ranks import run_ranks
from tests.support.tensors import DTYPES
from torchobj import exceptions
from torchobj.checkpoint import StorageReader, StorageWriter
from torchobj.checkpoint.dcp import load_items

pytestmark = [QUIET, pytest.mark.providers("s3", GCS_IN_MATRIX)]


SIZES = {"small": (7, 5), "large": (300, 70), "scalar": (), "empty": (0, 3)}


def random_tensor(dtype, shape):
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


def every_kind():
    """A tensor of every dtype and size, and such as are laid out in other ways."""
    state = {
        f"{str(dtype).removeprefix('torch.')} {name}": random_tensor(dtype, shape)
        for dtype in DTYPES
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


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_saved_is_loaded(any_bucket, threads):
    state = every_kind()
    metadata = save(any_bucket, state, thread_count=threads)
    assert_equal(loaded(any_bucket, state), state)
    assert len(files_of(any_bucket)) == threads
    assert metadata.storage_meta.checkpoint_id == f"{any_bucket.url}/step 1"
    assert any_bucket.uploads() == []


@pytest.mark.providers("s3", "gs")
def test_torch_reads_what_torchobj_wrote(bucket, tmp_path):
    state = every_kind()
    save(bucket, state, thread_count=3, prefix_strategy=torchobj.s3torchconnector.dcp.HexPrefixStrategy(epoch_num=2))
    download(bucket, tmp_path)
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
def test_torchobj_reads_what_torch_wrote(bucket, tmp_path, threads, monkeypatch):
    monkeypatch.setattr(load_items, "_MAX_ENDS", 2)
    state = every_kind() | {str(number): torch.rand(9, number + 2).t() for number in range(5)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=threads))
    upload(bucket, tmp_path)
    assert_equal(loaded(bucket, state), state)


def test_sparse_tensors_go_by_torch(bucket):
    state = {"sparse": torch.eye(50).to_sparse(), "bias": torch.rand(3)}
    save(bucket, state)
    found = {"sparse": torch.zeros(50, 50).to_sparse(), "bias": torch.zeros(3)}
    dcp.load(found, storage_reader=reader_of(bucket))
    assert torch.equal(found["sparse"].to_dense(), torch.eye(50))
    error = error_of(lambda: dcp.load({"sparse": torch.zeros(50, 50)}, storage_reader=reader_of(bucket)))
    assert isinstance(error, exceptions.CheckpointError)
    assert "sparse cannot be loaded" in str(error)


def test_quantized_tensors_go_by_torch(bucket):
    state = {"quantized": torch.quantize_per_tensor(torch.rand(30), 0.1, 0, torch.qint8)}
    save(bucket, state)
    found = {"quantized": torch.quantize_per_tensor(torch.zeros(30), 0.1, 0, torch.qint8)}
    dcp.load(found, storage_reader=reader_of(bucket))
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


def test_what_was_saved_through_an_extension_is_loaded_if_it_is_known(bucket, tmp_path, monkeypatch):
    from torch.distributed.checkpoint import _extension

    state = {"weight": torch.rand(100, 30), "words": ["a", "b"], "small": torch.rand(3)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[inverting()()]))
    upload(bucket, tmp_path)
    error = error_of(lambda: loaded(bucket, state))
    assert isinstance(error, exceptions.CheckpointError)
    assert "stream.inverted/1" in str(error)
    known = _extension.ExtensionRegistry.__init__

    def knowing(registry):
        known(registry)
        registry.register(inverting())

    monkeypatch.setattr(_extension.ExtensionRegistry, "__init__", knowing)
    assert_equal(loaded(bucket, state), state)


@pytest.fixture
def connector(versitygw_server, monkeypatch):
    """Arguments of s3torchconnector's classes, for the server of `versitygw_place`."""
    s3torchconnector = pytest.importorskip("s3torchconnector")
    monkeypatch.setenv("AWS_ENDPOINT_URL", versitygw_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", versitygw_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", versitygw_server.secret_key)
    config = s3torchconnector.S3ClientConfig(force_path_style=True)
    return {"region": "us-east-1", "s3client_config": config}


@pytest.mark.filterwarnings("ignore")
def test_s3torchconnector_reads_ours_and_we_read_theirs(versitygw_bucket, connector):
    import s3torchconnector.dcp as theirs

    state, url = every_kind(), f"{versitygw_bucket.url}/step 1"
    save(versitygw_bucket, state, thread_count=2, prefix_strategy=torchobj.s3torchconnector.dcp.BinaryPrefixStrategy())
    found = blank(state)
    dcp.load(found, storage_reader=theirs.S3StorageReader(path=url, **connector))
    assert_equal(found, state)
    dcp.save(state, storage_writer=theirs.S3StorageWriter(path=url, thread_count=2, **connector))
    assert_equal(loaded(versitygw_bucket, state), state)


@pytest.mark.providers("s3")
def test_the_names_of_s3torchconnector_save_and_load(bucket):
    state, url = every_kind(), f"{bucket.url}/step 1"
    strategy = torchobj.s3torchconnector.dcp.RoundRobinPrefixStrategy(["a", "b"], epoch_num=1)
    writer = torchobj.s3torchconnector.dcp.S3StorageWriter(
        None, url, bucket.config, strategy, 2, overwrite=False, sync_files=True
    )
    dcp.save(state, storage_writer=writer)
    found = blank(state)
    dcp.load(found, storage_reader=torchobj.s3torchconnector.dcp.S3StorageReader(None, url, bucket.config))
    assert_equal(found, state)
    assert all(key.startswith("step 1/a/epoch_1/__0_") for key in files_of(bucket))
    with pytest.raises(TypeError, match="nonsense"):
        torchobj.s3torchconnector.dcp.S3StorageWriter(None, url, nonsense=1)


@pytest.mark.providers("s3")
def test_torch_saves_and_loads_through_the_file_system(bucket):
    files = torchobj.s3torchconnector.dcp.S3FileSystem(None, s3client_config=bucket.config)
    state, url = {"weight": torch.rand(1000)}, f"{bucket.url}/step 1"
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


@pytest.mark.parametrize("kind", often(1, ["thread", "process"]))
def test_it_is_saved_meanwhile(bucket, kind):
    if kind == "process":
        [first, second] = run_ranks(saved_by_a_process, bucket.url, bucket.config)
        assert first == second == "saved"
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            state = {"weight": torch.rand(1000), "step": 3}
            kept = {"weight": state["weight"].clone(), "step": 3}
            future = dcp.async_save(state, storage_writer=writer_of(bucket))
            state["weight"].zero_()
            future.result()
        finally:
            dist.destroy_process_group()
        assert_equal(loaded(bucket, kept), kept)


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


def test_each_rank_can_have_metadata_of_its_own(bucket, tmp_path):
    state = every_kind()
    dcp.save(state, storage_writer=writer_of(bucket), use_collectives=False)
    assert "step 1/__0.metadata" in bucket.keys()
    assert "step 1/.metadata" not in bucket.keys()
    assert_equal(loaded(bucket, state), state)
    found = blank(state)
    dcp.load(found, storage_reader=dcp.FileSystemReader(download(bucket, tmp_path)))
    assert_equal(found, state)


@pytest.mark.providers("s3", "gs")
def test_a_writer_has_the_checksum_of_each_file_and_writes_nothing_but_files_and_metadata(bucket):
    writer = writer_of(bucket, thread_count=3)
    dcp.save(every_kind(), storage_writer=writer)
    assert {f"step 1/{name}" for name in writer.checksums} == set(files_of(bucket))
    assert set(bucket.keys()) == {"step 1/.metadata", *files_of(bucket)}
    for name, crc32 in writer.checksums.items():
        assert zlib.crc32(bucket.body(f"step 1/{name}")) == crc32
