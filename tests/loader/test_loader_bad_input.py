"""Loaders with invalid input: an error for the sample concerned or a log message, and no hang."""

import dataclasses
import gc
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import torchobj
from tests.support import warm_python
from tests.support.prefetching import all_free, eventually, stats
from torchobj import exceptions

COUNT = 40
WORKERS = [0, 2]


def body(number):
    return bytes([number]) * (1000 + number)


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"k{number:02}").write_bytes(body(number))
    return tmp_path


def first_byte(reader):
    return reader.getbuffer()[0]


def dataset(folder, transform=first_byte):
    return torchobj.ObjectMapDataset(f"file://{folder}/", transform=transform)


def errors_and_samples(loader):
    """Returns the first sample of each batch, or the name of its exception."""
    iterator, found = iter(loader), []
    while True:
        try:
            found.append(next(iterator)[0])
        except StopIteration:
            return found
        except Exception as error:
            found.append(type(error).__name__)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("wrong", "name"), [(COUNT, "IndexError"), (-COUNT - 1, "IndexError"), ("3", "TypeError")])
def test_an_invalid_index_is_an_error_of_its_sample(folder, workers, wrong, name):
    loader = torchobj.DataLoader(
        dataset(folder), batch_size=1, sampler=[1, wrong, 2], num_workers=workers, lookahead=8, collate_fn=list
    )
    assert errors_and_samples(loader) == [1, name, 2]
    assert all_free()


@pytest.mark.parametrize("workers", WORKERS)
def test_an_invalid_index_of_a_subset_is_an_error_of_its_sample(folder, workers):
    subset = torch.utils.data.Subset(dataset(folder), range(10, 20))
    loader = torchobj.DataLoader(
        subset, batch_size=1, sampler=[1, 10, 2], num_workers=workers, lookahead=8, collate_fn=list
    )
    assert errors_and_samples(loader) == [11, "IndexError", 12]


class Broken(torch.utils.data.Sampler):
    """Ends early with an error."""

    def __iter__(self):
        yield from range(20)
        raise ArithmeticError("of the sampler")


@pytest.mark.parametrize("workers", WORKERS)
def test_a_sampler_that_raises_does_so_when_torch_does(folder, workers):
    settings = {"batch_size": 2, "sampler": Broken(), "num_workers": workers, "collate_fn": list}
    stock = errors_and_samples(torch.utils.data.DataLoader(dataset(folder), **settings))
    assert errors_and_samples(torchobj.DataLoader(dataset(folder), lookahead=8, **settings)) == stock
    assert "ArithmeticError" in stock
    assert all_free()


class Unfinished(torch.utils.data.SequentialSampler):
    """Has the methods of a state, which raise."""

    def state_dict(self):
        raise NotImplementedError("not in this version")

    load_state_dict = state_dict


@pytest.mark.parametrize("loader_class", [torch.utils.data.DataLoader, torchobj.DataLoader])
def test_a_sampler_whose_state_cannot_be_taken_is_drawn_and_its_error_is_that_of_state_dict(folder, loader_class):
    data = dataset(folder)
    loader = torchobj.attach(loader_class(data, batch_size=8, sampler=Unfinished(data)))
    assert sum(map(len, loader)) == COUNT
    iterator = iter(loader)
    next(iterator)
    if loader_class is torchobj.DataLoader:
        with pytest.raises(torchobj.TorchobjError, match="Unfinished raised NotImplementedError: not in this version"):
            loader.state_dict()


class Uncopyable(list):
    """Indices that cannot be copied."""

    def __copy__(self):
        raise TypeError("not copyable")

    __deepcopy__ = __reduce_ex__ = __copy__


class Hidden(tuple):
    """Indices whose number cannot be determined, but which can be iterated over."""

    __slots__ = ()

    def __len__(self):
        raise RuntimeError("no length")


@pytest.mark.parametrize("of", [iter, Uncopyable, Hidden, lambda indices: map(int, indices)])
def test_batches_of_indices_of_any_type_are_read_as_by_torch(folder, of):
    def batches():
        return [of([0, 1, 2]), of([3, 4])]

    data = dataset(folder)
    stock = [batch.tolist() for batch in torch.utils.data.DataLoader(data, batch_sampler=batches())]
    for lookahead in (None, 8):
        found = torchobj.DataLoader(data, batch_sampler=batches(), lookahead=lookahead)
        assert [batch.tolist() for batch in found] == stock
        assert found.stats().samples == 5


class Unknown:
    """An index that raises when it is used as one."""

    def __index__(self):
        raise LookupError("unknown")


@pytest.mark.parametrize("wrong", [Unknown(), 2**70], ids=["raises", "large"])
def test_an_index_that_raises_when_it_is_announced_is_an_error_of_its_sample(folder, wrong):
    subset = torch.utils.data.Subset(dataset(folder), [5, wrong, 7])
    loader = torchobj.DataLoader(subset, batch_size=1, lookahead=8)
    iterator = iter(loader)
    assert next(iterator).tolist() == [5]
    with pytest.raises((LookupError, IndexError, OverflowError)):
        next(iterator)
    assert next(iterator).tolist() == [7]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("loader_class", [torch.utils.data.DataLoader, torchobj.DataLoader])
def test_an_empty_dataset_gives_no_batches(tmp_path, loader_class, workers):
    empty = torchobj.ObjectMapDataset(f"file://{tmp_path}/", transform=first_byte, allow_empty=True)
    assert len(empty) == 0
    loader = loader_class(empty, batch_size=4, num_workers=workers)
    assert (len(loader), list(loader)) == (0, [])


def odd(reader):
    if reader.getbuffer()[0] % 2:
        raise ArithmeticError("is odd")
    return reader.getbuffer()[0]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_transform_that_raises_is_an_error_of_its_sample(folder, workers):
    loader = torchobj.DataLoader(dataset(folder, odd), batch_size=1, num_workers=workers, collate_fn=list)
    expected = ["ArithmeticError" if number % 2 else number for number in range(COUNT)]
    assert errors_and_samples(loader) == expected
    assert all_free()


def the_buffer(reader):
    return reader.buffer


def the_view(reader):
    return torch.frombuffer(reader.getbuffer(), dtype=torch.uint8)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("transform", [the_buffer, the_view])
def test_a_transform_can_return_the_buffer_or_a_view_of_it(folder, workers, transform):
    loader = torchobj.DataLoader(
        dataset(folder, transform), batch_size=4, shuffle=True, num_workers=workers, collate_fn=list
    )
    samples = [sample for _ in range(2) for batch in loader for sample in batch]
    found = sorted(bytes(sample if transform is the_buffer else sample.numpy()) for sample in samples)
    assert found == sorted([body(number) for number in range(COUNT)] * 2)
    del samples
    assert all_free()


def test_a_transform_that_writes_to_its_buffer_affects_no_other_read_of_the_object(folder):
    def run(loader_class):
        torch.manual_seed(5)
        sampler = torch.utils.data.WeightedRandomSampler([1.0 + 20 * (n < 4) for n in range(COUNT)], 200)
        loader = loader_class(dataset(folder, doubled), batch_size=5, sampler=sampler, num_workers=2)
        return [value for batch in loader for value in batch.tolist()]

    ours = run(torchobj.DataLoader)
    assert ours == run(torch.utils.data.DataLoader)
    assert len(set(ours)) < len(ours)


def doubled(reader):
    values = torch.frombuffer(reader, dtype=torch.uint8)
    values += values
    return int(values.sum())


def run_script(mode, folder, budget_bytes):
    script = Path(__file__).with_name("loader_bad_input.py")
    environment = os.environ | {"TORCHOBJ_BUDGET_BYTES": str(budget_bytes)}
    return json.loads(warm_python.run([script, mode, folder], env=environment, timeout=240, check=True).stdout)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_budget_smaller_than_an_object_is_exceeded_with_one_warning(tmp_path, workers):
    for number in range(12):
        (tmp_path / f"k{number:02}").write_bytes(bytes([number]) * (3 << 20))
    found = run_script(f"large-{workers}", tmp_path, 1 << 20)
    assert found["samples"] == list(range(12)) * 2
    assert len([line for line in found["log"] if "larger than the budget of 1048576 bytes" in line]) == 1
    assert found["over_budget"] > 0


@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=pytest.mark.matrix)])
def test_a_loop_that_keeps_all_views_continues_and_warns_what_holds_the_memory(tmp_path, workers):
    for number in range(100):
        (tmp_path / f"k{number:02}").write_bytes(bytes([number]) * (256 << 10))
    found = run_script(f"keeps-{workers}", tmp_path, 4 << 20)
    assert found["samples"] == list(range(100))
    told = [line for line in found["log"] if "no memory to read ahead for " in line]
    assert len(told) == 1
    holder = "DataLoader workers hold" if workers else "this process holds"
    held_mib = int(told[0].split(holder)[1].split()[0])
    assert held_mib >= 4


def test_an_object_that_grew_since_the_listing_is_an_error_of_its_sample(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    for number in range(8):
        store.put(f"k{number}", body(number))
    data = torchobj.S3MapDataset(bucket.url, config=bucket.config, transform=first_byte)
    assert len(data) == 8
    store.put("k3", body(3) + b"more")
    loader = torchobj.DataLoader(data, batch_size=1, num_workers=2, collate_fn=list)
    iterator = iter(loader)
    found = [next(iterator)[0] for _ in range(3)]
    with pytest.raises(exceptions.ObjectChangedError, match="k3"):
        next(iterator)
    assert [*found, *(batch[0] for batch in iterator)] == [0, 1, 2, 4, 5, 6, 7]


class Nested(torch.utils.data.Dataset):
    """Each sample is a loop over another loader."""

    def __init__(self, folder):
        self.inner = dataset(folder)
        len(self.inner)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        subset = torch.utils.data.Subset(self.inner, range(index, 20))
        return sum(int(batch.sum()) for batch in torchobj.DataLoader(subset, batch_size=6, shuffle=True))


@pytest.mark.parametrize("context", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_a_loader_in_a_worker_of_a_loader(folder, context):
    loader = torchobj.DataLoader(Nested(folder), batch_size=1, num_workers=1, multiprocessing_context=context)
    assert [int(batch) for batch in loader] == [sum(range(index, 20)) for index in range(3)]


def test_a_loader_in_the_loop_of_a_loader(folder):
    data = dataset(folder)
    outer, inner = (torchobj.DataLoader(data, batch_size=10, shuffle=True, num_workers=1) for _ in range(2))
    for batch in outer:
        assert len(batch) == 10
        assert sorted(value for other in inner for value in other.tolist()) == list(range(COUNT))
    assert all_free()


def test_one_loader_is_used_from_two_threads(folder):
    loader = torchobj.DataLoader(dataset(folder), batch_size=3, shuffle=True, num_workers=1)
    found = [[], []]

    def loop(values):
        for _ in range(2):
            values.extend(value for batch in loader for value in batch.tolist())

    threads = [threading.Thread(target=loop, args=(values,)) for values in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert [sorted(values) for values in found] == [sorted([*range(COUNT)] * 2)] * 2
    assert all_free()


@pytest.mark.parametrize(
    ("workers", "persistent"),
    # torch waits ten seconds for persistent workers when the garbage collector finds them.
    [(0, False), (2, False), pytest.param(2, True, marks=pytest.mark.matrix)],
)
def test_a_loader_that_is_garbage_collected_in_mid_epoch_leaks_nothing(folder, workers, persistent):
    loader = torchobj.DataLoader(
        dataset(folder, None), batch_size=4, num_workers=workers, persistent_workers=persistent
    )
    iterator = iter(loader)
    batch = next(iterator)
    # A reference cycle: only the garbage collector finds it.
    loader.itself = loader
    del loader, iterator
    gc.collect()
    assert bytes(batch[3].numpy()) == body(3)
    del batch
    assert all_free(), stats()


@pytest.mark.parametrize("workers", WORKERS)
def test_ctrl_c_interrupts_the_wait_for_a_batch_at_once(bucket, control, workers):
    store = torchobj.Store(bucket.url, config=bucket.config)
    for number in range(8):
        store.put(f"k{number}", body(number))
    # After the interrupt, the reads that the server holds are retried soon.
    config = dataclasses.replace(bucket.config, first_byte_timeout_s=3, max_attempts=1000)
    data = torchobj.S3MapDataset(bucket.url, config=config, transform=first_byte)
    loader = torchobj.DataLoader(data, batch_size=2, num_workers=workers)
    control.faults({"operation": "GetObject", "action": {"delay_first_byte_s": 60}})
    asked, sent_s = threading.Event(), []

    def interrupt():
        asked.wait(60)
        if eventually(lambda: control.fault_report()[0]["fired"]):
            sent_s.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    iterator = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        asked.set()
        next(iterator)
    assert time.monotonic() - sent_s[0] < 30
    thread.join()
    control.clear_faults()
    assert sorted(value for batch in loader for value in batch.tolist()) == list(range(8))
