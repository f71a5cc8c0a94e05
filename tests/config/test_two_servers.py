"""One job on two S3 servers: a configuration file assigns buckets to servers, and every API that does I/O uses it."""

import multiprocessing
import os
import pickle

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import torchobj
import torchobj.checkpoint
import torchobj.fsspec
import torchobj.s3torchconnector.dcp
from tests.servers import launch
from tests.servers.boto_client import boto_client
from torchobj import ObjectRef, Store, StoreConfig
from torchobj.config import config_file
from torchobj.exceptions import BucketNotFoundError

HERE, THERE = "s3://config-here", "s3://config-there"


@pytest.fixture(scope="module")
def two_servers(strict_server, credentials):
    """A bucket on each of two servers."""
    with launch.start("strict") as other:
        for server, url in ((strict_server, HERE), (other, THERE)):
            boto_client(server).create_bucket(Bucket=url.removeprefix("s3://"))
        yield strict_server, other


@pytest.fixture(autouse=True)
def file(two_servers, tmp_path, monkeypatch):
    """A file that configures both buckets, named by the environment variable."""
    here, there = (server.endpoint for server in two_servers)
    path = tmp_path / "torchobj.toml"
    path.write_text(f"""
        ["s3://"]
        s3 = {{ endpoint_url = "{here}", profile = "strict" }}

        ["{THERE}"]
        max_attempts = 3
        s3 = {{ endpoint_url = "{there}", profile = "strict" }}
    """)
    monkeypatch.setattr(config_file, "_read", {})
    monkeypatch.setenv("TORCHOBJ_CONFIG", str(path))
    return path


@pytest.fixture(autouse=True)
def objects(file):
    for url, begin in ((HERE, 0), (THERE, 100)):
        for number in range(6):
            Store(url).put(f"data/{number}", bytes([begin + number]))


URLS = [f"{url}/data/{number}" for url in (HERE, THERE) for number in range(6)]
BYTES = [*range(6), *range(100, 106)]


def first_byte(reader):
    return reader.read()[0]


class Named(torchobj.ObjectDataset):
    def __len__(self):
        return len(URLS)

    def objects_at(self, index):
        return [ObjectRef(URLS[index])]

    def build(self, index, readers):
        return readers[0].read()[0]


def test_each_bucket_is_on_its_server(two_servers):
    with pytest.raises(BucketNotFoundError):
        Store(THERE, endpoint_url=two_servers[0].endpoint).get("data/0")
    assert [data[0] for data in torchobj.get_many(URLS)] == BYTES


LOADERS = [
    (torchobj.DataLoader, {}),
    (torchobj.DataLoader, {"num_workers": 2, "multiprocessing_context": "fork"}),
    (torch.utils.data.DataLoader, {"num_workers": 2, "multiprocessing_context": "fork"}),
]
SPAWNED = (torchobj.DataLoader, {"num_workers": 1, "multiprocessing_context": "spawn"})


@pytest.mark.parametrize(("kind", "workers"), [*LOADERS, pytest.param(*SPAWNED, marks=pytest.mark.matrix)])
def test_datasets_read_from_both_in_the_process_and_in_workers(kind, workers):
    named = torchobj.S3MapDataset.from_objects(URLS, region="us-east-1", transform=first_byte)
    both = torch.utils.data.ConcatDataset(
        [torchobj.ObjectMapDataset(f"{url}/data/", transform=first_byte) for url in (HERE, THERE)]
    )
    for data in (named, both, Named()):
        loader = kind(data, batch_size=4, **workers)
        assert [value for batch in loader for value in batch.tolist()] == BYTES


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("url", [HERE, THERE])
def test_checkpoints_and_files_are_written_and_read(url):
    torchobj.save({"a": torch.arange(3)}, f"{url}/saved.pt")
    assert torchobj.load(f"{url}/saved.pt")["a"].tolist() == [0, 1, 2]
    with torchobj.checkpoint.CheckpointManager(f"{url}/run") as manager:
        manager.save(1, {"model": {"a": torch.ones(2)}})
    with torchobj.checkpoint.CheckpointManager(f"{url}/run") as manager:
        assert manager.latest() == 1
    state = {"a": torch.arange(4)}
    torch_dcp.save(state, no_dist=True, storage_writer=torchobj.s3torchconnector.dcp.StorageWriter(f"{url}/dcp"))
    into = {"a": torch.zeros(4, dtype=torch.int64)}
    torch_dcp.load(into, no_dist=True, storage_reader=torchobj.s3torchconnector.dcp.StorageReader(f"{url}/dcp"))
    assert into["a"].tolist() == [0, 1, 2, 3]
    files = torchobj.fsspec.ObjectFileSystem()
    files.pipe(f"{url}/text", b"t")
    with files.open(f"{url}/text") as opened:
        assert (opened.read(), files.cat(f"{url}/text")) == (b"t", b"t")
    found = {info.key.partition("/")[0] for info in Store(url).list()}
    assert found == {"data", "saved.pt", "run", "dcp", "text"}


def test_arguments_of_a_call_override_the_file(two_servers):
    here, there = two_servers
    store = Store(THERE, config=StoreConfig(max_attempts=5))
    assert (store.config.max_attempts, store.config.s3.endpoint_url) == (5, there.endpoint)
    assert store.get("data/0") == bytes([100])
    assert Store(THERE, endpoint_url=here.endpoint).config.max_attempts == 3


def read_in_child(pickled):
    os._exit(0 if pickle.loads(pickled).get("data/1") == bytes([101]) else 1)


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_a_pickled_store_needs_no_file_in_another_process(file, monkeypatch, method):
    pickled = pickle.dumps(Store(THERE))
    monkeypatch.delenv("TORCHOBJ_CONFIG")
    file.unlink()
    child = multiprocessing.get_context(method).Process(target=read_in_child, args=(pickled,))
    child.start()
    child.join(150)
    assert child.exitcode == 0


def make_bucket(server, bucket):
    """Creates a bucket unless another test has."""
    if bucket not in [each["Name"] for each in boto_client(server).list_buckets()["Buckets"]]:
        boto_client(server).create_bucket(Bucket=bucket)


def test_a_prefix_of_a_bucket_can_be_on_another_server(file, two_servers):
    here, there = (server.endpoint for server in two_servers)
    bucket = HERE.removeprefix("s3://")
    make_bucket(two_servers[1], bucket)
    file.write_text(f"""
        ["{HERE}".s3]
        endpoint_url = "{here}"
        profile = "strict"
        ["{HERE}/cold".s3]
        endpoint_url = "{there}"
        profile = "strict"
    """)
    torchobj.load_config(file)
    torchobj.save({"a": 1}, f"{HERE}/cold/x")
    torchobj.save({"a": 2}, f"{HERE}/colder/x")
    with torchobj.open(f"{HERE}/cold/y", "wb") as opened:
        opened.write(b"y")
    there_keys = [info.key for info in Store(HERE, endpoint_url=there).list()]
    assert there_keys == ["cold/x", "cold/y"]
    assert torchobj.get_many([f"{HERE}/cold/y", f"{HERE}/data/1"]) == [b"y", b"\1"]
    assert len(torchobj.ObjectMapDataset(f"{HERE}/cold/")) == 2
    cold = torchobj.ObjectMapDataset.from_objects([f"{HERE}/cold/y"])
    assert cold[0].read() == b"y"
    with torchobj.checkpoint.CheckpointManager(f"{HERE}/cold/run") as manager:
        manager.save(1, {"model": {"a": torch.ones(2)}})
    assert any(info.key.startswith("cold/run/") for info in Store(HERE, endpoint_url=there).list())
    assert not any(info.key.startswith("cold/run/") for info in Store(HERE).list())


class BothParts(torchobj.ObjectDataset):
    """Each sample has an object of a prefix on another server, between two of the bucket itself."""

    def __len__(self):
        return 4

    def objects_at(self, index):
        return [ObjectRef(f"{HERE}/{key}") for key in (f"data/{index}", f"part/{index}", f"data/{index + 1}")]

    def build(self, index, readers):
        return [reader.read()[0] for reader in readers]


@pytest.mark.parametrize(("kind", "workers"), [*LOADERS, pytest.param(*SPAWNED, marks=pytest.mark.matrix)])
def test_one_sample_can_have_objects_of_a_bucket_and_of_a_prefix_on_another_server(file, two_servers, kind, workers):
    here, there = (server.endpoint for server in two_servers)
    make_bucket(two_servers[1], HERE.removeprefix("s3://"))
    file.write_text(f"""
        ["{HERE}".s3]
        endpoint_url = "{here}"
        profile = "strict"
        ["{HERE}/part".s3]
        endpoint_url = "{there}"
        profile = "strict"
    """)
    torchobj.load_config(file)
    other = Store(HERE, endpoint_url=there)
    for number in range(4):
        other.put(f"part/{number}", bytes([200 + number]))
    loader = kind(BothParts(), batch_size=2, collate_fn=list, **workers)
    samples = [sample for batch in loader for sample in batch]
    assert samples == [[number, 200 + number, number + 1] for number in range(4)]


def test_fsspec_uses_the_file(two_servers, fsspec_registry):
    torchobj.fsspec.register()
    with fsspec.open(f"{THERE}/data/2") as opened:
        assert opened.read() == bytes([102])
