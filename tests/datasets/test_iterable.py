"""Iterable datasets: a known order, read ahead by one process, split over ranks and workers."""

import itertools
import multiprocessing
import os
import pickle
import signal

import pytest
import torch
import torchdata.stateful_dataloader
from torch.utils.data import DataLoader

import torchobj
from tests.support import warm_python
from tests.support.iterables import (
    COUNT,
    body,
    dataset,
    flat,
    number_and_worker,
    number_of,
    numbers,
    slow,
    write_objects,
)
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.prefetching import all_free, eventually, stats
from torchobj import exceptions
from torchobj.ranks.sharding import shuffled

# test_each_store.py reads from GCS in each run.
pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)


@pytest.fixture
def folder(tmp_path):
    return write_objects(tmp_path)


WORKERS = [
    {"num_workers": 0},
    {"num_workers": 2, "multiprocessing_context": "fork"},
]

SPAWNED = {"num_workers": 2, "multiprocessing_context": "spawn"}


@pytest.mark.parametrize("settings", [*WORKERS, pytest.param(SPAWNED, marks=pytest.mark.matrix)], ids=str)
def test_each_worker_announces_its_own_share_and_yields_it_in_order(folder, settings):
    before = stats()
    loader = torchobj.DataLoader(dataset(folder, number_and_worker), batch_size=None, **settings)
    found = list(loader)
    count = max(1, settings["num_workers"])
    for worker in range(count):
        assert [number for number, of in found if of == worker] == list(range(worker, COUNT, count))
    after = stats()
    assert after["objects"] - before["objects"] == COUNT
    # The objects that are requested first cannot be announced in time.
    assert after["misses"] - before["misses"] <= 32 * count
    assert after["hits"] + after["late"] - before["hits"] - before["late"] >= COUNT - 32 * count
    assert all_free(), stats()


@pytest.mark.parametrize("loader_class", [DataLoader, torchobj.DataLoader])
def test_raw_readers_reach_the_trainer_without_a_copy(folder, loader_class):
    samples = dataset(folder, None)
    assert len(samples.manifest) == COUNT
    batches = list(loader_class(samples, batch_size=16, num_workers=2))
    found = {url[-3:]: bytes(batch[i].numpy()) for batch in batches for i, url in enumerate(batch.urls)}
    assert found == {f"{number:03}": body(number) for number in range(COUNT)}
    del batches
    assert all_free(), stats()


def test_our_loader_lists_once_for_forked_workers(filled_bucket, control):
    samples = filled_bucket.iterable_dataset(filled_bucket.url, config=filled_bucket.config, transform=number_of)
    control.clear_requests()
    loader = torchobj.DataLoader(samples, batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert sorted(numbers(loader)) == sorted([*range(20), *range(20)])
    assert [request.operation for request in control.requests()].count("ListObjectsV2") == 1


@pytest.fixture
def filled_bucket(bucket):
    for number in range(20):
        bucket.write(f"k{number:03}", body(number))
    return bucket


def test_a_bucket_is_yielded_in_the_order_of_its_keys(filled_bucket):
    listed = filled_bucket.keys()
    settings = {"config": filled_bucket.config, "transform": lambda reader: (reader.key, reader.read())}
    found = list(filled_bucket.iterable_dataset(filled_bucket.url, **settings))
    assert found == [(key, body(int(key[-3:]))) for key in listed]
    filtered = filled_bucket.iterable_dataset(filled_bucket.url, glob="k01*", limit=5, **settings)
    assert [key for key, _ in filtered] == listed[10:15]


def test_the_first_pass_yields_while_it_lists_and_lists_once(bucket, control):
    keys = [f"k{number:04}" for number in range(2100)]
    store = torchobj.Store(bucket.url, config=bucket.config)
    for key in keys:
        store.put(key, key.encode())
    settings = {"config": bucket.config, "transform": lambda reader: reader.read().decode()}
    control.clear_requests()

    def listings():
        return [request.operation for request in control.requests()].count("ListObjectsV2")

    samples = bucket.iterable_dataset(bucket.url, **settings)
    iterator = iter(samples)
    assert next(iterator) == keys[0]
    # The first page is returned before others are requested.
    assert listings() <= 2
    state = samples.state_dict()
    assert [keys[0], *iterator] == keys
    assert list(samples) == keys
    assert len(samples.manifest) == len(keys)
    # Three pages, and requests for ranges that turned out to have no key.
    once = listings()
    assert 3 <= once <= 8
    again = bucket.iterable_dataset(bucket.url, **settings)
    again.load_state_dict(state | {"done": 1500})
    assert list(again) == keys[1500:]
    again.load_state_dict(state | {"done": 2000})
    assert list(again) == keys[2000:]
    assert once + 3 <= listings() <= 16
    assert list(bucket.iterable_dataset(bucket.url, limit=1100, **settings)) == keys[:1100]
    assert all_free(), stats()


def test_a_failed_listing_is_the_error_of_the_first_sample(bucket):
    missing = bucket.iterable_dataset(f"{bucket.url}-missing/x/", config=bucket.config)
    with pytest.raises(exceptions.BucketNotFoundError, match="NoSuchBucket|bucket does not exist"):
        list(missing)


def test_the_order_depends_on_seed_and_epoch_only(folder):
    def epoch(samples, number, workers):
        samples.set_epoch(number)
        return numbers(torchobj.DataLoader(samples, batch_size=8, num_workers=workers))

    samples = dataset(folder, shuffle=True, seed=3)
    first = epoch(samples, 0, 0)
    assert first != sorted(first)
    assert epoch(samples, 0, 0) == first == list(samples)
    assert epoch(dataset(folder, shuffle=True, seed=3), 0, 0) == first
    others = [epoch(samples, 1, 0), epoch(dataset(folder, shuffle=True, seed=4), 0, 0)]
    assert first not in others
    assert others[0] != others[1]
    assert epoch(samples, 1, 2) == epoch(samples, 1, 2)
    assert all(sorted(found) == list(range(COUNT)) for found in (*others, first, epoch(samples, 1, 2)))


@pytest.mark.parametrize("context", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_persistent_workers_receive_a_new_epoch(folder, context):
    samples = dataset(folder, shuffle=True)
    loader = torchobj.DataLoader(
        samples, batch_size=8, num_workers=2, persistent_workers=True, multiprocessing_context=context
    )
    epochs = []
    for epoch in (0, 1, 1):
        samples.set_epoch(epoch)
        epochs.append(numbers(loader))
    assert epochs[0] != epochs[1]
    assert epochs[1] == epochs[2]
    assert all(sorted(found) == list(range(COUNT)) for found in epochs)


def sets_epoch(samples, epoch, queue):
    samples.set_epoch(epoch)
    queue.put(list(itertools.islice(samples, 5)))


@pytest.mark.parametrize("context", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_a_copy_in_another_rank_has_its_own_epoch(folder, context):
    multi = multiprocessing.get_context(context)
    samples = dataset(folder, shuffle=True)
    samples.set_epoch(0)
    before = list(itertools.islice(samples, 5))
    queue = multi.Queue()
    process = multi.Process(target=sets_epoch, args=(samples, 5, queue))
    process.start()
    theirs = queue.get(timeout=150)
    process.join(150)
    assert list(itertools.islice(samples, 5)) == before != theirs
    copy = pickle.loads(pickle.dumps(samples))
    copy.set_epoch(5)
    assert list(itertools.islice(copy, 5)) == theirs
    assert list(itertools.islice(samples, 5)) == before


@pytest.mark.parametrize("persistent", [False, True])
def test_a_break_in_mid_epoch_leaks_nothing(folder, persistent):
    loader = torchobj.DataLoader(dataset(folder, None), batch_size=4, num_workers=2, persistent_workers=persistent)
    for _ in range(4):
        for number, _batch in enumerate(loader):
            if number == 3:
                break
        # The announcements of exited workers are cancelled within a second.
        assert eventually(lambda: stats()["announced"] <= COUNT), stats()
    assert sum(len(batch) for batch in loader) == COUNT
    del loader, _batch
    assert all_free(), stats()


def test_a_dropped_pass_in_this_process_leaks_nothing(folder):
    samples = dataset(folder)
    for _ in range(10):
        iterator = iter(samples)
        assert next(iterator) == 0
        assert stats()["announced"] > 0
        iterator.close()
    assert list(iterator) == []
    assert stats()["announced"] == 0
    assert all_free(), stats()


def test_announcements_of_a_killed_worker_are_cancelled(folder):
    loader = torchobj.DataLoader(dataset(folder, slow), batch_size=4, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    assert stats()["announced"] > 0
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    with pytest.raises((RuntimeError, ConnectionError)):
        list(iterator)
    del iterator
    assert all_free(), stats()
    quick = torchobj.DataLoader(dataset(folder), batch_size=4, num_workers=2)
    assert sorted(numbers(quick)) == list(range(COUNT))


@pytest.mark.parametrize("done", [0, 1, 31, 150, COUNT])
def test_a_pass_is_resumed_by_load_state_dict(folder, done):
    samples = dataset(folder, shuffle=True, seed=9)
    samples.set_epoch(4)
    everything = list(samples)
    iterator = iter(samples)
    assert list(itertools.islice(iterator, done)) == everything[:done]
    state = pickle.loads(pickle.dumps(samples.state_dict()))
    again = dataset(folder, shuffle=True)
    again.load_state_dict(state)
    assert again.state_dict() == state
    # As training loops do.
    again.set_epoch(4)
    assert list(again) == everything[done:]
    # Applied only once.
    assert list(again) == everything
    assert list(iterator) == everything[done:]


def test_a_new_epoch_and_its_state_start_at_the_beginning(folder):
    samples = dataset(folder, shuffle=True)
    list(itertools.islice(iter(samples), 10))
    state = samples.state_dict()
    samples.set_epoch(1)
    assert (samples.state_dict()["epoch"], samples.state_dict()["done"]) == (1, 0)
    again = dataset(folder, shuffle=True)
    again.load_state_dict(state)
    again.set_epoch(1)
    assert len(list(again)) == COUNT


def test_a_state_of_other_objects_is_refused(folder):
    samples = dataset(folder)
    assert len(samples.manifest) == COUNT
    list(itertools.islice(iter(samples), 10))
    (folder / "k999").write_bytes(b"more")
    again = dataset(folder)
    assert len(again.manifest) == COUNT + 1
    again.load_state_dict(samples.state_dict())
    with pytest.raises(exceptions.ConfigError, match=r"objects=300 \(now 301\)"):
        iter(again)


@pytest.mark.parametrize("settings", [{"shuffle": True}, {"uneven": "pad"}])
@pytest.mark.parametrize("listed", [False, True])
def test_a_state_of_another_order_or_share_is_refused(folder, settings, listed):
    for mine, other in (({}, settings), (settings, {})):
        samples, again = dataset(folder, **mine), dataset(folder, **other)
        if listed:
            assert len(samples.manifest) == len(again.manifest) == COUNT
        list(itertools.islice(iter(samples), 10))
        again.load_state_dict(samples.state_dict())
        with pytest.raises(exceptions.ConfigError, match="cannot be resumed"):
            iter(again)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize(
    ("settings", "batches"),
    [*itertools.product(WORKERS, [0, 7, 37]), pytest.param(SPAWNED, 7, marks=pytest.mark.matrix)],
    ids=str,
)
def test_a_stateful_loader_resumes_exactly(folder, settings, batches):
    def loader():
        samples = dataset(folder, shuffle=True, seed=2)
        assert len(samples.manifest) == COUNT
        samples.set_epoch(3)
        return torchdata.stateful_dataloader.StatefulDataLoader(samples, batch_size=8, **settings)

    first = loader()
    iterator = iter(first)
    begun = [next(iterator).tolist() for _ in range(batches)]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    rest = [batch.tolist() for batch in iterator]
    assert sorted(flat(begun + rest)) == list(range(COUNT))
    again = loader()
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == rest
    assert [batch.tolist() for batch in again] == begun + rest


@pytest.mark.providers("s3")
def test_datasets_of_the_classmethods_are_shuffled_by_their_attributes(filled_bucket):
    uris = [f"{filled_bucket.url}/k{number:03}" for number in range(20)]
    samples = filled_bucket.iterable_dataset.from_objects(
        uris, s3client_config=filled_bucket.config, transform=number_of
    )
    assert list(samples) == list(range(20))
    samples.shuffle, samples.seed = True, 5
    samples.set_epoch(0)
    assert list(samples) == shuffled(20, 5, 0).tolist()
    samples.uneven = "pad"
    with pytest.raises(exceptions.ConfigError, match="enable_sharding"):
        iter(samples)


def test_two_iterables_in_one_worker_do_not_cancel_each_other(folder):
    before = stats()
    loader = DataLoader(Zipped(folder), batch_size=8, num_workers=1, collate_fn=list)
    found = [pair for batch in loader for pair in batch]
    assert found == list(zip(range(COUNT), shuffled(COUNT, 0, 0), strict=True))
    after = stats()
    assert after["misses"] - before["misses"] <= 64
    assert all_free(), stats()


class Zipped(torch.utils.data.IterableDataset):
    """Alternates samples of two of our datasets."""

    def __init__(self, folder):
        self.parts = [dataset(folder), dataset(folder, shuffle=True)]
        assert all(len(part.manifest) == COUNT for part in self.parts)

    def __iter__(self):
        return zip(*self.parts, strict=True)


def test_few_large_objects_are_requested_concurrently(tmp_path):
    for number in range(40):
        with (tmp_path / f"k{number:03}").open("wb") as file:
            file.truncate(4 << 20)
    script = (
        "import sys, torchobj\n"
        "from torchobj import _torchobj\n"
        "torchobj.set_memory_budget(64 << 20)\n"
        "data = torchobj.ObjectIterableDataset(sys.argv[1], transform=lambda r: len(bytes(r)), enable_sharding=True)\n"
        "for workers in (0, 2):\n"
        "    loader = torchobj.DataLoader(data, batch_size=4, num_workers=workers)\n"
        "    assert sum(int(batch.sum()) for batch in loader) == 40 * (4 << 20)\n"
        "assert _torchobj.prefetch_stats()['over_budget'] == 0, _torchobj.prefetch_stats()\n"
    )
    warm_python.run(["-c", script, f"file://{tmp_path}/"], timeout=240, check=True)
