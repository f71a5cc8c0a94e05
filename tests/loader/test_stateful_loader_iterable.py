"""The guarantees of torchdata's StatefulDataLoader for iterable datasets, checked on ours and against torchdata."""

import functools
import itertools

import pytest
import torch

import torchobj
from tests.support.stateful import (
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

#: The number of samples of each worker: one has none, and the others end at different times.
SIZES = [0, 20, 7]
KINDS = [Sharded, ShardedWithState, ShardedWithIterators, ItsOwnIterator]


def loader_of(loader, kind, workers, sizes=SIZES, **settings):
    settings = {"batch_size": 4, "persistent_workers": workers == "persistent"} | settings
    return loader(kind(sizes), num_workers=len(sizes) if workers else 0, collate_fn=same, **settings)


def table(kind, workers, **settings):
    """Returns factories for our loader and torchdata's, and the batches of a pass, which are the same for both."""
    ours, theirs = (functools.partial(loader_of, loader, kind, workers, **settings) for loader in LOADERS)
    whole = listed(ours())
    assert whole == listed(theirs())
    return ours, theirs, whole


@pytest.mark.parametrize("batch_size", [None, 1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_without_workers_resumes_at_every_position_as_in_torchdata(kind, batch_size):
    ours, theirs, whole = table(kind, 0, batch_size=batch_size)
    for done in range(len(whole) + 1):
        rest = after(ours, done)
        assert rest[0] == whole[done:]
        assert rest[1] == whole
        # torchdata has a dataset that is its own iterator begin a new pass where the one before it ended.
        assert after(theirs, done, epochs=1) == rest[:1]


@pytest.mark.parametrize(("workers", "positions"), [("new", [0, 1, 4, 6]), ("persistent", [2])])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_with_uneven_workers_resumes_as_in_torchdata(kind, workers, positions):
    ours, theirs, whole = table(kind, workers)
    for done in positions:
        assert after(ours, done, epochs=1) == [whole[done:]]
    assert after(theirs, done, epochs=1) == [whole[done:]]


@pytest.mark.parametrize("kind", KINDS)
def test_passes_after_a_resumed_one_are_complete(kind):
    ours, _, whole = table(kind, "persistent")
    assert after(ours, 3, epochs=3) == [whole[3:], whole, whole]


@pytest.mark.parametrize("kind", [Sharded, ShardedWithState, ShardedWithIterators])
def test_unbatched_samples_of_uneven_workers_resume_as_in_torchdata(kind):
    ours, theirs, whole = table(kind, "new", batch_size=None)
    for done in (10, len(whole)):
        assert after(ours, done, epochs=1) == after(theirs, done, epochs=1) == [whole[done:]]


@pytest.mark.parametrize("workers", [0, "new"])
def test_drop_last_drops_the_same_samples_of_each_worker_after_a_resume(workers):
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
def test_random_numbers_continue_from_the_generator_state_of_an_iterator(workers):
    for loader, done in itertools.product(LOADERS, [0, 5] if workers == 0 else [6]):
        first = loader_of(loader, ShardedAndDrawn, workers)
        _, iterator, state = taken(first, done)
        rest = [*iterator]
        # Another process has other random numbers.
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
def test_a_state_before_the_first_batch_resumes_a_complete_pass(kind, workers):
    fresh = loader_of(torchobj.DataLoader, kind, workers)
    before = fresh.state_dict()
    _, iterator, begun = taken(fresh, 0)
    whole = [*iterator]
    for state in (before, begun):
        # Also loaded into the loader that it came from.
        for loader in (loader_of(torchobj.DataLoader, kind, workers), fresh):
            loader.load_state_dict(state)
            assert listed(loader) == whole


@pytest.mark.parametrize(("workers", "batch_size"), [(0, None), (0, 4), ("new", 4), ("persistent", None)])
@pytest.mark.parametrize("kind", [Sharded, ShardedWithState, ShardedWithIterators])
def test_a_state_of_the_end_of_a_pass_starts_the_next_pass_in_a_loader_at_another_position(kind, workers, batch_size):
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
def test_a_state_soon_after_a_resume_has_the_positions_of_idle_workers(kind, done):
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
def test_batches_returned_out_of_order_are_neither_lost_nor_repeated(kind):
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
