"""`torchobj.shards.pack`: what it returns, its progress, and shards that cannot be packed."""

import pytest

import torchobj
from torchobj import exceptions
from torchobj.files import Progress
from torchobj.shards import pack

pytestmark = pytest.mark.providers("s3", "gs")


class StopError(Exception):
    pass


@pytest.fixture
def packed(bucket):
    """Writes 10 samples of 2 objects below `in/`. Returns a function that packs them into three shards."""
    for number in range(10):
        bucket.write(f"in/{number}.txt", b"text" * number)
        bucket.write(f"in/{number}.cls", b"1")

    def call(**options):
        target = options.pop("shards", f"{bucket.url}/out/s-%02d.tar")
        options = {"maxcount": 4, "config": bucket.config} | options
        return pack(options.pop("prefix", f"{bucket.url}/in"), target, **options)

    return call


def test_it_returns_the_urls_of_shards_that_datasets_read(bucket, packed):
    urls = packed()
    assert urls == [f"{bucket.url}/out/s-0{number}.tar" for number in range(3)]
    dataset = torchobj.TarMapDataset(urls, config=bucket.config)
    assert len(dataset) == 10 and bytes(dataset[3]["txt"]) == b"text" * 3


def test_a_progress_receives_all_objects_and_bytes_also_of_complete_shards(packed):
    seen, again = [], []
    packed(progress=seen.append)
    size = sum(4 * number + 1 for number in range(10))
    assert seen[-1] == Progress(20, 20, size, size, 0) and len(seen) == 20
    done = [progress.bytes_done for progress in seen]
    assert done == sorted(done)
    packed(progress=again.append)
    assert again[-1] == Progress(20, 20, size, size, 20)


@pytest.mark.parametrize("parallel", [1, 4])
def test_an_exception_of_progress_is_raised_and_no_shard_is_written_afterwards(bucket, packed, parallel):
    def stop(progress):
        raise StopError

    with pytest.raises(StopError):
        packed(progress=stop, parallel=parallel)
    assert not any(key.startswith("out/") for key in bucket.keys())


def test_a_shard_that_cannot_be_packed_does_not_end_the_others(bucket, packed, control):
    control.faults({"operation": "GetObject", "key": "^in/5.txt$", "action": {"status": 403, "code": "AccessDenied"}})
    with pytest.raises(exceptions.TransferError, match="1 of 3 shards were not packed: .*s-01.tar") as caught:
        packed()
    [(url, error)] = caught.value.failures
    assert url.endswith("s-01.tar") and isinstance(error, exceptions.AccessDeniedError)
    control.clear_faults()
    seen = []
    assert len(packed(progress=seen.append)) == 3 and seen[-1].skipped == 12


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"parallel": 0}, exceptions.ConfigError, "parallel=0"),
        ({"progress": 1}, exceptions.ConfigError, "must be True, or a callable"),
        ({"maxcount": 0}, exceptions.ConfigError, "maxcount=0"),
        ({"start_shard": 1.5}, exceptions.ConfigError, r"start_shard=1\.5"),
        ({"prefix": 5}, exceptions.ConfigError, "url=5: must be a str"),
        ({"prefix": "memory://empty/in"}, exceptions.ObjectNotFoundError, "no samples"),
        ({"shards": "s.tar"}, exceptions.ConfigError, "s.tar"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(bucket, packed, options, error, text):
    with pytest.raises(error, match=text):
        packed(**options)
    assert not any(key.endswith(".tar") for key in bucket.keys())


def test_shards_below_the_folder_and_a_later_shard_are_refused(bucket, packed):
    with pytest.raises(exceptions.ConfigError, match="whose next listing would contain the shards"):
        packed(shards=f"{bucket.url}/in/s-%02d.tar")
    with pytest.raises(exceptions.ConfigError, match="whose next listing would contain the shards"):
        packed(shards=f"{bucket.url}/5%%/s-%02d.tar", prefix=f"{bucket.url}/5%")
    if bucket.url.startswith("gs://"):
        with pytest.raises(exceptions.ConfigError, match="whose next listing would contain the shards"):
            packed(shards=f"gcs{bucket.url[2:]}/in/s-%02d.tar")
    packed()
    with pytest.raises(exceptions.ConfigError, match=r"s-01.tar: exists, but the plan has 1 shards"):
        packed(maxcount=100)
