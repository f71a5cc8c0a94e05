"""Epochs with a disk cache: the share of its hits, several hosts, every kind of dataset, other servers and bad disks."""

import contextlib
import hashlib
import io
import itertools
import os
import random
import subprocess
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

import torchobj
import torchobj.fsspec
from tests.servers import launch
from tests.support.buckets import new_s3_bucket
from tests.support.disk_caches import new_gets, options, written
from tests.support.ranks import on_one_machine, run_ranks
from torchobj import ObjectRef, _torchobj
from torchobj.shards import TarIndex

COUNT, SIZE = 100, 30_000


def body(number):
    return random.Random(number).randbytes(SIZE)


def with_cache(config, folder, **settings):
    """The configuration with a cache. Hedged reads would be more requests."""
    return config.replaced(cache=options(folder, **settings), hedge=False)


@pytest.fixture
def objects(bucket):
    for number in range(COUNT):
        bucket.write(f"data/{number:03}", body(number))
    return bucket


def key_and_bytes(reader):
    return int(reader.key[-3:]), bytes(reader)


def loader_of(bucket, config, **arguments):
    dataset = torchobj.ObjectMapDataset(f"{bucket.url}/data/", transform=key_and_bytes, config=config)
    return torchobj.DataLoader(dataset, batch_size=10, collate_fn=list, **arguments)


def check(samples):
    assert sorted(samples) == [(number, body(number)) for number in range(COUNT)]


def epoch(loader):
    check([sample for batch in loader for sample in batch])
    written()


def test_a_cache_with_room_for_half_of_the_data_answers_half_of_the_reads(objects, control, tmp_path):
    config = with_cache(objects.config, tmp_path / "all")
    epoch(loader_of(objects, config, shuffle=True))
    all_bytes = _torchobj.CacheFiles(tmp_path / "all").used_bytes()
    config = with_cache(objects.config, tmp_path / "half", max_bytes=all_bytes // 2)
    loader = loader_of(objects, config, shuffle=True)
    new_gets(control)
    for number in range(3):
        epoch(loader)
        sent = new_gets(control)
        assert sent == COUNT if number == 0 else 0.49 * COUNT <= COUNT - sent <= 0.51 * COUNT
    assert 0.49 * all_bytes <= _torchobj.CacheFiles(tmp_path / "half").used_bytes() <= 0.5 * all_bytes


def _hits_of_a_rank(rank, bucket, folder, locality):
    """Number of reads of each epoch that the cache of the host answers; hosts have two ranks and a folder each."""
    on_one_machine(rank % 2, 2)
    dist.init_process_group("gloo")
    config = with_cache(bucket.config, folder / str(rank // 2))
    dataset = torchobj.ObjectMapDataset(f"{bucket.url}/data/", transform=key_and_bytes, config=config)
    sampler = torchobj.ElasticDistributedSampler(dataset, seed=11, locality=locality)
    # With look-ahead a rank reads for the next epoch what the other rank of its host has not read yet.
    loader = torchobj.DataLoader(dataset, batch_size=10, sampler=sampler, collate_fn=list, lookahead=0)
    found, before = [], 0
    for number in range(3):
        sampler.set_epoch(number)
        samples = [sample for batch in loader for sample in batch]
        assert samples == [(index, body(index)) for index, _ in samples] and len(samples) == COUNT // 4
        written()
        dist.barrier()
        hits = torchobj.metrics()["torchobj.cache_hits"]
        found.append(hits - before)
        before = hits
    return found


def test_with_locality_hosts_read_the_second_epoch_from_their_caches(objects, control, tmp_path):
    new_gets(control)
    ranks = run_ranks(_hits_of_a_rank, objects, tmp_path, "host", size=4)
    assert [sum(hits) for hits in zip(*ranks, strict=True)] == [0, COUNT, COUNT]
    assert new_gets(control) == COUNT


def test_without_locality_each_of_two_hosts_has_half_of_the_second_epoch(objects, control, tmp_path):
    new_gets(control)
    ranks = run_ranks(_hits_of_a_rank, objects, tmp_path, None, size=4)
    first, second, third = (sum(hits) / COUNT for hits in zip(*ranks, strict=True))
    assert first == 0 and 0.4 < second < 0.6 and 0.65 < third < 0.85
    assert new_gets(control) == pytest.approx(COUNT * (3 - second - third))


class Halves(torchobj.ObjectDataset):
    """Samples of two ranges of an object."""

    def __init__(self, url, versions, **settings):
        super().__init__(**settings)
        self.url, self.versions = url, versions

    def __len__(self):
        return len(self.versions)

    def objects_at(self, index):
        ends = [0, 9000, SIZE]
        return [
            ObjectRef(f"{self.url}{index:03}", start=begin, end=end, size=SIZE, version=self.versions[index])
            for begin, end in itertools.pairwise(ends)
        ]

    def build(self, index, readers):
        return b"".join(bytes(reader) for reader in readers)


def _tar_samples(bucket, config, folder):
    with tarfile.open(folder / "shard.tar", "w") as tar:
        for number in range(20):
            member = tarfile.TarInfo(f"{number:03}.bin")
            member.size = SIZE
            tar.addfile(member, io.BytesIO(body(number)))
    bucket.write("shards/0.tar", (folder / "shard.tar").read_bytes())
    urls = [f"{bucket.url}/shards/0.tar"]
    TarIndex.build(urls, config=bucket.config).save(folder / "index.parquet")
    dataset = torchobj.TarMapDataset(urls, folder / "index.parquet", config=config)
    return lambda: sorted(bytes(sample["bin"]) for sample in _samples(dataset))


def _samples(dataset):
    """The samples of an epoch of its own order: other neighbours are read with one request."""
    return [
        sample
        for batch in torchobj.DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=list)
        for sample in batch
    ]


def _columns(bucket, config, folder):
    table = pa.table({"number": list(range(2000)), "text": [str(number) for number in range(2000)], "x": [1.5] * 2000})
    pq.write_table(table, folder / "rows.parquet", row_group_size=500)
    bucket.write("rows/0.parquet", (folder / "rows.parquet").read_bytes())
    dataset = torchobj.ParquetIterableDataset(f"{bucket.url}/rows/", columns=["number", "text"], config=config)
    return lambda: sorted((row["number"], row["text"]) for row in dataset)


def _versions(bucket):
    return [info.version for info in torchobj.Store(bucket.url, config=bucket.config).list("data/")]


def _ranges(bucket, config, folder):
    dataset = Halves(f"{bucket.url}/data/", _versions(bucket), config=config)
    return lambda: sorted(_samples(dataset))


def _many(bucket, config, folder):
    refs = [
        ObjectRef(f"{bucket.url}/data/{number:03}", size=SIZE, version=version)
        for number, version in enumerate(_versions(bucket))
    ]
    return lambda: [bytes(found) for found in torchobj.get_many(refs, config=config)]


KINDS = {"TarMapDataset": _tar_samples, "Parquet": _columns, "ObjectDataset": _ranges, "get_many": _many}
RIGHT = {
    "TarMapDataset": lambda: sorted(map(body, range(20))),
    "Parquet": lambda: [(number, str(number)) for number in range(2000)],
    "ObjectDataset": lambda: sorted(map(body, range(COUNT))),
    "get_many": lambda: list(map(body, range(COUNT))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_pass_sends_no_request(objects, control, tmp_path, kind):
    read = KINDS[kind](objects, with_cache(objects.config, tmp_path / "cache"), tmp_path)
    new_gets(control)
    for number in range(3):
        assert read() == RIGHT[kind]()
        written()
        assert (new_gets(control) == 0) == (number > 0)


#: Two contents of 128 bytes with the same MD5 (Wang and Yu, "How to Break MD5 and Other Hash Functions", 2005), which is
#: the ETag of an object.
FIRST = bytes.fromhex(
    "d131dd02c5e6eec4693d9a0698aff95c2fcab58712467eab4004583eb8fb7f8955ad340609f4b30283e488832571415a"
    "085125e8f7cdc99fd91dbdf280373c5bd8823e3156348f5bae6dacd436c919c6dd53e2b487da03fd02396306d248cda0"
    "e99f33420f577ee8ce54b67080a80d1ec69821bcb6a8839396f9652b6ff72a70"
)
SECOND = bytes(byte ^ (0x80 if at in {19, 45, 59, 83, 109, 123} else 0) for at, byte in enumerate(FIRST))


def test_two_servers_with_equal_urls_etags_and_lengths_keep_their_bytes_apart(strict_server, credentials, tmp_path):
    assert hashlib.md5(FIRST).digest() == hashlib.md5(SECOND).digest()
    with launch.start("strict") as other:
        jobs, infos = [], []
        for server, content in ((strict_server, FIRST), (other, SECOND)):
            bucket = new_s3_bucket("cache-of-two", "strict", server)
            bucket.write("data/000", content)
            config = with_cache(bucket.config, tmp_path / "cache")
            jobs.append((torchobj.ObjectMapDataset(f"{bucket.url}/data/", transform=bytes, config=config), content))
            [info] = torchobj.Store(bucket.url, config=bucket.config).list("data/")
            infos.append((bucket.url, info.version, info.size))
        assert infos[0] == infos[1]
        for _ in range(2):
            for dataset, content in jobs:
                assert dataset[0] == content
                written()
        assert torchobj.metrics()["torchobj.cache_hits"] >= 2


@contextlib.contextmanager
def mounted(folder, options):
    folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("cannot mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("options", ["size=1m", "size=64m,nr_inodes=100"])
def test_a_disk_that_is_full_during_an_epoch_ends_no_epoch(objects, control, tmp_path, options):
    with mounted(tmp_path / "disk", options):
        config = with_cache(objects.config, tmp_path / "disk" / "cache")
        loader = loader_of(objects, config, shuffle=True)
        new_gets(control)
        for number in range(3):
            epoch(loader)
            sent = new_gets(control)
            assert sent == COUNT if number == 0 else 0 < sent < COUNT
        # What is on the disk stays right when another program fills it.
        with contextlib.suppress(OSError):
            (tmp_path / "disk" / "other").write_bytes(bytes(64 << 20))
        epoch(loader)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_disk_that_becomes_read_only_during_an_epoch_ends_no_epoch(objects, control, tmp_path, caplog):
    with mounted(tmp_path / "disk", "size=64m"):
        config = with_cache(objects.config, tmp_path / "disk" / "cache")
        loader = loader_of(objects, config, shuffle=True, lookahead=0)
        samples = []
        for number, batch in enumerate(loader):
            samples += batch
            if number == 4:
                written()
                subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        check(samples)
        written()
        epoch(loader)
        assert caplog.text.count("writes no more to the disk cache") == 1
