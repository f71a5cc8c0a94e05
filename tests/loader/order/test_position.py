"""Resume in mid-epoch: the samples after a saved state are those of an uninterrupted run."""

import copy
import itertools
import pickle
import random

import pytest
import torch
import torchdata.stateful_dataloader
from torch.utils.data import DistributedSampler

import torchobj
from tests.support.long_tables import often
from tests.support.orders import COUNT, KINDS, dataset, elastic, gained, loader_of, number_of, workers
from tests.support.prefetching import all_free, stats
from tests.support.stateful import ItsOwnIterator
from torchobj.datasets.iterable import ObjectIterableDataset
from torchobj.exceptions import ConfigError
from torchobj.loader.lookahead import Lookahead
from torchobj.warn_once import PROCESS

pytestmark = pytest.mark.providers("s3", "gs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objects")
    for number in range(COUNT):
        (folder / f"k{number:02}").write_bytes(bytes([number]) * (100 + number))
    return folder


def run(loader, epochs, stop=None, saved=None):
    """Returns the batches of each epoch, and the state saved after `stop`, an epoch and a number of batches."""
    found = []
    for epoch in epochs:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        found.append([])
        for number, batch in enumerate(loader, 1):
            found[-1].append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
            if (epoch, number) == stop:
                saved.append((pickle.loads(pickle.dumps(loader.state_dict())), torch.get_rng_state()))
    return found


def with_workers(kinds, *both):
    """Each kind without workers, and some, and `both`, with new and with persistent ones; the rest is in the matrix."""
    for number, kind in enumerate(kinds):
        yield kind, 0
        for count, turn in ((2, 0), ("persistent", 1)):
            is_often = kind in both or number % 8 == turn
            yield pytest.param(kind, count, marks=[] if is_often else pytest.mark.matrix)


@pytest.mark.parametrize("epochs", [3, pytest.param(4, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(("kind", "count"), list(with_workers(KINDS, "generator", "elastic", "torchdata")))
def test_a_resumed_run_equals_the_uninterrupted_run_for_later_epochs_too(folder, kind, count, epochs):
    torch.manual_seed(11)
    saved = []
    whole = run(loader_of(folder, kind, **workers(count)), range(epochs), (1, 5), saved)
    (state, rng), before = saved[0], stats()
    # Another process has other random numbers until the training restores its own.
    torch.manual_seed(99)
    # Persistent workers draw one number in all, others one an epoch; and torchdata's sampler draws for each of the two
    # iterators that torch makes for workers.
    other = count if kind == "torchdata" else {0: 2, 2: 0}.get(count, count)
    resumed = loader_of(folder, kind, **workers(other))
    resumed.load_state_dict(state)
    torch.set_rng_state(rng)
    assert run(resumed, range(1, epochs)) == [whole[1][5:], *whole[2:]]
    # Skipped samples were not read: at most the epoch after the last one was announced too.
    taken = sum(len(batch) if isinstance(batch, list) else 1 for epoch in [whole[1][5:], *whole[2:]] for batch in epoch)
    assert gained(before, "objects") <= taken + COUNT
    del resumed
    assert all_free()


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *((kind, 0) for kind in ("generator", "RandomSampler", "elastic", "distributed", "stateful", "torchdata")),
        *((kind, 2) for kind in ("generator", "elastic", "torchdata")),
        *(pytest.param(kind, 2, marks=pytest.mark.matrix) for kind in ("RandomSampler", "distributed", "stateful")),
    ],
)
def test_a_state_before_the_first_batch_and_one_of_an_epochs_end(folder, kind, count):
    torch.manual_seed(11)
    first = loader_of(folder, kind, **workers(count))
    before = first.state_dict()
    whole = run(first, [0])
    end = first.state_dict()
    assert not before["within_epoch"]
    assert not end["within_epoch"]
    whole += run(first, [1])
    for state, expected in ((before, whole), (end, whole[1:])):
        resumed = loader_of(folder, kind, **workers(count))
        resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert run(resumed, range(2 - len(expected), 2)) == expected


@pytest.mark.parametrize("kind", ["generator", "shuffled", "elastic"])
@pytest.mark.parametrize("count", [0, 2])
def test_a_state_of_an_iterator_before_its_first_batch(folder, kind, count):
    torch.manual_seed(11)
    first = loader_of(folder, kind, **workers(count))
    iterator = iter(first)
    state, rng = first.state_dict(), torch.get_rng_state()
    whole = [batch.tolist() for batch in iterator]
    resumed = loader_of(folder, kind, **workers(count))
    resumed.load_state_dict(state)
    if count:
        # The order is drawn without changing the generator.
        torch.manual_seed(99)
    else:
        torch.set_rng_state(rng)
    if (kind, count) != ("shuffled", 0):
        assert [batch.tolist() for batch in resumed] == whole


@pytest.mark.parametrize("kind", ["generator", "elastic", "iterable"])
def test_an_unused_iterator_does_not_consume_the_state(folder, kind):
    def loader():
        return torchobj.DataLoader(Counting(), batch_size=3) if kind == "iterable" else loader_of(folder, kind)

    first = loader()
    iterator = iter(first)
    next(iterator)
    state = first.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    iter(resumed)
    assert resumed.state_dict() == state
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in iterator]
    assert not resumed.state_dict()["within_epoch"]


def test_a_state_after_the_last_batch_leaves_nothing_of_the_epoch(folder):
    loader = loader_of(folder, "elastic")
    for _ in loader:
        state = loader.state_dict()
    assert state["batches"] == 8
    assert state["within_epoch"]
    resumed = loader_of(folder, "elastic")
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert list(resumed) == []
    assert len(list(resumed)) == len(resumed) == 8


def test_the_state_counts_returned_batches_and_not_those_of_workers(folder):
    loader = loader_of(folder, "elastic", num_workers=2, prefetch_factor=3)
    iterator = iter(loader)
    for number in range(1, 8):
        next(iterator)
        state = loader.state_dict()
        assert (state["batches"], state["sampler"]["done"]) == (number, number * 8)


@pytest.mark.parametrize("kind", ["generator", "elastic", "stateful", "weighted"])
def test_a_state_is_saved_and_resumed_repeatedly(folder, kind):
    torch.manual_seed(11)
    [whole] = run(loader_of(folder, kind), [0])
    found, state = [], None
    while len(found) < len(whole):
        torch.manual_seed(11)
        loader = loader_of(folder, kind, num_workers=len(found) % 2)
        if state is not None:
            loader.load_state_dict(state)
        for batch in itertools.islice(loader, 3):
            found.append(batch.tolist())
            state = loader.state_dict()
    assert found == whole


def broken(reader):
    number = bytes(reader)[0]
    if number == 9:
        raise ValueError("nine")
    return number


@pytest.mark.parametrize("count", [0, 2])
def test_a_failed_batch_is_not_repeated_after_a_resume(folder, count):
    data = torchobj.ObjectMapDataset(f"file://{folder}/", transform=broken)
    loader = torchobj.DataLoader(data, batch_size=4, num_workers=count)
    iterator = iter(loader)
    next(iterator), next(iterator)
    with pytest.raises(ValueError, match="nine"):
        next(iterator)
    assert loader.state_dict()["batches"] == 3
    resumed = torchobj.DataLoader(data, batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    assert next(iter(resumed)).tolist() == [12, 13, 14, 15]
    assert next(iterator).tolist() == [12, 13, 14, 15]


def samples_of(folder, ranks, state, size, epoch, **settings):
    """Returns what each rank yields, the first batches being `size` samples, and the last rank's state after `stop`."""
    found = []
    for rank in range(ranks):
        loader = torchobj.DataLoader(
            dataset(folder), batch_size=size, sampler=elastic(folder, ranks, rank, seed=2, **settings)
        )
        loader.sampler.set_epoch(epoch)
        if state is not None:
            loader.load_state_dict(state)
        found.append(loader)
    return found


@pytest.mark.parametrize("epochs", [4, pytest.param(20, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("drop_last", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_changing_numbers_of_ranks_read_each_sample_once(folder, drop_last, epochs):
    numbers = random.Random(5)
    order = torchobj.ElasticDistributedSampler(range(COUNT), 1, 0, seed=2)
    for epoch in range(epochs):
        order.set_epoch(epoch)
        rest, state = list(order), None
        for ranks in (1, 2, 3):
            size = numbers.choice([1, 2, 5])
            loaders = samples_of(folder, ranks, state, size, epoch, drop_last=drop_last)
            stop = numbers.randint(0, len(rest) // (size * ranks) // 2) if ranks < 3 else None
            rounds = []
            for loader in loaders:
                batches = []
                for batch in itertools.islice(loader, stop) if stop is not None else loader:
                    batches += batch.tolist()
                rounds.append(batches)
            found = [index for round_ in zip(*rounds, strict=True) for index in round_]
            if stop is None:
                left = len(rest) % ranks
                expected = rest[: len(rest) - left] if drop_last else rest + list(order)[: -len(rest) % ranks]
                assert found == expected
                assert drop_last or set(rest) <= set(found)
            else:
                states = [loader.state_dict() for loader in loaders]
                assert all(each["sampler"] == states[0]["sampler"] for each in states)
                assert found == rest[: stop * size * ranks]
                rest, state = rest[stop * size * ranks :], states[0]


def test_an_epoch_other_than_the_states_starts_from_its_beginning(folder):
    for kind in ("elastic", "distributed"):
        loader = loader_of(folder, kind)
        next(iter(loader))
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        resumed = loader_of(folder, kind)
        resumed.load_state_dict(state)
        resumed.sampler.set_epoch(5)
        assert len(list(resumed)) == len(resumed)


def test_an_invalid_state_or_one_of_another_loader_is_refused_with_the_name_of_its_field(folder):
    def state_of(kind):
        loader = loader_of(folder, kind)
        iterator = iter(loader)
        next(iterator)
        return loader.state_dict()

    shuffled, elastics = state_of("generator"), state_of("elastic")
    for kind, state, named in [
        ("generator", 5, "state=5"),
        ("generator", {}, "version=None"),
        ("generator", shuffled | {"version": 3}, "version=3"),
        ("generator", shuffled | {"version": 1}, "version=1"),
        ("generator", shuffled | {"batches": -1}, "batches=-1"),
        ("generator", shuffled | {"within_epoch": 1}, "within_epoch=1"),
        ("generator", shuffled | {"rng": None}, "rng=None"),
        ("generator", {name: value for name, value in shuffled.items() if name != "epoch"}, "epoch=None"),
        ("RandomSampler", shuffled, "batch_size=4"),
        ("distributed", state_of("distributed") | {"num_replicas": 3}, "num_replicas=3"),
        ("elastic", shuffled, "order='RandomSampler'"),
        ("generator", elastics, "order='ElasticDistributedSampler'"),
        ("generator", shuffled | {"sampler": {"done": 3}}, "sampler={'done': 3}"),
        ("generator", shuffled | {"rng": []}, "rng="),
        ("elastic", elastics | {"sampler": elastics["sampler"] | {"length": 7}}, "length=7"),
    ]:
        loader = loader_of(folder, kind)
        with pytest.raises(ConfigError, match=named):
            loader.load_state_dict(state)
            next(iter(loader))


class Counting(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(20))


@pytest.mark.parametrize("count", [0, 2])
def test_returned_batches_of_an_iterable_dataset_are_read_again_and_dropped(count, caplog):
    loader = torchobj.DataLoader(Counting(), batch_size=3, num_workers=count)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    resumed = torchobj.DataLoader(Counting(), batch_size=3, num_workers=count)
    resumed.load_state_dict(state)
    assert "2 batches are read again and dropped" in caplog.text
    assert [batch.tolist() for batch in resumed] == rest
    assert not loader.state_dict()["within_epoch"]
    with pytest.raises(ConfigError, match="num_workers="):
        torchobj.DataLoader(Counting(), batch_size=3, num_workers=1).load_state_dict(state)


def test_a_user_defined_sampler_without_a_state_is_resumed_with_a_warning(folder, caplog):
    for kind in ("shuffled", "eager"):
        assert not caplog.records
        loader = loader_of(folder, kind)
        next(iter(loader))
        loader_of(folder, kind).load_state_dict(loader.state_dict())
    assert "Eager has no state_dict: its order is drawn again and the first 1 batches" in caplog.text


class AheadStateful(torchdata.stateful_dataloader.StatefulDataLoader):
    """torchdata's loader on top of the look-ahead."""

    ahead = None

    @property
    def _index_sampler(self):
        sampler = super()._index_sampler
        if self.ahead is None:
            self.ahead = Lookahead(sampler, self.dataset)
        return self.ahead


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", ["generator", "elastic", "elastic, no batches", "batch_sampler", "distributed"])
@pytest.mark.parametrize("count", often(1, [0, 2]))
def test_torchdatas_loader_resumes_and_announces_only_the_rest(folder, kind, count):
    def loader():
        return AheadStateful(dataset(folder), **KINDS[kind](folder), num_workers=count)

    first, rest, state = loader(), [], None
    for number, batch in enumerate(first, 1):
        if state is not None:
            rest.append(batch if isinstance(batch, int) else batch.tolist())
        if number == 3:
            state = copy.deepcopy(first.state_dict())
    del first
    assert all_free()
    before = stats()
    resumed = loader()
    resumed.load_state_dict(state)
    assert [batch if isinstance(batch, int) else batch.tolist() for batch in resumed] == rest
    assert gained(before, "misses") == 0
    left = sum(1 if isinstance(batch, int) else len(batch) for batch in rest)
    followed = 30 if kind == "elastic, no batches" else COUNT if kind == "batch_sampler" else 0
    assert gained(before, "objects") <= left + followed
    del resumed
    assert all_free()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_an_iterable_continues_in_the_epoch_and_order_of_its_state(tmp_path, workers):
    for number in range(40):
        (tmp_path / f"{number:02}").write_bytes(bytes([number]))

    def make(batch_size=4):
        data = ObjectIterableDataset(f"file://{tmp_path}/", transform=number_of, shuffle=True, enable_sharding=True)
        return data, torchobj.DataLoader(data, batch_size=batch_size, num_workers=workers)

    data, loader = make()
    data.set_epoch(3)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(5)]
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    assert sorted(number for batch in seen + rest for number in batch) == list(range(40))
    _, again = make()
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == rest
    if workers:
        with pytest.raises(ConfigError, match="batch_size=4: in the state; now 8"):
            make(8)[1].load_state_dict(state)


def test_a_state_of_another_order_is_refused(tmp_path):
    state = torchobj.DataLoader(range(40), batch_size=4, shuffle=True, lookahead=0)
    next(iter(state))
    for other, field in [
        (torchobj.DataLoader(range(20), batch_size=4, shuffle=True, lookahead=0), "length=40"),
        (torchobj.DataLoader(range(40), batch_size=4, shuffle=True, drop_last=True, lookahead=0), "drop_last=False"),
    ]:
        with pytest.raises(ConfigError, match=field):
            other.load_state_dict(state.state_dict())


@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_persistent_workers_resume_at_any_position_with_the_orders_and_random_numbers_of_an_uninterrupted_run(
    kind, generator
):
    def make(seed):
        return torchobj.DataLoader(
            list(range(20)) if kind == "map" else Counting(),
            batch_size=7,
            num_workers=1,
            persistent_workers=True,
            shuffle=kind == "map" or None,
            generator=torch.Generator().manual_seed(seed) if generator else None,
        )

    torch.manual_seed(11)
    loader, saved, batches = make(5), [], []
    for _ in range(3):
        for batch in loader:
            batches.append(batch.tolist())
            saved.append((len(batches), loader.state_dict(), torch.get_rng_state()))
        saved.append((len(batches), loader.state_dict(), torch.get_rng_state()))
    at_end = torch.get_rng_state()
    for done, state, rng in saved:
        resumed, found = make(99), []
        torch.set_rng_state(rng)
        resumed.load_state_dict(state)
        while len(found) < len(batches) - done:
            found += [batch.tolist() for batch in resumed]
        assert found == batches[done:]
        assert torch.equal(torch.get_rng_state(), at_end)


def not_in_order(kind, workers):
    settings = {"shuffle": True} if kind == "map" else {}
    data = {"map": range(40), "iterable": Counting(), "with a state": ItsOwnIterator([40])}[kind]
    return torchobj.DataLoader(data, batch_size=2, num_workers=workers, in_order=False, lookahead=0, **settings)


@pytest.mark.parametrize(
    ("kind", "workers", "warns"),
    [
        ("map", 2, True),
        ("map", 0, False),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in [("map", 1, False), ("iterable", 2, True), ("with a state", 2, False)]
        ),
    ],
)
def test_a_state_of_batches_that_are_not_in_order_is_warned_of_once(kind, workers, warns, caplog, monkeypatch):
    monkeypatch.setattr(PROCESS, "_once", {})

    def lines(how):
        return sum(f"in_order=False: a state of the middle of an epoch was {how}" in text for text in caplog.messages)

    loader = not_in_order(kind, workers)
    loader.state_dict()
    iterator = iter(loader)
    loader.state_dict()
    assert not lines("saved")
    next(iterator)
    states = [loader.state_dict() for _ in range(2)]
    assert (lines("saved"), lines("loaded")) == (int(warns), 0)
    for state in states:
        not_in_order(kind, workers).load_state_dict(state)
    assert (lines("saved"), lines("loaded")) == (int(warns), int(warns))
    list(iterator)
    assert not loader.state_dict()["within_epoch"]
