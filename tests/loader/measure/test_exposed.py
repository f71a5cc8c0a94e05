"""The cause of waiting that `report()` and the callbacks name is the one that slows a real loader down."""

import concurrent.futures
import dataclasses
import multiprocessing
import sys
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import torchobj
from tests.support import ranks
from torchobj.loader.measure import report
from torchobj.telemetry.table import CAUSES

BATCHES, BATCH_SIZE = 8, 4
COUNT = BATCHES * BATCH_SIZE


class Place(NamedTuple):
    """Objects in a folder, and the same ones in a bucket whose server answers late."""

    folder: Any
    url: str
    config: torchobj.StoreConfig
    control: Any

    def local(self, transform, kind=torchobj.ObjectMapDataset, **settings):
        return kind(f"file://{self.folder}/0", transform=transform, **settings)

    def remote(self, kind=torchobj.ObjectMapDataset, **settings):
        config = dataclasses.replace(self.config, **settings)
        return kind(self.url, config=config, transform=key_of)

    def fill(self, size):
        store = torchobj.Store(self.url, config=self.config)
        for number in range(COUNT):
            store.put(f"{number:03}", bytes(size))


def key_of(reader):
    return int(reader.key[-3:])


def decode(reader):
    time.sleep(0.02)
    return key_of(reader)


# In workers, where the first batch of each takes longest.
def decode_slowly(reader):
    time.sleep(0.06)
    return decode(reader)


def compute(reader):
    end = time.thread_time() + 0.03
    while time.thread_time() < end:
        pass
    return key_of(reader)


def collate(samples):
    time.sleep(0.08)
    return torch.tensor(samples)


def collate_slowly(samples):
    time.sleep(0.22)
    return collate(samples)


def start_late(worker):
    time.sleep(0.6 * worker)


class Numbers(torch.utils.data.Dataset):
    """A user's dataset, which does not read by torchobj."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return decode(SimpleNamespace(key=f"{index:03}"))


def looped(loader, *, step_s=0.0, from_batch=1, among_ranks=False):
    """Loops over a loader. Returns its report, and what the callback logs for the batches after `from_batch`."""
    logs, count = [], 0
    callback = torchobj.transformers.LoaderLogCallback(SimpleNamespace(log=logs.append), ranks=among_ranks)
    for _ in loader:
        count += 1
        time.sleep(step_s)
        state, control = SimpleNamespace(global_step=count), SimpleNamespace(should_log=count in (from_batch, BATCHES))
        callback.on_step_end(None, state, control, train_dataloader=loader)
    assert count == BATCHES
    return loader.report(), logs[-1]


def loader_of(data, **settings):
    return torchobj.DataLoader(data, batch_size=BATCH_SIZE, **settings)


def in_child(work, *arguments):
    """Calls a function in a process that has nothing of this one's prefetcher and libraries."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
        return child.submit(work, *arguments).result()


def in_budget(place):
    torchobj.set_memory_budget(1 << 20)
    # The first batches are read ahead of the loop.
    return looped(loader_of(place.remote()), from_batch=3)


def larger_than_the_budget(place):
    place.fill(300_000)
    return in_child(in_budget, place)


def with_cold_decoder(place):
    assert torchobj.transformers.LoaderLogCallback  # It needs the real library.
    for name in [name for name in sys.modules if name.partition(".")[0] == "safetensors"]:
        del sys.modules[name]
    package = place.folder / "library" / "safetensors"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "torch.py").write_text("import time\ntime.sleep(1)\nload = len\n")
    sys.path.insert(0, str(package.parent))
    # Accessed within the loop: an access before it would import the library.
    return looped(loader_of(place.local(lambda reader: torchobj.decode.safetensors(reader))), from_batch=0)


def on_a_slow_rank(rank, place):
    torch.distributed.init_process_group("gloo")
    return looped(loader_of(place.local(decode if rank else key_of)), step_s=0.02, among_ranks=True)


def slow_rank(place):
    found = ranks.run_ranks(on_a_slow_rank, place)
    assert found[0][1]["torchobj.exposed.slowest.rank"] == found[1][1]["torchobj.exposed.slowest.rank"] == 1
    assert "Of 2 ranks, rank 1 waited longest" in found[1][0]
    return found[0]


def in_budget_of_a_stream(place, workers):
    torchobj.set_memory_budget(1 << 20)
    data = torchobj.ObjectIterableDataset(place.url, config=place.config, transform=key_of, enable_sharding=True)
    return looped(loader_of(data, num_workers=workers), from_batch=3)


def importing(reader):
    import slow_library  # noqa: F401

    return key_of(reader)


def with_a_transform_that_imports(place, settings):
    (place.folder / "library").mkdir()
    (place.folder / "library" / "slow_library.py").write_text("import time, json\ntime.sleep(1)\n")
    sys.path.insert(0, str(place.folder / "library"))
    return looped(loader_of(place.local(importing), **settings), from_batch=0)


def throttled(place):
    place.control.clear_faults()
    place.control.faults({"operation": "GetObject", "action": {"status": 503, "code": "SlowDown"}, "times": 8})
    return looped(loader_of(place.remote()), from_batch=0)


#: The cause, text that the report contains, and the loop.
CASES = {
    "a slow training step": (
        None,
        "The training step is the bottleneck",
        lambda place: looped(loader_of(place.local(key_of)), step_s=0.3),
    ),
    "a slow transform": ("decode", "Decoding is the limit", lambda place: looped(loader_of(place.local(decode)))),
    "a slow transform in workers": (
        "decode",
        "2 workers cannot decode fast enough",
        lambda place: looped(loader_of(place.local(decode_slowly), num_workers=2)),
    ),
    "a transform that computes, of an attached loader": (
        "decode",
        "2 workers cannot decode fast enough",
        lambda place: looped(
            torchobj.attach(torch.utils.data.DataLoader(place.local(compute), batch_size=BATCH_SIZE, num_workers=2))
        ),
    ),
    "a slow transform of a stream": (
        "decode",
        "Decoding is the limit",
        lambda place: looped(loader_of(place.local(decode, torchobj.ObjectIterableDataset))),
    ),
    "a slow dataset of which nothing is read ahead": (
        "decode",
        "torchobj does not know which objects the samples of Numbers consist of",
        lambda place: looped(loader_of(Numbers())),
    ),
    "a slow collate function": (
        "collate",
        "Collation is the limit",
        lambda place: looped(loader_of(place.local(key_of), collate_fn=collate)),
    ),
    "a slow collate function in workers": (
        "collate",
        "2 workers cannot collate fast enough",
        lambda place: looped(loader_of(place.local(key_of), collate_fn=collate_slowly, num_workers=2)),
    ),
    "a slow store": (
        "store",
        "The network or the store is the limit",
        lambda place: looped(loader_of(place.remote(max_in_flight=8))),
    ),
    "a slow store, with workers": (
        "store",
        "The network or the store is the limit",
        lambda place: looped(loader_of(place.remote(max_in_flight=4), num_workers=2)),
    ),
    "a store that throttles": ("store", "The store is the limit: it throttled", throttled),
    "a small budget": (
        "budget",
        "The memory budget of 1 MiB is the limit",
        lambda place: in_child(in_budget, place),
    ),
    "a budget smaller than a batch": (
        "budget",
        "The memory budget of 1 MiB is the limit",
        lambda place: larger_than_the_budget(place),
    ),
    "a small budget of a stream": (
        "budget",
        "The memory budget of 1 MiB is the limit",
        lambda place: in_child(in_budget_of_a_stream, place, 0),
    ),
    "a small budget of a stream in workers": (
        "budget",
        "The memory budget of 1 MiB is the limit",
        lambda place: in_child(in_budget_of_a_stream, place, 2),
    ),
    "a transform that imports": (
        "startup",
        "Imports in transforms took 1.",
        lambda place: in_child(with_a_transform_that_imports, place, {}),
    ),
    "a transform that imports in workers": (
        "startup",
        "Imports in transforms took",
        lambda place: in_child(with_a_transform_that_imports, place, {"num_workers": 2}),
    ),
    "a worker that starts slowly": (
        "startup",
        "persistent_workers=True starts them once for all epochs",
        lambda place: looped(loader_of(place.local(key_of), num_workers=2, worker_init_fn=start_late), from_batch=0),
    ),
    "a cold start": ("startup", "Importing decoders took", lambda place: in_child(with_cold_decoder, place)),
    "a slow rank": ("decode", "mostly for decoding", slow_rank),
}


@pytest.fixture(autouse=True)
def judged_soon(monkeypatch):
    monkeypatch.setattr(report, "_MIN_MEASURED_S", 0.0)


@pytest.fixture
def place(tmp_path, bucket, control):
    found = Place(tmp_path, bucket.url, bucket.config, control)
    found.fill(90_000)
    for number in range(COUNT):
        (tmp_path / f"{number:03}").write_bytes(bytes(1000))
    control.faults({"operation": "GetObject", "action": {"delay_first_byte_s": 0.15}})
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_cause_of_waiting_is_named(place, case):
    cause, text, run = CASES[case]
    said, logged = run(place)
    prefix = "torchobj.exposed.slowest" if "torchobj.exposed.slowest.rank" in logged else "torchobj.exposed"
    assert text in said, said
    shares = {name: logged[f"{prefix}.{name}_share"] for name in CAUSES}
    # On an idle machine the cause is more than five times the others, and the step more than ten times the wait.
    if cause is None:
        assert sum(shares.values()) < 0.2, logged
    else:
        assert max(shares, key=shares.get) == cause, logged
