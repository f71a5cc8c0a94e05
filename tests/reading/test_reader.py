"""A response whose length differs from the listing is an error for every way to read a sample."""

import dataclasses

import pytest

import torchobj

LISTED, ANSWERED = 10_000, 100


@pytest.fixture
def shortened(bucket, control):
    """Arguments of a dataset; every response has 100 of the 10,000 bytes listed, and a matching Content-Length."""
    store = torchobj.Store(bucket.url, config=bucket.config)
    for number in range(4):
        store.put(f"k{number}", bytes([number]) * LISTED)
    control.faults({"operation": "GetObject", "action": {"shorter_length": LISTED - ANSWERED}})
    return {"url": bucket.url, "config": dataclasses.replace(bucket.config, max_attempts=2)}


def as_map(url, config):
    return torchobj.S3MapDataset(url, config=config)[1]


def as_iterable(url, config):
    return list(torchobj.S3IterableDataset(url, config=config))


def by_loader(url, config):
    return list(torchobj.DataLoader(torchobj.S3MapDataset(url, config=config, transform=bytes), batch_size=2))


def by_workers(url, config):
    data = torchobj.S3MapDataset(url, config=config, transform=bytes)
    return list(torchobj.DataLoader(data, batch_size=2, num_workers=2, collate_fn=list))


class References(torchobj.ObjectDataset):
    """One object, referenced by name and size."""

    def __init__(self, url, config):
        super().__init__(config=config)
        self.ref = torchobj.ObjectRef(f"{url.rstrip('/')}/k1", size=LISTED)

    def __len__(self):
        return 1

    def objects_at(self, index):
        return [self.ref]

    def build(self, index, readers):
        return bytes(readers[0])


def by_reference(url, config):
    return References(url, config)[0]


@pytest.mark.parametrize("read", [as_map, as_iterable, by_loader, by_workers, by_reference])
def test_a_response_whose_length_differs_from_the_listing_is_an_error_with_both_lengths(shortened, read):
    with pytest.raises(torchobj.StoreError, match=rf"expected an object of {LISTED} bytes.* {ANSWERED} bytes"):
        read(**shortened)


def test_a_response_that_is_too_short_once_is_retried(shortened, control):
    control.faults({"operation": "GetObject", "times": 1, "action": {"shorter_length": LISTED - ANSWERED}})
    assert bytes(as_map(**shortened)) == bytes([1]) * LISTED
