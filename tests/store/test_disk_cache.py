"""The disk cache: the second epoch sends no request, whatever happens to its files and processes; checkpoints pass by."""

import contextlib
import io
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import torchobj
from tests.support import warm_python
from tests.support.disk_caches import COUNT, body, disk_bytes, options, written
from tests.support.long_tables import GCS_IN_MATRIX
from torchobj import CacheOptions, _torchobj
from torchobj.config import config_file
from torchobj.exceptions import ConfigError
from torchobj.shards import TarIndex


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def config(bucket, cache):
    """The configuration of the bucket, with a cache. Hedged reads would be more requests."""
    for number in range(COUNT):
        bucket.write(f"data/k{number:02}", body(number))
    return bucket.config.replaced(cache=options(cache), hedge=False)


@pytest.fixture
def gets(control):
    """Returns the number of reads of objects since the last call."""

    def count():
        number = sum(request.method == "GET" and bool(request.key) for request in control.requests())
        control.clear_requests()
        return number

    return count


def size_of(reader):
    return len(bytes(reader))


def key_and_bytes(reader):
    return int(reader.key[-2:]), bytes(reader)


def epoch(loader):
    """Reads an epoch and compares it; returns the number of samples."""
    samples = [sample for batch in loader for sample in batch]
    assert sorted(samples) == [(number, body(number)) for number in range(COUNT)]
    written()
    return len(samples)


def loader_of(bucket, config, **arguments):
    dataset = torchobj.ObjectMapDataset(f"{bucket.url}/data/", transform=key_and_bytes, config=config)
    return torchobj.DataLoader(dataset, batch_size=7, shuffle=True, collate_fn=list, **arguments)


@pytest.mark.providers("s3", GCS_IN_MATRIX)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.matrix)])
def test_the_second_shuffled_epoch_sends_no_request(bucket, config, cache, gets, workers):
    loader = loader_of(bucket, config, num_workers=workers)
    before = torchobj.metrics()
    gets()
    epoch(loader)
    assert gets() == COUNT
    hits = loader.stats().cache_hits
    for _ in range(2):
        epoch(loader)
    assert gets() == 0
    stats = loader.stats()
    assert stats.cache_hits - hits == 2 * COUNT and stats.cache_hit_bytes > 0
    assert stats.retries == 0 and "the disk cache (" in loader.report()
    found = torchobj.metrics()
    # Those of the process: other tests damage files.
    admitted, damaged = (found[name] - before[name] for name in ("torchobj.cache_admitted", "torchobj.cache_damaged"))
    assert admitted >= COUNT and damaged == 0
    counts = {(Path(file).stat().st_mode & 0o777) for file in cache.rglob("*")}
    assert counts == {0o700, 0o600}


def test_half_of_the_data_is_read_from_half_of_the_space(bucket, config, cache, gets):
    for number in range(200):
        bucket.write(f"even/{number:03}", bytes([number]) * 10_000)
    config = config.replaced(cache=options(cache, max_bytes=1 << 20))
    # 85 files of 12 KiB.
    dataset = torchobj.ObjectMapDataset(f"{bucket.url}/even/", transform=bytes, config=config)
    loader = torchobj.DataLoader(dataset, batch_size=20, shuffle=True, collate_fn=list)
    gets()
    for number in range(3):
        assert sum(map(len, loader)) == 200
        written()
        assert gets() == (200 - (1 << 20) // (12 << 10) if number else 200)
    files = [file for file in cache.rglob("*") if file.is_file() and file.name != "usage"]
    assert sum(file.stat().st_blocks * 512 for file in files) <= 1 << 20


def test_other_processes_of_the_host_share_the_cache(bucket, config, cache, gets):
    epoch(loader_of(bucket, config))
    gets()
    child = f"""
import pickle, torchobj
config = pickle.loads({pickle.dumps(config)!r})
dataset = torchobj.ObjectMapDataset({bucket.url + "/data/"!r}, transform=bytes, config=config)
print(sum(len(dataset[number]) for number in range(len(dataset))), torchobj.metrics()["torchobj.cache_hits"])
"""
    total, hits = warm_python.run(["-c", child], check=True).stdout.split()
    assert (int(total), int(hits)) == (sum(len(body(number)) for number in range(COUNT)), COUNT)
    assert gets() == 0


def test_another_endpoint_does_not_get_the_files_of_the_first(bucket, config, cache, gets):
    epoch(loader_of(bucket, config))
    gets()
    endpoint = config.s3.endpoint_url.replace("127.0.0.1", "localhost")
    assert endpoint != config.s3.endpoint_url
    epoch(loader_of(bucket, config.replaced(s3=config.s3.replaced(endpoint_url=endpoint))))
    assert gets() == COUNT


def test_a_replaced_object_is_read_again(bucket, config, cache):
    epoch(loader_of(bucket, config))
    bucket.write("data/k07", b"x" * len(body(7)))
    dataset = torchobj.ObjectMapDataset(f"{bucket.url}/data/", transform=bytes, config=config)
    assert dataset[7] == b"x" * len(body(7)) and dataset[8] == body(8)


def test_get_many_reads_named_versions_from_the_cache(bucket, config, cache, gets):
    infos = list(torchobj.Store(bucket.url, config=config).list("data/"))
    refs = [torchobj.ObjectRef(f"{bucket.url}/{info.key}", size=info.size, version=info.version) for info in infos]
    torchobj.get_many(refs, config=config)
    written()
    gets()
    assert [bytes(found) for found in torchobj.get_many(refs, config=config)] == [body(n) for n in range(COUNT)]
    assert gets() == 0


def test_tar_shards_are_streamed_and_read_in_any_order_from_the_cache(bucket, config, cache, gets, tmp_path):
    for shard in range(2):
        with tarfile.open(tmp_path / "shard.tar", "w") as file:
            for number in range(shard * 30, shard * 30 + 30):
                member = tarfile.TarInfo(f"{number:02}.bin")
                member.size = len(body(number))
                file.addfile(member, io.BytesIO(body(number)))
        bucket.write(f"shards/{shard}.tar", (tmp_path / "shard.tar").read_bytes())
    urls = [f"{bucket.url}/shards/{shard}.tar" for shard in range(2)]
    TarIndex.build(urls, config=bucket.config).save(tmp_path / "index.parquet")
    dataset = torchobj.TarMapDataset(urls, tmp_path / "index.parquet", config=config)
    stream = torchobj.TarIterableDataset(urls, config=config, shuffle_shards=False)
    for epoch in range(2):
        # One at a time: what is read with one request may differ between epochs.
        found = [dataset[number]["bin"] for number in torch.randperm(COUNT).tolist()]
        assert sorted(map(bytes, found)) == sorted(map(body, range(COUNT)))
        assert [bytes(sample["bin"]) for sample in stream] == [body(number) for number in range(COUNT)]
        written()
        assert gets() > 0 if epoch == 0 else gets() == 0


def test_checkpoints_are_neither_read_from_the_cache_nor_kept_in_it(bucket, config, cache, gets):
    state = {"w": torch.arange(3_000_000, dtype=torch.float32)}
    torchobj.save(state, f"{bucket.url}/run/last.pt", config=config)
    manager = torchobj.CheckpointManager(f"{bucket.url}/steps", config=config)
    manager.save(1, state)
    sent = []
    for _ in range(2):
        gets()
        assert torch.equal(torchobj.load(f"{bucket.url}/run/last.pt", config=config)["w"], state["w"])
        with torchobj.open(f"{bucket.url}/run/last.pt", config=config) as file:
            torch.load(file)
        target = {"w": torch.zeros(3_000_000)}
        manager.restore(into=target)
        assert torch.equal(target["w"], state["w"])
        sent.append(gets())
    assert sent[0] == sent[1] > 0
    assert list(_torchobj.CacheFiles(cache)) == []


def test_objects_encrypted_with_a_key_of_the_customer_are_not_cached(strict_server, bucket, cache, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    config = bucket.config.replaced(s3=bucket.config.s3.replaced(customer_key_file=key), cache=options(cache))
    store = torchobj.Store(bucket.url, config=config)
    store.put("data/secret", b"secret")
    for _ in range(2):
        dataset = torchobj.ObjectMapDataset(f"{bucket.url}/data/", transform=bytes, config=config)
        assert dataset[0] == b"secret"
    assert list(_torchobj.CacheFiles(cache)) == []


def test_a_folder_that_is_removed_during_an_epoch_is_not_used_any_more(bucket, config, cache, caplog):
    loader = loader_of(bucket, config)
    epoch(loader)
    samples = []
    for number, batch in enumerate(loader):
        samples += batch
        if number == 2:
            shutil.rmtree(cache)
    assert sorted(samples) == [(number, body(number)) for number in range(COUNT)]
    epoch(loader)


def test_a_folder_that_cannot_be_made_is_one_warning_and_all_reads_go_to_the_store(bucket, config, gets, caplog):
    # No folder can be made in it, even by the superuser.
    config = config.replaced(cache=options("/proc/self/torchobj"))
    gets()
    for _ in range(2):
        epoch(loader_of(bucket, config))
    assert gets() == 2 * COUNT
    assert caplog.text.count("the disk cache is not used by this process") == 1, caplog.text


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (
            {"max_object_bytes": 1 << 20},
            r"\S+: 2097152 bytes are too many .* max_object_bytes=1048576 or max_bytes=1073741824: raise these",
        ),
        ({"min_free_bytes": 1 << 50}, r"admits nothing: \d+ bytes of its disk are free, and min_free_bytes=1125899906"),
    ],
    ids=["large objects", "a full disk"],
)
def test_a_cache_that_admits_nothing_is_one_warning_with_the_limit(bucket, cache, caplog, limits, text):
    for name in "ab":
        bucket.write(f"large/{name}", bytes(2 << 20))
    config = bucket.config.replaced(cache=options(cache, **limits))
    dataset = torchobj.ObjectMapDataset(f"{bucket.url}/large/", transform=size_of, config=config)
    for number in (0, 1, 0, 1):
        assert dataset[number] == 2 << 20
        written()
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(text, warning.getMessage()), warning


def test_a_cache_that_admits_nothing_creates_no_folder_and_does_not_warn(bucket, config, cache, gets, caplog):
    config = config.replaced(cache=options(cache, admit=False))
    gets()
    assert epoch(loader_of(bucket, config)) == gets()
    assert not cache.exists() and "disk cache" not in caplog.text


@pytest.fixture
def read_only(cache):
    """Makes the folder of the cache read-only, for the superuser by a mount of its own."""
    with contextlib.ExitStack() as stack:

        def change():
            if os.geteuid():
                cache.chmod(0o500)
                (cache / "v1").chmod(0o500)
                stack.callback(cache.chmod, 0o700)
                stack.callback((cache / "v1").chmod, 0o700)
                return
            if subprocess.run(["mount", "--bind", cache, cache], stderr=subprocess.DEVNULL).returncode:
                pytest.skip("no mounts")
            stack.callback(subprocess.run, ["umount", "--lazy", cache])
            subprocess.run(["mount", "-o", "remount,ro,bind", cache], check=True)

        yield change


#: Reads all objects of a folder twice, and prints the hits.
TWICE = """
import pickle, sys, torchobj
from torchobj import _torchobj
config = pickle.loads(bytes.fromhex(sys.argv[2]))
dataset = torchobj.ObjectMapDataset(sys.argv[1], transform=bytes, config=config)
for _ in range(2):
    assert [dataset[number] for number in range(len(dataset))] == pickle.load(open(sys.argv[3], "rb"))
    while _torchobj.request_stats()["cache_pending"]:
        pass
print(torchobj.metrics()["torchobj.cache_hits"])
"""


def hits_of_another_process(bucket, config, tmp_path, limits=""):
    (tmp_path / "right").write_bytes(pickle.dumps([body(number) for number in range(COUNT)]))
    arguments = [f"{bucket.url}/data/", pickle.dumps(config).hex(), tmp_path / "right"]
    return int(warm_python.run(["-c", limits + TWICE, *arguments], check=True).stdout)


def test_a_cache_that_has_reached_its_maximum_logs_it_once_and_does_not_warn(bucket, cache, tmp_path):
    config = bucket.config.replaced(cache=options(cache, max_bytes=1 << 20))
    bodies = [bytes(700_000)] * 2
    for number in range(2):
        bucket.write(f"large/{number}", bodies[number])
    (tmp_path / "right").write_bytes(pickle.dumps(bodies))
    arguments = [f"{bucket.url}/large/", pickle.dumps(config).hex(), tmp_path / "right"]
    logging = "import logging\nlogging.basicConfig(level=logging.INFO)\n"
    done = warm_python.run(["-c", logging + TWICE, *arguments], check=True)
    (line,) = [line for line in done.stderr.splitlines() if "disk cache" in line]
    assert line.startswith("INFO:") and "has reached max_bytes=1048576" in line


@pytest.mark.skipif(sys.platform != "linux", reason="mounts")
@pytest.mark.parametrize("admit", [True, False])
def test_a_cache_that_is_read_only_answers_what_it_has(bucket, config, cache, tmp_path, read_only, admit):
    epoch(loader_of(bucket, config))
    for file in sorted(cache.glob("v1/??/*"))[:20]:
        file.unlink()
    read_only()
    config = config.replaced(cache=options(cache, admit=admit))
    assert hits_of_another_process(bucket, config, tmp_path) == 2 * (COUNT - 20)


def test_files_that_the_disk_does_not_take_are_read_from_the_store(bucket, config, tmp_path):
    limits = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))"
    small = sum(len(body(number)) < 7500 for number in range(COUNT))
    # After a file that does not fit, nothing is admitted for a second.
    assert 0 < hits_of_another_process(bucket, config, tmp_path, limits) <= small + COUNT


def test_a_process_that_is_killed_before_its_file_has_a_length_has_counted_it(bucket, config, cache, tmp_path):
    epoch(loader_of(bucket, config))
    for file in cache.glob("v1/??/*"):
        if file.stat().st_size > 8192:
            file.unlink()
    _torchobj.CacheFiles(cache).correct()
    before = _torchobj.CacheFiles(cache).used_bytes()
    # The signal of a file that would be too long ends the process.
    limits = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
"""
    with pytest.raises(AssertionError, match=f"ended with -{int(signal.SIGXFSZ)}"):
        hits_of_another_process(bucket, config, tmp_path, limits)
    assert _torchobj.CacheFiles(cache).used_bytes() > before
    _torchobj.CacheFiles(cache).correct()
    assert _torchobj.CacheFiles(cache).used_bytes() == before == sum(map(disk_bytes, cache.rglob("*")))


def test_local_files_are_not_cached(cache, tmp_path):
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "k"
    for content in (b"old!", b"new!"):
        # As after another mount: path, inode, size and time are equal.
        file.write_bytes(content)
        os.utime(file, (1e9, 1e9))
        config = torchobj.StoreConfig(cache=options(cache))
        assert torchobj.ObjectMapDataset(f"file://{tmp_path}/data/", transform=bytes, config=config)[0] == content
        written()
    assert not cache.exists()


def test_all_processes_use_the_folder_that_was_named_whatever_their_working_directories(
    bucket, config, cache, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    relative = config.replaced(cache=options("cache"))
    assert relative.cache == options(Path("~/cache")) == options(cache)
    with pytest.raises(ConfigError, match="home directory"):
        options("~no such user/cache")
    monkeypatch.chdir("/")
    epoch(loader_of(bucket, relative))
    assert hits_of_another_process(bucket, relative, tmp_path) == 2 * COUNT


def test_a_folder_with_files_of_another_program_is_an_error(bucket, config, cache):
    (cache / "v1").mkdir(parents=True)
    (cache / "v1" / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="files of another program"):
        torchobj.ObjectMapDataset(f"{bucket.url}/data/", config=config)[0]
    assert (cache / "v1" / "notes").read_text() == "mine"


def test_a_folder_that_others_may_write_to_is_an_error(bucket, config, cache):
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(ConfigError, match="other users may write to the cache folder: run `chmod 700`"):
        torchobj.ObjectMapDataset(f"{bucket.url}/data/", config=config)[0]


def test_a_file_of_settings_names_a_cache(bucket, config, cache, gets, tmp_path, monkeypatch):
    file = tmp_path / "torchobj.toml"
    file.write_text(f'["{bucket.url}"]\ncache = {{ folder = "{cache}", min_free_bytes = 0 }}\n')
    monkeypatch.setattr(config_file, "_read", {})
    monkeypatch.setenv("TORCHOBJ_CONFIG", str(file))
    epoch(loader_of(bucket, bucket.config))
    gets()
    epoch(loader_of(bucket, bucket.config))
    assert gets() == 0
    epoch(loader_of(bucket, bucket.config.replaced(cache=CacheOptions(folder=None))))
    assert gets() == COUNT


#: Reads the objects in an order of its own, once.
ONCE = """
import pickle, random, sys, torchobj
from torchobj import _torchobj
config = pickle.loads(bytes.fromhex(sys.argv[2]))
dataset = torchobj.ObjectMapDataset(sys.argv[1], transform=bytes, config=config)
sys.stdin.readline()
for number in random.Random(sys.argv[3]).sample(range(len(dataset)), len(dataset)):
    dataset[number]
while _torchobj.request_stats()["cache_pending"]:
    pass
print("done", flush=True)
"""


def test_eight_processes_never_exceed_the_maximum(bucket, config, cache):
    max_bytes = 1 << 20
    small = config.replaced(cache=options(cache, max_bytes=max_bytes))
    torchobj.ObjectMapDataset(f"{bucket.url}/data/", transform=bytes, config=small)[0]
    arguments = [["-c", ONCE, f"{bucket.url}/data/", pickle.dumps(small).hex(), str(number)] for number in range(8)]
    most = 0
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(warm_python.Process(each)) for each in arguments]
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        while any(process.poll() is None for process in processes):
            most = max(most, sum(map(disk_bytes, cache.rglob("*"))))
        for process in processes:
            assert process.stdout.readline() == "done\n", process.errors()
    assert 0 < most <= max_bytes
    files = _torchobj.CacheFiles(cache)
    assert files.used_bytes() == sum(size for _, size, _, _ in files) > max_bytes // 2


#: Reads the part of a rank, in an order of its job.
RANK = """
import pickle, random, sys, torchobj
from torchobj import _torchobj
config = pickle.loads(bytes.fromhex(sys.argv[2]))
dataset = torchobj.ObjectMapDataset(sys.argv[1], transform=bytes, config=config)
len(dataset)
print("ready", flush=True)
sys.stdin.readline()
job, rank = int(sys.argv[3]) // 4, int(sys.argv[3]) % 4
for number in random.Random(job).sample(range(len(dataset)), len(dataset))[rank::4]:
    dataset[number]
while _torchobj.request_stats()["cache_pending"]:
    pass
print("done", flush=True)
"""


@pytest.mark.matrix
def test_two_jobs_of_four_ranks_request_each_object_once(bucket, config, cache, gets):
    for number in range(2000):
        bucket.write(f"many/{number:04}", bytes(2000))
    arguments = [["-c", RANK, f"{bucket.url}/many/", pickle.dumps(config).hex(), str(number)] for number in range(8)]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(warm_python.Process(each)) for each in arguments]
        for process in processes:
            assert process.stdout.readline() == "ready\n", process.errors()
        gets()
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            assert process.stdout.readline() == "done\n", process.errors()
    assert 2000 <= gets() <= 1.02 * 2000


@pytest.mark.matrix
def test_a_cache_of_a_million_files_starts_at_once(bucket, config, cache):
    loader = loader_of(bucket, config)
    epoch(loader)
    for folder in (cache / "v1" / f"{number:02x}" for number in range(256)):
        folder.mkdir(exist_ok=True)
        for number in range(1_000_000 // 256):
            (folder / f"{number:030x}").touch()
    (cache / "v1" / "usage").unlink()
    code = f"""
import pickle, time, torchobj
config = pickle.loads({pickle.dumps(config)!r})
dataset = torchobj.ObjectMapDataset({bucket.url + "/data/"!r}, transform=bytes, config=config)
began = time.monotonic()
dataset[0]
print(time.monotonic() - began)
"""
    assert float(warm_python.run(["-c", code], check=True).stdout) < 1.0
