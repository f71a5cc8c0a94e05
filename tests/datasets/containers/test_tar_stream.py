"""Samples of tar shards as streams: those of webdataset over local files, divided, shuffled and resumed."""

import io
import random
import tarfile

import pytest
from webdataset.tariterators import group_by_keys, tar_file_expander

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX, often
from tests.support.prefetching import eventually, stats
from torchobj.exceptions import ConfigError

SHARDS = 7


def tar_of(members, **options):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def members_of(shard):
    drawn = random.Random(shard)
    for number in range(40 + 7 * shard):
        yield f"d{shard}/{number:04d}.bin", drawn.randbytes(drawn.randrange(4000))
        yield f"d{shard}/{number:04d}.cls", str(number).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tar-stream")
    for shard in range(SHARDS):
        (path / f"train-{shard:03d}.tar").write_bytes(tar_of(members_of(shard)))
    return path


def dataset(folder, **options):
    return torchobj.TarIterableDataset(f"file://{folder}/train-*.tar", **options)


def key(sample):
    return sample["__key__"]


def plain(sample):
    """A sample with bytes, without the URL."""
    return {
        name: value if isinstance(value, str) else bytes(value) for name, value in sample.items() if name != "__url__"
    }


def of_webdataset(paths):
    found = []
    for path in paths:
        # The pipeline of WebDataset, with files that are closed.
        with path.open("rb") as stream:
            found += group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}]))
    return [
        {name: value for name, value in each.items() if name not in ("__url__", "__local_path__")} for each in found
    ]


def keys_of(loader):
    return [name for batch in loader for name in batch]


def loader_of(samples, workers=2, **options):
    return torchobj.DataLoader(samples, batch_size=8, num_workers=workers, collate_fn=list, **options)


def test_samples_equal_those_of_webdataset_over_local_files(folder):
    expected = of_webdataset(sorted(folder.glob("*.tar")))
    assert [plain(sample) for sample in dataset(folder, shuffle_shards=False)] == expected


@pytest.mark.parametrize(
    ("context", "workers"),
    often(2, [("fork", 2), ("forkserver", 2), ("spawn", 1), ("spawn", 2)]),
)
def test_workers_yield_each_sample_once_and_the_order_depends_on_seed_and_epoch(folder, context, workers):
    samples = dataset(folder, transform=key, shuffle_buffer=50, seed=4)
    first = keys_of(loader_of(samples, workers, multiprocessing_context=context))
    assert sorted(first) == sorted(each["__key__"] for each in of_webdataset(folder.glob("*.tar")))
    assert first != sorted(first)
    if context == "fork":
        samples.set_epoch(0)
        assert keys_of(loader_of(samples)) == first
        samples.set_epoch(1)
        assert keys_of(loader_of(samples)) != first


@pytest.mark.providers("s3", GCS_IN_MATRIX)
def test_ranges_after_the_first_are_read_ahead(bucket):
    body = tar_of((f"{number:05d}.bin", bytes(100_000)) for number in range(200))
    for number in range(2):
        bucket.write(f"ahead/{number}.tar", body)
    samples = torchobj.TarIterableDataset(f"{bucket.url}/ahead/", transform=key, config=bucket.config)
    loader = loader_of(samples, workers=1)
    assert len(keys_of(loader)) == 400
    stats = loader.stats()
    assert stats.misses == 1
    assert stats.hits + stats.late + stats.queued == 9


@pytest.mark.parametrize("shuffle_buffer", [0, 3])
def test_a_pass_that_is_closed_keeps_its_state_and_no_memory(tmp_path, shuffle_buffer):
    (tmp_path / "a.tar").write_bytes(tar_of((f"{number:05d}.bin", bytes(1_000_000)) for number in range(20)))
    samples = torchobj.TarIterableDataset(
        (tmp_path / "a.tar").as_uri(), transform=key, shuffle_buffer=shuffle_buffer, shuffle_shards=False
    )
    iterator = iter(samples)
    begun = [next(iterator) for _ in range(4)]
    announced, state = stats()["announced"], samples.state_dict()
    assert announced > 0
    iterator.close()
    assert samples.state_dict() == state
    assert eventually(lambda: stats()["announced"] < announced)
    samples.load_state_dict(state)
    assert sorted([*begun, *samples]) == sorted(key({"__key__": f"{number:05d}"}) for number in range(20))


OPTIONS = [{}, {"shuffle_buffer": 60}, {"uneven": "pad"}, {"uneven": "resample"}, {"shuffle_shards": False}]


@pytest.mark.parametrize(
    ("options", "workers"),
    often(3, [(options, workers) for options in OPTIONS for workers in (0, 2)]),
)
def test_a_resumed_pass_continues_exactly_at_random_points(folder, options, workers):
    def loader():
        return loader_of(dataset(folder, transform=key, seed=5, **options), workers)

    whole = list(loader())
    drawn = random.Random(7)
    for stop in sorted(drawn.randrange(1, len(whole)) for _ in range(2 if workers else 20)):
        interrupted = loader()
        batches = iter(interrupted)
        head = [next(batches) for _ in range(stop)]
        resumed = loader()
        resumed.load_state_dict(interrupted.state_dict())
        assert head + list(resumed) == whole, stop


def test_a_state_of_other_workers_or_options_is_refused(folder):
    interrupted = loader_of(dataset(folder))
    next(iter(interrupted))
    state = interrupted.state_dict()
    with pytest.raises(ConfigError, match="num_workers"):
        loader_of(dataset(folder), workers=1).load_state_dict(state)
    samples = dataset(folder)
    next(iter(samples))
    other = dataset(folder, shuffle_buffer=5)
    other.load_state_dict(samples.state_dict())
    with pytest.raises(ConfigError, match="cannot be resumed"):
        iter(other)


def test_samples_in_a_shuffle_buffer_do_not_hold_the_ranges_that_they_were_read_with(folder):
    [sample] = [sample for sample in dataset(folder, shuffle_buffer=30) if sample["__key__"] == "d0/0003"]
    assert plain(sample) == of_webdataset([folder / "train-000.tar"])[3]


def test_decode_applies_by_extension_before_the_transform(folder):
    samples = dataset(folder, decode={"cls": lambda data: int(bytes(data))}, transform=lambda sample: sample["cls"])
    assert sorted(set(samples)) == list(range(82))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_default_collation_makes_lists_of_fields_that_are_not_decoded_as_it_does_of_bytes(folder, workers):
    samples = dataset(folder, shuffle_shards=False, decode={"cls": torchobj.decode.json})
    batch = next(iter(torchobj.DataLoader(samples, batch_size=4, num_workers=workers)))
    expected = of_webdataset([folder / "train-000.tar"])[:4]
    assert batch["__key__"] == [each["__key__"] for each in expected]
    assert batch["cls"].tolist() == [0, 1, 2, 3]
    assert [bytes(data) for data in batch["bin"]] == [each["bin"] for each in expected]
