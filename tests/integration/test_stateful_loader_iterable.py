"""What torchdata's StatefulDataLoader promises of iterable datasets, checked of ours and compared with what it yields."""

import functools
import itertools

import pytest
import torch

import torchobj
from tests.stateful import (
    LOADERS,
    ItsOwnIterator,
    Sharded,
    ShardedAndDrawn,
    ShardedWithIterators,
    ShardedWithState,
    after,
    listed,
    same,
    taken,
)

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

#: Samples of each worker: one has none, and the others end at different times.
SIZES = [0, 20, 7]
KINDS = [Sharded, ShardedWithState, ShardedWithIterators, ItsOwnIterator]


def loader_of(loader, kind, workers, sizes=SIZES, **settings):
    settings = {"batch_size": 4, "persistent_workers": workers == "persistent"} | settings
    return loader(kind(sizes), num_workers=len(sizes) if workers else 0, collate_fn=same, **settings)


def table(kind, workers, **settings):
    """What makes a loader of ours, what makes torchdata's, and the batches of a pass, which are the same of both."""
    ours, theirs = (functools.partial(loader_of, loader, kind, workers, **settings) for loader in LOADERS)
    whole = listed(ours())
    assert whole == listed(theirs())
    return ours, theirs, whole


@pytest.mark.parametrize("batch_size", [None, 1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_place_of_a_pass_without_workers_is_resumed_as_torchdata_does(kind, batch_size):
    ours, theirs, whole = table(kind, 0, batch_size=batch_size)
    for done in range(len(whole) + 1):
        rest = after(ours, done)
        assert rest[0] == whole[done:]
        assert rest[1] == whole
        # torchdata has a dataset that is its own iterator begin a new pass where the one before it ended.
        assert after(theirs, done, epochs=1) == rest[:1]


@pytest.mark.parametrize(("workers", "places"), [("new", [0, 1, 4, 6]), ("persistent", [2])])
@pytest.mark.parametrize("kind", KINDS)
def test_places_of_a_pass_with_uneven_workers_are_resumed_as_torchdata_does(kind, workers, places):
    ours, theirs, whole = table(kind, workers)
    for done in places:
        assert after(ours, done, epochs=1) == [whole[done:]]
    assert after(theirs, done, epochs=1) == [whole[done:]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_passes_behind_a_resume_are_whole(kind):
    ours, _, whole = table(kind, "persistent")
    assert after(ours, 3, epochs=3) == [whole[3:], whole, whole]


@pytest.mark.parametrize("kind", [Sharded, ShardedWithState, ShardedWithIterators])
def test_samples_without_batches_of_uneven_workers_are_resumed_as_torchdata_does(kind):
    ours, theirs, whole = table(kind, "new", batch_size=None)
    for done in (10, len(whole)):
        assert after(ours, done, epochs=1) == after(theirs, done, epochs=1) == [whole[done:]]


@pytest.mark.parametrize("workers", [0, "new"])
def test_drop_last_drops_the_same_of_each_worker_after_a_resume(workers):
    for kind in (Sharded, ShardedWithState):
        ours, theirs, whole = table(kind, workers, drop_last=True, sizes=[5, 11])
        assert {len(batch) for batch in whole} == {4}
        for done in (1, len(whole)):
            assert after(ours, done, epochs=1) == after(theirs, done, epochs=1) == [whole[done:]]


@pytest.mark.parametrize("sizes", [[0, 0], [0, 3]])
@pytest.mark.parametrize("kind", [Sharded, ShardedWithState, ShardedWithIterators])
def test_workers_without_any_data_end_every_pass(kind, sizes):
    ours, _, whole = table(kind, "persistent", sizes=sizes)
    assert sum(map(len, whole)) == sum(sizes)
    for done in range(len(whole) + 1):
        assert after(ours, done) == [whole[done:], whole]


@pytest.mark.parametrize("workers", [0, "new", "persistent"])
def test_random_numbers_go_on_by_the_generators_state_that_an_iterator_saved(workers):
    for loader, done in itertools.product(LOADERS, [0, 5] if workers == 0 else [6]):
        first = loader_of(loader, ShardedAndDrawn, workers)
        _, iterator, state = taken(first, done)
        rest = [*iterator]
        # Another process has other numbers.
        torch.manual_seed(99)
        resumed = loader_of(loader, ShardedAndDrawn, workers)
        resumed.load_state_dict(state)
        if done or loader is not torchobj.DataLoader:
            assert listed(resumed) == rest
        else:
            # Ours asks no dataset for a state before its first batch: a pass that has not begun has none.
            assert sum(map(len, listed(resumed))) == sum(SIZES)


@pytest.mark.parametrize("workers", [0, "persistent"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_from_before_the_first_batch_is_that_of_a_whole_pass(kind, workers):
    fresh = loader_of(torchobj.DataLoader, kind, workers)
    before = fresh.state_dict()
    _, iterator, begun = taken(fresh, 0)
    whole = [*iterator]
    for state in (before, begun):
        # Also into the loader that it came from.
        for loader in (loader_of(torchobj.DataLoader, kind, workers), fresh):
            loader.load_state_dict(state)
            assert listed(loader) == whole


@pytest.mark.parametrize(("workers", "batch_size"), [(0, None), (0, 4), ("new", 4), ("persistent", None)])
@pytest.mark.parametrize("kind", [Sharded, ShardedWithState, ShardedWithIterators])
def test_a_state_of_the_end_of_a_pass_begins_the_next_in_a_loader_that_is_in_another_place(kind, workers, batch_size):
    # torchdata's depends on whether a dataset shows a state that was loaded before it begins; ours does not.
    loader = torchobj.DataLoader
    first = loader_of(loader, kind, workers, batch_size=batch_size)
    whole = listed(first)
    end = first.state_dict()
    assert listed(first) == whole
    other = loader_of(loader, kind, workers, batch_size=batch_size)
    taken(other, 2)
    other.load_state_dict(end)
    assert listed(other) == whole
    assert listed(other) == whole


@pytest.mark.parametrize("done", [1, 5])
@pytest.mark.parametrize("kind", [ShardedWithState, ShardedWithIterators])
def test_a_state_soon_after_a_resume_has_the_places_of_workers_that_returned_nothing_since(kind, done):
    # torchdata's depends on whether a dataset shows a state that was loaded before it begins; ours does not.
    loader = torchobj.DataLoader
    make = functools.partial(loader_of, loader, kind, "persistent", sizes=[9, 12, 10, 11])
    first = make()
    _, iterator, state = taken(first, done)
    following = [next(iterator), next(iterator)]
    rest = [*iterator]
    # The same loader goes back.
    first.load_state_dict(state)
    again, iterator, state = taken(first, 2)
    assert again == following
    assert [*iterator] == rest
    resumed = make()
    resumed.load_state_dict(state)
    assert listed(resumed) == rest


@pytest.mark.parametrize("kind", KINDS)
def test_batches_that_are_handed_out_as_they_come_are_neither_lost_nor_repeated(kind):
    # torchdata gives no guarantee with in_order=False. Ours resumes each worker behind its last batch; without a state
    # of the dataset's only the number of batches is known.
    make = functools.partial(loader_of, torchobj.DataLoader, kind, "new", in_order=False, sizes=[5, 20, 7])
    whole = sorted(listed(make()))
    for done in (1, 6):
        seen, iterator, state = taken(make(), done)
        iterator._shutdown_workers()
        resumed = make()
        resumed.load_state_dict(state)
        rest = listed(resumed)
        if kind is Sharded:
            assert len(seen) + len(rest) == len(whole)
        else:
            assert sorted(seen + rest) == whole
