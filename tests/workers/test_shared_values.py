"""The epoch, counters and flags that a dataset shares with its workers."""

import concurrent.futures
import multiprocessing
import pickle

import pytest
import torch

from torchobj.workers import process
from torchobj.workers.shared_values import SharedCounter, SharedEpoch

ADDED = 2000


class Counting(torch.utils.data.Dataset):
    """Adds to its counter for each sample."""

    def __init__(self):
        self.counter = SharedCounter()

    def __len__(self):
        return ADDED

    def __getitem__(self, index):
        self.counter.add()
        return index


@pytest.mark.parametrize("context", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_workers_of_several_loaders_with_the_same_numbers_lose_no_count(context):
    data = Counting()
    settings = {"batch_size": 50, "num_workers": 2, "multiprocessing_context": context}
    loaders = [iter(torch.utils.data.DataLoader(data, **settings)) for _ in range(2)]
    for _ in zip(*loaders, strict=True):
        pass
    assert data.counter.total() == 2 * ADDED


def test_threads_lose_no_count():
    counter = SharedCounter()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: counter.add(), range(ADDED)))
    assert counter.total() == ADDED


def add_and_return_total(counter, queue):
    counter.add()
    queue.put(counter.total())


def test_a_copy_in_a_process_that_is_no_worker_counts_for_itself():
    counter = SharedCounter()
    counter.add()
    copy = pickle.loads(pickle.dumps(counter))
    copy.add()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=add_and_return_total, args=(counter, queue))
    child.start()
    assert queue.get() == 2
    child.join()
    assert (counter.total(), copy.total()) == (1, 2)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_ranks_that_are_started_by_multiprocessing_count_for_themselves(method):
    counter, context = SharedCounter(), multiprocessing.get_context(method)
    queue = context.Queue()
    for _ in range(2):
        rank = context.Process(target=add_and_return_total, args=(counter, queue))
        rank.start()
        assert queue.get() == 1
        rank.join()
    assert counter.total() == 0


def begin_passes(epoch, loader, together, queue):
    process.in_worker = lambda: True
    found = []
    for number in range(200):
        together.wait(30)
        found.append(epoch.of_pass(hash((loader, number)), 2))
    queue.put((loader, found))


def test_the_workers_of_loaders_that_start_at_once_agree_on_each_epoch():
    epoch, context = SharedEpoch(), multiprocessing.get_context("fork")
    queue, together = context.Queue(), context.Barrier(4)
    workers = [context.Process(target=begin_passes, args=(epoch, loader, together, queue)) for loader in (1, 2) * 2]
    for worker in workers:
        worker.start()
    found = sorted(queue.get() for _ in workers)
    assert found[0] == found[1] and found[2] == found[3]
    for worker in workers:
        worker.join()


def test_each_kind_of_warning_has_a_flag_of_its_own():
    epoch = SharedEpoch()
    kinds = ["decode", "division", "uneven", "repeated", "no samples"]
    assert [epoch.is_first(kind) for kind in kinds] == [True] * 5
    assert [epoch.is_first(kind) for kind in kinds] == [False] * 5
    assert epoch.get() == 0
