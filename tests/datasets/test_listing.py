"""A dataset of a manifest lists nothing, is the same set everywhere, and notices what has changed since."""

import multiprocessing
import os
import pickle

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX, often
from tests.support.ranks import run_ranks
from torchobj import exceptions

# test_each_store.py reads from GCS in each run.
pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

COUNT = 20

#: Large enough that the manifest is in shared memory.
MANY = 200_000


def body(number):
    return f"body {number}".encode() * number


def key_and_bytes(reader):
    return reader.key, reader.read()


def read(reader):
    return reader.read()


@pytest.fixture
def filled(bucket):
    for number in range(COUNT):
        bucket.write(f"train/{number:02}.bin", body(number))
    return bucket


@pytest.fixture
def manifest(filled):
    return torchobj.Manifest.from_prefix(f"{filled.url}/train/", config=filled.config)


def of_manifest(bucket, manifest, **settings):
    return bucket.map_dataset.from_manifest(manifest, config=bucket.config, **{"transform": read} | settings)


def large():
    return torchobj.Manifest.from_urls(f"s3://bucket/train/{number:012}.jpg" for number in range(MANY))


@pytest.mark.providers("s3", "gs")
def test_nothing_is_listed_and_a_file_is_loaded_at_the_first_use(filled, manifest, control):
    url = f"{filled.url}/sets/train.parquet"
    manifest.save(url, config=filled.config)
    filled.write("train/added.bin", b"x")
    filled.remove("train/05.bin")
    control.clear_requests()
    samples = of_manifest(filled, url)
    assert control.requests() == []
    assert "not loaded yet" in repr(samples)
    assert len(samples) == COUNT
    assert samples.manifest == manifest
    assert (samples[7], samples[-1]) == (body(7), body(COUNT - 1))
    iterable = filled.iterable_dataset.from_manifest(manifest, config=filled.config, transform=read, on_error="skip")
    assert len(list(iterable)) == COUNT - 1
    operations = [request.operation for request in control.requests()]
    assert not [operation for operation in operations if "List" in operation]
    with pytest.raises(exceptions.ObjectNotFoundError, match="train/05.bin"):
        samples[5]


def test_a_changed_object_is_an_error(filled, manifest):
    filled.write("train/03.bin", b"longer than before" * 9)
    filled.write("train/04.bin", body(4).upper())
    samples = of_manifest(filled, manifest)
    for number in (3, 4):
        with pytest.raises(exceptions.ObjectChangedError, match=f"train/0{number}.bin"):
            samples[number]
    assert samples[5] == body(5)


@pytest.mark.parametrize("lookahead", [0, None])
def test_a_changed_object_is_accepted_on_request(filled, manifest, lookahead):
    changed = {3: b"longer than before" * 9, 4: body(4).upper(), 19: b"s", 0: b"not empty", 18: b""}
    for number, data in changed.items():
        filled.write(f"train/{number:02}.bin", data)
    samples = of_manifest(filled, manifest, on_change="accept")
    expected = [changed.get(number, body(number)) for number in range(COUNT)]
    assert samples.__getitems__(list(range(COUNT))) == expected
    loader = torchobj.DataLoader(samples, batch_size=3, collate_fn=list, lookahead=lookahead)
    assert [data for batch in loader for data in batch] == expected
    iterable = filled.iterable_dataset.from_manifest(manifest, config=filled.config, transform=read, on_change="accept")
    assert list(iterable) == expected


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.matrix), "forkserver"])
def test_workers_notice_or_accept_changed_objects(filled, manifest, context):
    filled.write("train/04.bin", b"longer than before" * 9)
    accepting = of_manifest(filled, manifest, on_change="accept")
    settings = {"batch_size": 4, "collate_fn": list, "num_workers": 1, "multiprocessing_context": context}
    [*_, before, last] = [
        data for batch in torchobj.DataLoader(Subset(accepting, [1, 4]), **settings) for data in batch
    ]
    assert (before, last) == (body(1), b"longer than before" * 9)
    with pytest.raises(exceptions.ObjectChangedError, match="train/04.bin"):
        list(torchobj.DataLoader(Subset(of_manifest(filled, manifest), [1, 4]), **settings))


@pytest.mark.parametrize("kind", ["range_based", "dcp_optimized"])
def test_readers_on_demand_notice_or_accept_changed_objects(filled, manifest, kind):
    constructor = getattr(torchobj.S3ReaderConstructor, kind)()
    filled.write("train/03.bin", b"longer than before" * 9)
    samples = of_manifest(filled, manifest, reader_constructor=constructor)
    with pytest.raises(exceptions.ObjectChangedError, match="train/03.bin"):
        samples[3]
    assert samples[4] == body(4)
    accepting = of_manifest(filled, manifest, reader_constructor=constructor, on_change="accept")
    assert accepting[3] == b"longer than before" * 9


def test_invalid_arguments_are_named(filled, manifest):
    for wrong in ({"on_change": "ignore"}, {"on_error": "skip"}, {"transform": 3}):
        with pytest.raises(exceptions.ConfigError, match=f"{next(iter(wrong))}="):
            of_manifest(filled, manifest, **wrong)
    for wrong in (3, None, b"bytes", ["s3://b/k"]):
        with pytest.raises(exceptions.ConfigError, match="manifest="):
            of_manifest(filled, wrong)
    other = torchobj.Manifest.from_urls(["memory://elsewhere/k"])
    with pytest.raises(exceptions.ConfigError, match="scheme 'memory', expected"):
        torchobj.S3MapDataset.from_manifest(other)
    other.save(f"{filled.url}/other", config=filled.config)
    samples = of_manifest(filled, f"{filled.url}/other")
    with pytest.raises(exceptions.ManifestError, match="objects of this machine.*'memory://elsewhere'"):
        len(samples)
    other.save("memory://manifests/other")
    samples = torchobj.S3MapDataset.from_manifest("memory://manifests/other")
    with pytest.raises(exceptions.ConfigError, match="scheme 'memory', expected"):
        len(samples)
    filled.write("text", b"no manifest")
    with pytest.raises(exceptions.ManifestError, match="text: not a Parquet file"):
        len(of_manifest(filled, f"{filled.url}/text"))


def test_a_dataset_of_any_scheme_takes_a_manifest_of_several_stores(filled, manifest):
    torchobj.Store("memory://beside").put("k", b"memory")
    urls = [manifest.url(2), "memory://beside/k"]
    mixed = torchobj.ObjectMapDataset.from_manifest(
        torchobj.Manifest.from_urls(urls), transform=read, config=filled.config
    )
    assert list(mixed) == [body(2), b"memory"]


def loader_of(samples, **settings):
    return torchobj.DataLoader(samples, batch_size=3, shuffle=True, collate_fn=list, **settings)


def test_a_state_is_refused_by_a_loader_of_another_manifest(filled, manifest):
    torch.manual_seed(7)
    loader = loader_of(of_manifest(filled, manifest))
    whole = iter(loader)
    next(whole)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    assert state["manifest"] == manifest.digest()
    rest = list(whole)
    again = loader_of(of_manifest(filled, torchobj.Manifest(bytes(manifest))))
    again.load_state_dict(state)
    assert list(again) == rest
    filled.write("train/19.bin", b"changed")
    other = torchobj.Manifest.from_prefix(f"{filled.url}/train/", config=filled.config)
    for samples in (of_manifest(filled, other), filled.map_dataset(f"{filled.url}/train/", config=filled.config)):
        with pytest.raises(exceptions.ConfigError, match=f"manifest='{manifest.digest()}': digest in the state"):
            loader_of(samples).load_state_dict(state)


def test_a_state_without_a_manifest_is_accepted_as_before(filled, manifest):
    samples = filled.map_dataset(f"{filled.url}/train/", config=filled.config, transform=read)
    state = loader_of(samples).state_dict()
    assert "manifest" not in state
    for current in (samples, of_manifest(filled, manifest)):
        loader = loader_of(current)
        loader.load_state_dict(state)
        assert len(list(loader)) == 7


def test_the_manifests_within_wrappers_are_part_of_the_state(filled, manifest):
    few = torchobj.Manifest.from_urls([manifest.url(0)])
    both = ConcatDataset([Subset(of_manifest(filled, manifest), [1, 2]), of_manifest(filled, few)])
    state = loader_of(both).state_dict()
    assert state["manifest"] == f"{manifest.digest()}+{few.digest()}"
    with pytest.raises(exceptions.ConfigError, match="manifest="):
        loader_of(both.datasets[0]).load_state_dict(state)


@pytest.mark.parametrize("in_loader", [False, True])
def test_a_state_of_an_iterable_dataset_is_refused_by_another_manifest(filled, manifest, in_loader):
    def start(manifest):
        samples = filled.iterable_dataset.from_manifest(manifest, config=filled.config, transform=read)
        return torchobj.DataLoader(samples, batch_size=2, collate_fn=list) if in_loader else samples

    first = start(manifest)
    iterator = iter(first)
    next(iterator)
    state, rest = first.state_dict(), list(iterator)
    again = start(manifest)
    again.load_state_dict(state)
    assert list(again) == rest
    changed = [manifest.url(index) for index in range(COUNT)]
    other = start(torchobj.Manifest.from_urls(changed))
    with pytest.raises(exceptions.ConfigError, match=r"manifest=|cannot be resumed"):
        other.load_state_dict(state)
        next(iter(other))


def inode(manifest):
    return None if manifest.descriptor() is None else os.fstat(manifest.descriptor()).st_ino


class Inodes(torch.utils.data.Dataset):
    """Returns the file of its manifest and that of a dataset, as its process sees it."""

    def __init__(self, samples):
        self.samples, self.manifest = samples, samples.manifest

    def __len__(self):
        return 2

    def __getitem__(self, index):
        manifest = self.samples.manifest
        assert len(manifest) == MANY
        return inode(manifest), inode(self.manifest), manifest.url(MANY - 1), manifest.digest()


@pytest.mark.providers("s3")
@pytest.mark.parametrize(
    ("context", "workers"),
    often(2, [("fork", 2), ("forkserver", 2), ("spawn", 1), ("spawn", 2)]),
)
def test_workers_map_the_memory_of_their_parent(bucket, context, workers):
    manifest = large()
    samples = bucket.map_dataset.from_manifest(manifest, config=bucket.config)
    loader = DataLoader(Inodes(samples), num_workers=workers, collate_fn=list, multiprocessing_context=context)
    expected = (inode(manifest), inode(manifest), manifest.url(MANY - 1), manifest.digest())
    assert inode(manifest) is not None
    assert [result for batch in loader for result in batch] == [expected, expected]


@pytest.mark.providers("s3")
def test_elsewhere_a_manifest_is_pickled_by_value(bucket):
    manifest = large()
    samples = bucket.map_dataset.from_manifest(manifest, config=bucket.config)
    copy = pickle.loads(pickle.dumps(samples))
    assert copy.manifest == manifest
    assert inode(copy.manifest) != inode(manifest)
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    small = torchobj.Manifest.from_urls(["s3://b/k"])
    queue.put(small)
    assert queue.get() == small


def loaded_by_ranks(rank, bucket, config, url):
    torch.distributed.init_process_group("gloo")
    samples = torchobj.ObjectMapDataset.from_manifest(url, config=config, transform=read)
    if rank == 0:
        len(samples)
        torchobj.Manifest.from_urls(["s3://other/k"]).save(url, config=config)
    torch.distributed.barrier()
    return len(samples), samples.manifest.digest()


@pytest.mark.providers("s3")
def test_rank_0_loads_a_file_for_all_ranks(filled, manifest):
    url = f"{filled.url}/sets/train.parquet"
    manifest.save(url, config=filled.config)
    results = run_ranks(loaded_by_ranks, filled.name, filled.config, url)
    assert results == [(COUNT, manifest.digest())] * 2


def different_by_rank(rank, urls):
    torch.distributed.init_process_group("gloo")
    samples = torchobj.ObjectMapDataset.from_manifest(torchobj.Manifest.from_urls(urls[: rank + 1]))
    return len(samples)


@pytest.mark.providers("s3")
def test_ranks_with_different_manifests_are_an_error(filled):
    results = run_ranks(different_by_rank, [f"{filled.url}/a", f"{filled.url}/b"])
    assert results[0] == 1
    name, text, _ = results[1]
    assert name == exceptions.ManifestMismatchError.__name__
    assert "rank 1 was given 2 objects, rank 0 was given 1" in text
    assert "URL of one manifest" in text


CONFIG = torchobj.StoreConfig(
    s3=torchobj.S3Options(region="eu-west-1", endpoint_url="http://s3.example"),
    gcs=torchobj.GCSOptions(endpoint_url="http://gcs.example"),
)
OF_S3, OF_GCS, OF_NEITHER = ("eu-west-1", "http://s3.example"), (None, "http://gcs.example"), (None, None)


@pytest.mark.parametrize("kind", [torchobj.ObjectMapDataset, torchobj.ObjectIterableDataset])
@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        (["s3://b/x/"], OF_S3),
        (["gs://b/x/"], OF_GCS),
        (["gcs://b/x/"], OF_GCS),
        (["file:///x/"], OF_NEITHER),
        (["memory://b/x/"], OF_NEITHER),
        (["s3://b/a", "gs://b/a"], OF_S3),
        (["gs://b/a", "memory://b/a"], OF_GCS),
        (["file:///x/a"], OF_NEITHER),
        ([], OF_NEITHER),
    ],
)
def test_region_and_endpoint_are_those_of_the_objects(kind, urls, expected):
    is_prefix = len(urls) == 1 and urls[0].endswith("/")
    data = kind(urls[0], config=CONFIG) if is_prefix else kind.from_objects(urls, config=CONFIG)
    assert (data.region, data.endpoint) == expected
    if urls and not is_prefix:
        given = kind.from_manifest(torchobj.Manifest.from_urls(urls), config=CONFIG)
        assert (given.region, given.endpoint) == expected


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("gs://b/m.parquet", OF_GCS),
        ("gcs://b/m.parquet", OF_GCS),
        ("s3://b/m", OF_S3),
        ("memory://b/m", OF_NEITHER),
        ("/folder/m", OF_NEITHER),
    ],
)
def test_until_a_manifest_is_loaded_its_file_stands_for_its_objects(file, expected):
    data = torchobj.ObjectMapDataset.from_manifest(file, config=CONFIG)
    assert (data.region, data.endpoint) == expected
    ours = torchobj.S3MapDataset.from_manifest(file, config=CONFIG)
    assert (ours.region, ours.endpoint) == OF_S3


def test_a_loaded_manifest_has_the_region_of_its_objects(tmp_path):
    torchobj.Manifest.from_urls(["s3://b/a"]).save(tmp_path / "m")
    data = torchobj.ObjectMapDataset.from_manifest(tmp_path / "m", config=CONFIG)
    len(data)
    assert (data.region, data.endpoint) == OF_S3
