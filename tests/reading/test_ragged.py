"""Raw readers are collated to a ragged batch, without a copy of their bytes."""

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

COUNT = 50


@pytest.fixture
def filled(bucket):
    for number in range(COUNT):
        bucket.write(f"train/{number:02}.bin", f"body {number}".encode() * number)
    return bucket


def expected(number):
    return f"body {number}".encode() * number


def dataset(bucket, **settings):
    return bucket.map_dataset(f"{bucket.url}/train/", config=bucket.config, **settings)


def test_raw_bytes_are_collated_raggedly(filled):
    batch = next(iter(DataLoader(dataset(filled), batch_size=5)))
    assert isinstance(batch, torchobj.collate.RaggedBatch)
    assert [bytes(batch[index].numpy()) for index in range(5)] == [expected(number) for number in range(5)]
    assert batch.urls == [f"{filled.url}/train/{number:02}.bin" for number in range(5)]
    assert (batch.data.dtype, batch.offsets.dtype, len(batch.offsets)) == (torch.uint8, torch.int64, 6)
    for workers in (0, 2):
        batches = list(DataLoader(dataset(filled), batch_size=16, num_workers=workers))
        assert sum(len(batch) for batch in batches) == COUNT
    nested = default_collate([(reader, 1) for reader in dataset(filled).__getitems__([1, 2])])
    assert bytes(nested[0][1].numpy()) == expected(2)
    assert nested[1].tolist() == [1, 1]
    assert batch.to("cpu").urls == batch.urls
