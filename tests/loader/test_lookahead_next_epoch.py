"""The next epoch is read before the current one ends."""

import copy
import itertools

import pytest
import torch

from tests.support.long_tables import often
from tests.support.orders import COUNT, KINDS, gained, loader_of, workers
from tests.support.prefetching import all_free, eventually, stats


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objects")
    for number in range(COUNT):
        (folder / f"k{number:02}").write_bytes(bytes([number]) * (100 + number))
    return folder


def next_epoch_is_read(count):
    """Waits until `count` objects of the next epoch have been read."""
    return eventually(lambda: stats()["announced"] == count and stats()["in_flight"] == 0)


@pytest.mark.parametrize("count", [0, 2, "persistent"])
@pytest.mark.parametrize("kind", often(1, ["elastic", "elastic, no batches"]))
def test_the_next_epoch_is_read_before_this_one_ends(folder, kind, count):
    loader = loader_of(folder, kind, **workers(count))
    plain = torch.utils.data.DataLoader(range(COUNT), **KINDS[kind](folder))
    assert all_free()
    begun = stats()
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        plain.sampler.set_epoch(epoch)
        before = stats()
        iterator = iter(loader)
        found = [next(iterator) for _ in range(len(loader))]
        # The last batch was returned, but the loop has not ended yet.
        assert next_epoch_is_read(30), stats()
        assert loader.state_dict()["sampler"]["epoch"] == epoch
        assert list(map(str, found)) == list(map(str, plain))
        assert next(iterator, None) is None
        assert gained(before, "misses") == 0
        if epoch:
            assert gained(before, "hits") >= 28
        del iterator
    # No object was read in vain; an object that both epochs needed at the same time was read once.
    assert gained(begun, "objects") <= 4 * 30
    del loader
    assert all_free()


def test_a_wrong_guess_of_the_next_epoch_only_costs_reads(folder):
    loader = loader_of(folder, "elastic", num_workers=2)
    expected = {epoch: [] for epoch in (0, 1, 7)}
    for epoch in (0, 7, 7, 1, 0):
        loader.sampler.set_epoch(epoch)
        found = [batch.tolist() for batch in loader]
        expected[epoch] = expected[epoch] or found
        assert found == expected[epoch]
        assert next_epoch_is_read(30), stats()
    assert len({str(found) for found in expected.values()}) == 3
    del loader
    assert all_free()


def test_a_loop_without_set_epoch_repeats_the_order(folder):
    loader = loader_of(folder, "elastic")
    first = run_plain(loader)
    before = stats()
    assert run_plain(loader) == first
    assert gained(before, "misses") == 0
    assert gained(before, "objects") <= 30


def run_plain(loader):
    found = [batch.tolist() for batch in loader]
    assert next_epoch_is_read(30), stats()
    return found


@pytest.mark.parametrize("count", [0, "persistent"])
def test_a_break_near_the_end_keeps_the_order_and_releases_memory(folder, count):
    loader = loader_of(folder, "elastic", **workers(count))
    whole = None
    for stop in (7, 8, 3, 8):
        found = [batch.tolist() for batch in itertools.islice(loader, stop)]
        whole = whole or [batch.tolist() for batch in loader]
        assert found == whole[:stop]
    del loader
    assert all_free(), stats()


def test_lookahead_limits_how_much_of_the_next_epoch_is_read(folder):
    loader = loader_of(folder, "elastic, no batches", lookahead=3)
    list(loader)
    assert next_epoch_is_read(3), stats()
    assert loader.state_dict()["within_epoch"] is False


def test_a_loader_with_a_next_epoch_is_copied_without_it(folder):
    loader = loader_of(folder, "elastic")
    first = [batch.tolist() for batch in loader]
    lookahead = copy.copy(loader._index_sampler)
    assert loader._index_sampler.following() is not None
    assert lookahead.following() is None
    assert [index for batch in lookahead for index in batch] == [index for batch in first for index in batch]
    assert [batch.tolist() for batch in loader] == first
