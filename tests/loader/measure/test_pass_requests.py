"""A loader counts the billed requests of its epochs, and reports what the last one cost."""

import re

import pytest
import torch.utils.data

import torchobj
from tests.support.disk_caches import written
from torchobj import CacheOptions, PriceOptions
from torchobj.datasets.wrappers import prices_of
from torchobj.telemetry.billing import Billed

COUNT, SIZE = 40, 1 << 16
PRICES = PriceOptions(get_per_1000=0.4, list_per_1000=5, egress_per_gib=1)


def size(reader):
    return len(reader.read())


@pytest.fixture
def config(bucket):
    for number in range(COUNT):
        bucket.write(f"data/{number:02}", bytes([number]) * SIZE)
    return bucket.config.replaced(hedge=False, prices=PRICES)


def loader_of(bucket, config, **arguments):
    dataset = torchobj.ObjectMapDataset(f"{bucket.url}/data/", transform=size, config=config)
    return torchobj.DataLoader(dataset, batch_size=8, shuffle=True, **arguments)


def billed(loader):
    stats = loader.stats()
    return stats.billed_gets, stats.received_bytes


@pytest.mark.parametrize("workers", [0, 2])
def test_the_requests_of_each_epoch_are_those_that_the_server_received(bucket, config, control, workers):
    loader = loader_of(bucket, config, num_workers=workers)
    assert len(loader) == 5
    control.clear_requests()
    for epochs in (1, 2):
        assert sum(map(len, loader)) == COUNT
        received = [request for request in control.requests() if request.method == "GET"]
        assert len(received) == epochs * COUNT
        assert billed(loader) == (epochs * COUNT, epochs * COUNT * SIZE)
    # 40 times 0.0004 dollars, and 2.5 MiB of a GiB for one dollar.
    line = "Requests of this process in the last epoch: 40 GET; 2.5 MiB received ($0.018)."
    assert line in loader.report().splitlines()


def test_what_is_sent_between_epochs_does_not_count(bucket, config):
    loader = loader_of(bucket, config)
    store = torchobj.Store(bucket.url, config=config)
    for batch in loader:
        assert len(batch) == 8
        break
    left = billed(loader)
    store.get("data/01")
    assert billed(loader) == left and "Requests of this process so far:" in loader.report()
    assert sum(map(len, loader)) == COUNT
    store.put("other", b"1")
    assert "PUT" not in loader.report()
    assert loader.stats().billed_gets <= 2 * COUNT


def test_an_epoch_from_the_disk_cache_costs_nothing(bucket, config, tmp_path):
    cache = CacheOptions(folder=tmp_path / "cache", min_free_bytes=0)
    for dollars in ("40 GET; 2.5 MiB received ($0.018)", "none; 0.0 MiB received ($0.00)"):
        loader = loader_of(bucket, config.replaced(cache=cache))
        assert sum(map(len, loader)) == COUNT
        written()
        assert f"in the last epoch: {dollars}." in loader.report()


def test_the_hits_of_the_last_epoch_are_beside_its_requests(bucket, config, tmp_path):
    loader = loader_of(bucket, config.replaced(cache=CacheOptions(folder=tmp_path / "cache", min_free_bytes=0)))
    for hits in ("", " From the disk cache (no requests): 40 reads, 2.5 MiB."):
        assert sum(map(len, loader)) == COUNT
        written()
        [line] = [line for line in loader.report().splitlines() if line.startswith("Requests")]
        assert line.partition("($")[2].partition(").")[2] == hits
    sent, hits = loader.stats().billed_gets, loader.stats().cache_hits
    assert (sent, hits) == (COUNT, COUNT)


def test_what_the_first_epoch_has_read_so_far_has_its_hits(bucket, config, tmp_path):
    config = config.replaced(cache=CacheOptions(folder=tmp_path / "cache", min_free_bytes=0))
    assert sum(map(len, loader_of(bucket, config))) == COUNT
    written()
    loader = loader_of(bucket, config)
    next(iter(loader))
    line = r"this process so far: none; 0\.0 MiB received \(\$0\.00\)\. From the disk cache \(no requests\): \d+ reads, \d\.\d MiB\."
    assert re.search(line, loader.report())


def test_without_prices_or_with_several_no_dollars_are_named(bucket, config):
    plain = torchobj.ObjectMapDataset(
        f"{bucket.url}/data/", transform=size, config=config.replaced(prices=PriceOptions())
    )
    priced = torchobj.ObjectMapDataset(f"{bucket.url}/data/", transform=size, config=config)
    loader = torchobj.DataLoader(torch.utils.data.ConcatDataset([plain, priced]), batch_size=8)
    assert sum(map(len, loader)) == 2 * COUNT
    assert "$" not in loader.report() and "80 GET" in loader.report()
    assert prices_of(priced) == PRICES
    assert prices_of(torchobj.TarIterableDataset(f"{bucket.url}/data/", config=config)) == PRICES
    assert prices_of([1, 2]) == PriceOptions()


def test_what_is_read_for_workers_counts_also_if_nothing_is_announced(bucket, config):
    loader = loader_of(bucket, config, num_workers=2, lookahead=0)
    assert sum(map(len, loader)) == COUNT
    assert "Requests of this process in the last epoch: 40 GET; 2.5 MiB received ($0.018)." in loader.report()


def test_a_forked_process_counts_from_zero():
    assert Billed(5, 1, 0, 100).since(Billed(40, 0, 2, 4000)) == Billed(0, 1, 0, 0)
