"""Shards are divided among ranks and workers in equal parts."""

import io
import random
import tarfile

import pytest

import torchobj
from torchobj.ranks.sharding import Shard

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


def keys_of(loader):
    return [name for batch in loader for name in batch]


def loader_of(samples, workers=2, **options):
    return torchobj.DataLoader(samples, batch_size=8, num_workers=workers, collate_fn=list, **options)


@pytest.mark.parametrize("uneven", ["drop", "pad", "resample"])
def test_seven_shards_over_two_ranks_of_three_workers_give_equal_batches(folder, uneven, monkeypatch, caplog):
    counts, found = [], []
    for rank in range(2):
        batches = 0
        for worker in range(3):
            samples = dataset(folder, transform=key, uneven=uneven)
            monkeypatch.setattr(samples, "_shard", lambda rank=rank, worker=worker: Shard(rank, 2, worker, 3))
            part = list(samples)
            batches += -(-len(part) // 8)
            found += part
        counts.append(batches)
    assert counts[0] == counts[1]
    # 427 samples: an odd number.
    assert len(found) == {"drop": 426, "pad": 428, "resample": 428}[uneven]
    assert len(set(found)) == 426 if uneven == "drop" else True
    assert len(set(found)) == 427 if uneven == "pad" else True
    expected = {"drop": "1 of 427 samples are left out", "pad": "1 of 427 samples are repeated"}
    message = expected.get(uneven, "428 of 427 samples are drawn with their shards")
    [record] = [record for record in caplog.records if f"uneven={uneven!r}" in record.getMessage()]
    assert message in record.getMessage()


def test_without_a_policy_uneven_shards_are_logged(folder, monkeypatch, caplog):
    samples = dataset(folder, transform=key)
    monkeypatch.setattr(samples, "_shard", lambda: Shard(0, 2, 0, 3))
    list(samples)
    [record] = caplog.records
    assert "7 objects" not in record.getMessage()
    assert "7 shards are divided among 2 ranks with 3 workers each" in record.getMessage()


def test_a_worker_without_shards_yields_nothing(folder, caplog):
    samples = torchobj.TarIterableDataset(f"file://{folder}/train-000.tar", transform=key)
    assert len(keys_of(loader_of(samples, workers=2))) == 40
