"""`torchobj.DataLoader`: torch's samples in torch's order, read ahead by one process for all workers."""

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import pickle
import random
import select
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, random_split

import torchobj
from tests.support import warm_python
from tests.support.long_tables import often
from tests.support.prefetching import all_free, stats
from torchobj import exceptions

pytestmark = pytest.mark.providers("s3", "gs")

COUNT = 64


def body(number):
    return f"body {number}".encode() * (1 + 53 * number)


def key_and_bytes(reader):
    return int(reader.key[-2:]), bytes(reader)


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"k{number:02}").write_bytes(body(number))
    return tmp_path


def dataset(folder, transform=key_and_bytes, **settings):
    return torchobj.ObjectMapDataset(f"file://{folder}/", transform=transform, **settings)


class Gapped(torch.utils.data.Sampler):
    """A user's own sampler."""

    def __iter__(self):
        return iter([*range(0, COUNT, 3), 5, 5, -1])

    def __len__(self):
        return len(range(0, COUNT, 3)) + 3


KINDS = {
    "in order": {"batch_size": 7},
    "shuffled": {"batch_size": 7, "shuffle": True},
    "drop_last": {"batch_size": 7, "shuffle": True, "drop_last": True},
    "sampler": {"batch_size": 5, "sampler": Gapped()},
    "weighted": {
        "batch_size": 5,
        "sampler": torch.utils.data.WeightedRandomSampler([1.0 + n for n in range(COUNT)], 100),
    },
    "batch_sampler": {"batch_sampler": torch.utils.data.BatchSampler(Gapped(), 4, drop_last=False)},
    "no batches": {"batch_size": None, "shuffle": True},
    "generator": {"batch_size": 7, "shuffle": True, "generator": True},
    "not in order": {"batch_size": 7, "shuffle": True, "in_order": False},
}


def epochs(loader_class, folder, settings, count=3):
    torch.manual_seed(11)
    if "generator" in settings:
        settings = settings | {"generator": torch.Generator().manual_seed(5)}
    loader = loader_class(dataset(folder), **settings)
    found = [[repr(batch) for batch in loader] for _ in range(count)]
    # The loop's random numbers afterwards are those of an uninterrupted generator.
    return len(loader), found, torch.rand(1).item()


# test_loader_orders.py has every kind with new and with persistent workers, and more epochs.
@pytest.mark.parametrize(
    ("kind", "workers"),
    [*((kind, 0) for kind in KINDS), *often(3, zip(KINDS, itertools.cycle(["persistent", 2]), strict=False))],
)
def test_samples_and_their_order_are_those_of_torch(folder, kind, workers):
    settings = KINDS[kind] | ({} if workers == 0 else {"num_workers": 2, "persistent_workers": workers == "persistent"})
    stock = epochs(torch.utils.data.DataLoader, folder, settings, 2)
    ours = epochs(torchobj.DataLoader, folder, settings, 2)
    if kind == "not in order":
        stock, ours = ([sorted(epoch) for epoch in found] for _, found, _ in (stock, ours))
    assert ours == stock
    assert all_free()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("context", ["forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_workers_can_be_started_by_any_method(folder, context, workers):
    settings = {"batch_size": 7, "shuffle": True, "num_workers": workers, "multiprocessing_context": context}
    stock = epochs(torch.utils.data.DataLoader, folder, {**settings, "multiprocessing_context": "fork"}, 1)
    before = stats()
    assert epochs(torchobj.DataLoader, folder, settings, 1) == stock
    after = stats()
    assert after["hits"] + after["late"] - before["hits"] - before["late"] == COUNT
    assert after["misses"] == before["misses"]


def test_announced_objects_are_taken_from_the_prefetcher(folder):
    before = stats()
    loader = torchobj.DataLoader(dataset(folder), batch_size=4, shuffle=True, num_workers=2)
    assert sum(len(keys) for keys, _ in loader) == COUNT
    after = stats()
    assert after["misses"] == before["misses"]
    assert after["objects"] - before["objects"] == COUNT


def test_a_sampler_that_shares_its_generator_with_the_loop_is_drawn_as_by_torch(folder):
    def run(loader_class, **settings):
        generator = torch.Generator().manual_seed(3)
        sampler = torch.utils.data.RandomSampler(range(COUNT), replacement=True, num_samples=100, generator=generator)
        loader = loader_class(dataset(folder), batch_size=10, sampler=sampler, **settings)
        return [(keys.tolist(), torch.rand(1, generator=generator).item()) for keys, _ in loader]

    assert run(torchobj.DataLoader, lookahead=0) == run(torch.utils.data.DataLoader)


def test_objects_of_torchs_dataset_wrappers_are_announced(folder):
    plain = dataset(folder)
    first, second = random_split(plain, [40, 24], generator=torch.Generator().manual_seed(0))
    wrapped = {
        "subset": Subset(plain, [5, 3, 3, 60]),
        "split": second,
        "subset of a subset": Subset(first, list(range(0, 40, 2))),
        "concatenated": ConcatDataset([second, plain]),
        "stacked": StackDataset(plain, dataset(folder)),
        "partly ours": ConcatDataset([[(0, b"x")] * 3, plain]),
    }
    for name, outer in wrapped.items():
        before = stats()
        found = list(torchobj.DataLoader(outer, batch_size=None, shuffle=True, num_workers=1))
        assert len(found) == len(outer), name
        assert stats()["misses"] == before["misses"], name
    assert all_free()


def test_a_dataset_with_unknown_objects_is_read():
    assert [batch.tolist() for batch in torchobj.DataLoader(range(5), batch_size=2)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("workers", [0, 2])
def test_raw_batches_outlive_their_workers(folder, workers):
    batches = list(torchobj.DataLoader(dataset(folder, None), batch_size=10, num_workers=workers))
    found = [bytes(batch[index].numpy()) for batch in batches for index in range(len(batch))]
    assert found == [body(number) for number in range(COUNT)]
    assert batches[0].data.numel() == sum(len(body(number)) for number in range(10))
    held = stats()["used_bytes"]
    assert held > 0
    again = pickle.loads(pickle.dumps(batches[1]))
    assert again[3].tolist() == batches[1][3].tolist()
    # A view outlives its batch.
    view = batches[2][5]
    del batches
    assert bytes(view.numpy()) == body(25)
    assert 0 < stats()["used_bytes"] < held
    del view
    assert all_free()


class Keeps(torchobj.ObjectMapDataset):
    """Returns the same sample again."""

    def __getitem__(self, index):
        self.kept = getattr(self, "kept", None) or super().__getitem__(index)
        return self.kept


def test_a_sample_that_a_worker_returns_repeatedly_has_its_bytes_each_time(folder):
    loader = torchobj.DataLoader(Keeps(f"file://{folder}/"), batch_size=1, num_workers=1)
    assert [bytes(batch[0].numpy()) for batch in loader] == [body(0)] * COUNT


def test_an_object_that_cannot_be_read_raises_the_workers_error_for_its_sample(folder):
    everything = dataset(folder)
    assert len(everything) == COUNT
    (folder / "k07").unlink()
    loader = torchobj.DataLoader(everything, batch_size=1, num_workers=2)
    iterator, found = iter(loader), 0
    for number in range(COUNT):
        if number == 7:
            with pytest.raises(exceptions.ObjectNotFoundError, match=f"get file://{folder}/k07"):
                next(iterator)
        else:
            found += len(next(iterator)[0])
    assert found == COUNT - 1


def worker_pids():
    return [process.pid for process in multiprocessing.active_children()]


def held_by(pid):
    names = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.add(os.readlink(entry))
    return names


def look_at_workers(url, config):
    """Runs in its own process, where every TCP socket is torchobj's."""
    # Idle connections stay open long enough to be counted.
    config = dataclasses.replace(config, advanced=torchobj.AdvancedOptions(keep_alive_s=600.0))
    data = torchobj.ObjectMapDataset(url, config=config, transform=torchobj.ObjectReader.read)
    settings = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "fork"}
    iterator = iter(torchobj.DataLoader(data, collate_fn=list, **settings))
    next(iterator)
    inodes = {line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
    tcp = {f"socket:[{inode}]" for inode in inodes}
    assert held_by("self") & tcp
    assert len(worker_pids()) == 2
    for pid in worker_pids():
        assert not held_by(pid) & tcp
        names = [Path(task, "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]
        assert "torchobj" not in names
    assert sum(map(len, iterator)) == 196


@pytest.mark.providers("s3")
def test_workers_have_no_connection_and_no_thread_of_torchobj(bucket):
    for number in range(200):
        bucket.write(f"k{number:03}", bytes(1000))
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=look_at_workers, args=(bucket.url, bucket.config))
    process.start()
    process.join(150)
    assert process.exitcode == 0


def key_when_readable(fd, waiting):
    """Returns a transform that waits, after a batch of eight, until `fd` is readable. It writes its pid to `waiting`."""
    calls = itertools.count()

    def key(reader):
        if next(calls) >= 8:
            os.write(waiting, b"%d\n" % os.getpid())
            select.select([fd], [], [], 60)
        return reader.key

    return key


# Torch's workers share locks: a kill that meets one takes minutes.
@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_the_memory_of_a_killed_worker_is_released_and_the_next_epoch_works(folder):
    held, release = os.pipe()
    pids, waiting = os.pipe()
    data = dataset(folder, key_when_readable(held, waiting))
    loader = torchobj.DataLoader(data, batch_size=8, num_workers=2, collate_fn=list)
    iterator = iter(loader)
    next(iterator)
    victim = worker_pids()[0]
    # Within a transform: torch's workers share a lock, and one that is killed while it has the lock stops all others.
    lines = open(pids)
    next(line for line in lines if int(line) == victim)
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises((RuntimeError, ConnectionError)):
        list(iterator)
    assert time.monotonic() - began < 30
    os.write(release, b"x")
    del iterator
    assert all_free(), stats()
    assert sum(map(len, loader)) == COUNT
    lines.close()
    for fd in (held, release, waiting):
        os.close(fd)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_break_in_mid_epoch_leaks_nothing(folder, persistent):
    loader = torchobj.DataLoader(
        dataset(folder, None), batch_size=4, shuffle=True, num_workers=2, persistent_workers=persistent
    )
    for _ in range(4):
        for number, _batch in enumerate(loader):
            if number == 3:
                break
    assert sum(len(batch) for batch in loader) == COUNT
    del loader, _batch
    assert all_free(), stats()


def test_training_and_validation_alternate_within_a_small_budget(tmp_path):
    script = Path(__file__).with_name("loader_in_a_small_budget.py")
    environment = os.environ | {"TORCHOBJ_BUDGET_BYTES": str(16 << 20)}
    assert "done" in warm_python.run([script, tmp_path], env=environment, timeout=240, check=True).stdout


def test_many_threads_read_one_dataset_while_a_loader_runs(folder):
    data = dataset(folder)
    failures = []

    def read():
        order = random.sample(range(COUNT), COUNT)
        failures.extend(index for index in order if data[index] != (index, body(index)))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    found = [key for keys, _ in torchobj.DataLoader(data, batch_size=3, num_workers=2) for key in keys.tolist()]
    for thread in threads:
        thread.join()
    assert found == list(range(COUNT))
    assert not failures
    assert all_free()


def test_stats_have_latencies_retries_and_the_concurrency_limit(folder):
    before = stats()
    loader = torchobj.DataLoader(dataset(folder), batch_size=8, num_workers=0, collate_fn=list)
    assert sum(len(batch) for batch in loader) == COUNT
    after = stats()
    assert after["objects"] - before["objects"] == COUNT
    for name in ("first_byte_p50_s", "first_byte_p99_s", "body_p50_s", "body_p99_s"):
        assert 0 < after[name] < 60, name
    assert after["first_byte_p50_s"] <= after["first_byte_p99_s"]
    for name in ("retries", "throttled", "connect_failures", "hedges", "hedges_won"):
        assert after[name] == before[name], name
    # 64 to begin with, and 4 reserved for demanded reads.
    assert after["in_flight_limit"] >= 60


def test_the_first_batch_does_not_wait_for_the_look_ahead(folder):
    data, drawn = dataset(folder), 0

    class Endless(torch.utils.data.Sampler):
        def __iter__(self):
            nonlocal drawn
            while True:
                drawn += 1
                yield drawn % COUNT

    batches = iter(torchobj.DataLoader(data, batch_size=2, sampler=Endless(), num_workers=1))
    next(batches)
    first = drawn
    # An endless sampler of tiny objects: the budget would hold far more than is ever drawn.
    assert first < 16_000
    for _ in range(200):
        next(batches)
    assert first < drawn <= 32_768 + 410


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_a_batch_can_have_any_type(folder, kind):
    before = stats()
    batches = [kind([3, 1]), kind([2])]
    found = [
        key for keys, _ in torchobj.DataLoader(dataset(folder), batch_sampler=batches, num_workers=1) for key in keys
    ]
    assert [int(key) for key in found] == [3, 1, 2]
    assert stats()["misses"] == before["misses"]


def test_a_subclass_that_overrides_getitem_is_not_announced(folder, caplog):
    class Backwards(torchobj.ObjectMapDataset):
        def __getitem__(self, index):
            return super().__getitem__(len(self) - 1 - index)

    data = Backwards(f"file://{folder}/", transform=key_and_bytes)
    found = [key for keys, _ in torchobj.DataLoader(data, batch_size=3, num_workers=1) for key in keys.tolist()]
    assert found == list(reversed(range(COUNT)))
    assert (
        "Backwards: nothing is read ahead, because torchobj does not know which objects its samples consist of"
        in caplog.text
    )


def test_warnings_are_printed_without_logging_configuration(folder):
    script = (
        "import torchobj\n"
        f"data = torchobj.ObjectMapDataset('file://{folder}/', transform=lambda reader: 1 / 0, on_error=lambda *_: 0)\n"
        "data[0]"
    )
    assert "was replaced: ZeroDivisionError" in warm_python.run(["-c", script], check=True).stderr
