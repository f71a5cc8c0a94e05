"""webdataset reads and writes buckets with torchobj, in workers of any start method."""

import contextlib
import copyreg
import gzip
import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from torch.utils.data import DataLoader
from webdataset.cache import FileCache
from webdataset.tariterators import group_by_keys, tar_file_expander

import torchobj.wds
from tests.support.long_tables import GCS_IN_MATRIX, often
from torchobj import ShardWriter, exceptions

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)


@pytest.fixture(autouse=True)
def registrations():
    """Removes what a test registers."""
    schemes, reducers = dict(webdataset.gopen_schemes), dict(copyreg.dispatch_table)
    names = ("__exit__", "write", "close", "finish")
    writers = (webdataset.TarWriter, webdataset.ShardWriter)
    methods = [(each, name, vars(each)[name]) for each in writers for name in names if name in vars(each)]
    yield
    for table, before in ((webdataset.gopen_schemes, schemes), (copyreg.dispatch_table, reducers)):
        table.clear()
        table.update(before)
    for method in methods:
        setattr(*method)


@pytest.fixture
def shards(bucket):
    """Writes 4 shards of 8 samples. Returns their URL with braces, and the samples as webdataset reads local files."""
    with ShardWriter(f"{bucket.url}/s-%06d.tar", maxcount=8, index=False, config=bucket.config) as writer:
        for number in range(32):
            writer.write({"__key__": f"{number:04d}", "bin": os.urandom(number * 5000), "cls": number})
    urls = [f"{bucket.url}/s-{number:06d}.tar" for number in range(4)]
    streams = [{"url": url, "stream": io.BytesIO(bucket.body(url.rpartition("/")[2]))} for url in urls]
    return f"{bucket.url}/s-{{000000..000003}}.tar", list(group_by_keys(tar_file_expander(streams)))


def in_order(samples):
    plain = [{name: value for name, value in sample.items() if name != "__local_path__"} for sample in samples]
    return sorted(plain, key=lambda sample: sample["__key__"])


@pytest.mark.providers("s3", "gs")
def test_samples_are_those_of_local_files(bucket, shards):
    torchobj.wds.register(bucket.config)
    url, expected = shards
    assert list(webdataset.WebDataset(url, shardshuffle=False)) == expected


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.matrix), "forkserver"])
def test_workers_of_every_start_method_read(bucket, shards, context):
    torchobj.wds.register(bucket.config)
    url, expected = shards
    dataset = webdataset.WebDataset(url, shardshuffle=False)
    loader = DataLoader(dataset, num_workers=2, batch_size=None, multiprocessing_context=context)
    assert in_order(loader) == expected


@pytest.mark.parametrize(("context", "workers"), often(1, [("fork", 2), ("spawn", 1), ("spawn", 2)]))
def test_pipelines_of_stages_read_in_workers(bucket, shards, context, workers):
    torchobj.wds.register(bucket.config)
    url, expected = shards
    dataset = webdataset.DataPipeline(
        webdataset.SimpleShardList(url), webdataset.split_by_worker, webdataset.tarfile_to_samples()
    )
    loader = DataLoader(dataset, num_workers=workers, batch_size=None, multiprocessing_context=context)
    assert in_order(loader) == expected


def test_shards_are_cached_as_files(bucket, shards, tmp_path):
    torchobj.wds.register(bucket.config)
    cache = pickle.loads(pickle.dumps(FileCache(str(tmp_path), validator=None)))
    for number in range(4):
        path = cache.get_file(f"{bucket.url}/s-{number:06d}.tar")
        assert Path(path).read_bytes() == bucket.body(f"s-{number:06d}.tar")


def test_compressed_shards_are_read(bucket):
    torchobj.wds.register(bucket.config)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    bucket.write("a.tar.gz", gzip.compress(data.getvalue()))
    [sample] = webdataset.WebDataset(f"{bucket.url}/a.tar.gz", shardshuffle=False, empty_check=False)
    assert (sample["__key__"], sample["txt"]) == ("a", b"")


@pytest.mark.providers("s3", "gs")
def test_a_missing_shard_is_an_error_or_is_skipped_by_the_handler(bucket, shards):
    torchobj.wds.register(bucket.config)
    url, expected = shards
    urls = [url.replace("{000000..000003}", number) for number in ("000000", "000009", "000001")]
    with pytest.raises(exceptions.ObjectNotFoundError, match="000009"):
        list(webdataset.WebDataset(urls, shardshuffle=False))
    dataset = webdataset.WebDataset(urls, shardshuffle=False, handler=webdataset.ignore_and_continue)
    assert [sample["__key__"] for sample in dataset] == [sample["__key__"] for sample in expected[:16]]


def test_pickled_stages_register_in_a_process_that_has_not(bucket):
    torchobj.wds.register(bucket.config, schemes=("s3",))
    before = webdataset.gopen_schemes["s3"]
    pickled = pickle.dumps(webdataset.WebDataset("s3://b/{0..1}.tar", shardshuffle=False))
    del webdataset.gopen_schemes["s3"]
    pickle.loads(pickled)
    assert webdataset.gopen_schemes["s3"] == before
    assert webdataset.gopen_schemes["gs"].__name__ == "gopen_gsutil"


def test_unpickling_keeps_the_registration_of_the_process(bucket):
    torchobj.wds.register()
    pickled = pickle.dumps(webdataset.WebDataset("s3://b/{0..1}.tar", shardshuffle=False))
    torchobj.wds.register(bucket.config)
    pickle.loads(pickled)
    assert webdataset.gopen_schemes["s3"].config is bucket.config


@pytest.mark.providers("s3", "gs")
def test_shards_of_webdatasets_writer_appear_when_they_are_complete(bucket):
    torchobj.wds.register(bucket.config)
    done = []
    with webdataset.ShardWriter(f"{bucket.url}/w-%d.tar", maxcount=2, verbose=0, post=done.append) as writer:
        for number in range(5):
            writer.write({"__key__": str(number), "npy": np.arange(number)})
            assert bucket.keys() == [f"w-{shard}.tar" for shard in range(number // 2)]
    assert done == [f"{bucket.url}/w-{shard}.tar" for shard in range(3)]
    samples = list(webdataset.WebDataset(f"{bucket.url}/w-{{0..2}}.tar", shardshuffle=False).decode())
    assert [list(sample["npy"]) for sample in samples] == [list(range(number)) for number in range(5)]


@pytest.mark.parametrize("name", ["w.tar", "w.tgz"])
def test_an_exception_in_the_block_of_webdatasets_writers_leaves_no_open_shard(bucket, name):
    torchobj.wds.register(bucket.config)
    done = []

    def fail(writer):
        with writer:
            writer.write({"__key__": "1", "bin": b"1"})
            writer.write({"__key__": "2", "bin": os.urandom(17 << 20)})
            raise LookupError("producer")

    with pytest.raises(LookupError, match="producer"):
        fail(webdataset.TarWriter(f"{bucket.url}/{name}"))
    assert bucket.keys() == []
    with pytest.raises(LookupError, match="producer"):
        fail(webdataset.ShardWriter(f"{bucket.url}/%d-{name}", maxcount=1, verbose=0, post=done.append))
    assert bucket.keys() == [f"0-{name}"]
    assert done == [f"{bucket.url}/0-{name}"]
    assert not bucket.uploads()


@pytest.mark.parametrize("wrong", [{"bin": 3}, {"_a": b"1" * 20000, "_b": 3}])
def test_a_write_that_fails_leaves_no_shard_when_the_writer_is_closed(bucket, wrong):
    torchobj.wds.register(bucket.config)
    done = []
    settings = {"encoder": False, "keep_meta": True}
    for writer in (
        webdataset.TarWriter(f"{bucket.url}/w.tar", **settings),
        webdataset.ShardWriter(f"{bucket.url}/%d.tar", verbose=0, post=done.append, **settings),
    ):
        with pytest.raises((TypeError, ValueError)), contextlib.closing(writer):
            writer.write({"__key__": "1", "bin": b"1"})
            writer.write({"__key__": "2", **wrong})
    assert (bucket.keys(), done) == ([], [])
    assert not bucket.uploads()


def test_a_sample_whose_exception_is_handled_does_not_discard_the_others(bucket):
    torchobj.wds.register(bucket.config)
    writer = webdataset.TarWriter(f"{bucket.url}/w.tar", encoder=False)
    writer.write({"__key__": "1", "bin": b"1"})
    with pytest.raises(ValueError, match="doesn't map to a bytes"):
        writer.write({"__key__": "2", "bin": 3})
    writer.close()
    samples = webdataset.WebDataset(f"{bucket.url}/w.tar", shardshuffle=False)
    assert [sample["__key__"] for sample in samples] == ["1"]


def test_a_shard_with_part_of_a_sample_is_not_created(bucket):
    torchobj.wds.register(bucket.config)
    writer = webdataset.TarWriter(f"{bucket.url}/w.tar", encoder=False, keep_meta=True)
    with pytest.raises(TypeError):
        writer.write({"__key__": "1", "_a": b"1", "_b": 3})
    with pytest.raises(ValueError, match=r"w\.tar: not created: a sample was written in part"):
        writer.close()
    assert bucket.keys() == []


def test_an_exception_leaves_local_shards_as_webdataset_writes_them(bucket, tmp_path):
    torchobj.wds.register(bucket.config)
    with pytest.raises(LookupError), webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "1", "bin": b"1"})
        raise LookupError
    assert tarfile.is_tarfile(tmp_path / "a.tar")


@pytest.mark.providers("s3", "gs")
def test_errors_of_the_store_are_raised_when_the_shard_is_closed(bucket, control):
    torchobj.wds.register(bucket.config)
    control.faults({"operation": "PutObject", "action": {"status": 403, "code": "AccessDenied"}})
    writer = webdataset.TarWriter(f"{bucket.url}/w.tar")
    writer.write({"__key__": "1", "bin": b"1"})
    with pytest.raises(exceptions.AccessDeniedError, match=r"w\.tar"):
        writer.close()
    assert bucket.keys() == []


def test_invalid_arguments_are_refused(bucket):
    for schemes in (("ftp",), "s3", ["s3"]):
        with pytest.raises(exceptions.ConfigError, match="schemes=.*must be a tuple of s3 and gs"):
            torchobj.wds.register(schemes=schemes)
    with pytest.raises(exceptions.ConfigError, match="config=<class 'str'>"):
        torchobj.wds.register("x")
    assert "s3" not in webdataset.gopen_schemes
    torchobj.wds.register(bucket.config)
    with pytest.raises(exceptions.ConfigError, match="mode='ab': must be rb or wb"):
        webdataset.gopen_schemes["s3"]("s3://b/k", "ab")
