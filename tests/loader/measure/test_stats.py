"""A loader's statistics and report: what it did, and what limited it."""

import pickle
import threading
import time

import pytest
import torch

import torchobj
from torchobj.datasets.iterable import ObjectIterableDataset
from torchobj.datasets.map import ObjectMapDataset
from torchobj.datasets.wrappers import max_in_flight_of
from torchobj.loader.iterator import samples_in
from torchobj.loader.measure import report

COUNT, SIZE = 96, 20_000


@pytest.fixture(autouse=True)
def judged_soon(monkeypatch):
    monkeypatch.setattr(report, "_MIN_MEASURED_S", 0.0)


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"{number:03}").write_bytes(bytes([number]) * SIZE)
    return tmp_path


def key_of(reader):
    return int(reader.key.rsplit("/", 1)[-1])


def slow(reader):
    end = time.perf_counter() + 0.004
    while time.perf_counter() < end:
        pass
    return key_of(reader)


@pytest.mark.parametrize("workers", [0, 2])
def test_returned_and_read_samples_are_counted(folder, workers):
    data = ObjectMapDataset(f"file://{folder}/", transform=key_of)
    loader = torchobj.DataLoader(data, batch_size=10, shuffle=True, num_workers=workers)
    assert loader.report() == "No batch was returned yet."
    for _ in range(2):
        assert sorted(key for batch in loader for key in batch.tolist()) == list(range(COUNT))
    stats = loader.stats()
    assert (stats.batches, stats.samples, stats.workers) == (20, 2 * COUNT, workers)
    assert stats.hits + stats.late + stats.queued + stats.misses == 2 * COUNT
    assert stats.bytes_per_s * stats.elapsed_s == pytest.approx(2 * COUNT * SIZE)
    assert 0 < stats.waited_s <= stats.elapsed_s
    assert loader.report().startswith(f"{2 * COUNT} samples in ")


def test_after_a_break_only_returned_samples_are_counted(folder):
    loader = torchobj.DataLoader(ObjectMapDataset(f"file://{folder}/", transform=key_of), batch_size=10)
    next(iter(loader))
    assert (loader.stats().batches, loader.stats().samples) == (1, 10)


def test_the_time_between_batches_belongs_to_the_loop(folder):
    loader = torchobj.DataLoader(ObjectMapDataset(f"file://{folder}/", transform=key_of), batch_size=24)
    pause = threading.Event()
    for _ in loader:
        pause.wait(0.4)
    stats = loader.stats()
    assert stats.elapsed_s - stats.waited_s >= 1.6
    assert "The training step is the bottleneck" in loader.report()


def test_a_loader_with_unknown_objects_counts_batches(folder):
    stock = torchobj.DataLoader(torch.utils.data.TensorDataset(torch.arange(10)), batch_size=4)
    assert len(list(stock)) == 3
    assert (stock.stats().batches, stock.stats().samples) == (3, 10)
    assert "because torchobj does not know which objects the samples of TensorDataset consist of" in stock.report()


def test_the_report_has_the_reason_why_nothing_is_read_ahead(folder):
    data = ObjectMapDataset(f"file://{folder}/", transform=slow)
    settings = {"batch_size": 32, "sampler": [0, 1, 2, 3]}
    for loader, why in [
        (torchobj.DataLoader(data, lookahead=0, **settings), "because lookahead=0 is set"),
        (torchobj.DataLoader(data, **settings), "because BatchSampler may not allow its indices to be drawn ahead"),
    ]:
        assert len(list(loader)) == 1
        assert why in loader.report()


def fails(reader):
    raise ValueError(reader.key)


@pytest.mark.parametrize("context", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_failed_samples_of_workers_are_counted(folder, context):
    data = ObjectIterableDataset(f"file://{folder}/", transform=fails, on_error="skip", enable_sharding=True)
    loader = torchobj.DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context=context)
    assert list(loader) == []
    assert (data.failed_samples, loader.stats().failed_samples) == (COUNT, COUNT)


def test_a_copy_starts_with_zero_counts(folder):
    loader = torchobj.DataLoader(ObjectMapDataset(f"file://{folder}/", transform=key_of), batch_size=8)
    next(iter(loader))
    copied = pickle.loads(pickle.dumps(loader))
    assert (copied.stats().batches, copied.state_dict()["batches"]) == (0, 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [None, list])
def test_samples_of_an_iterable_dataset_are_counted_instead_of_batches(folder, workers, collate):
    data = ObjectIterableDataset(f"file://{folder}/", transform=key_of, enable_sharding=True)
    loader = torchobj.DataLoader(data, batch_size=36, num_workers=workers, collate_fn=collate)
    batches = list(loader)
    # The last batch of each worker is partial.
    assert len(batches) == (4 if workers else 3)
    assert (loader.stats().batches, loader.stats().samples) == (len(batches), COUNT)


@pytest.mark.parametrize(
    ("batch", "batch_size", "by_default", "count"),
    [
        (torch.zeros(5, 3), 8, True, 5),
        ([torch.zeros(5, 3), torch.zeros(5)], 8, True, 5),
        ({"image": (torch.zeros(5, 3),), "label": torch.zeros(5)}, 8, True, 5),
        ([("a", "b", "c"), torch.zeros(3)], 8, True, 3),
        ([torch.zeros(3, 3)] * 6, 8, False, 6),
        ((torch.zeros(5, 3), [1, 2]), 8, False, 5),
        (torch.tensor(3), 8, False, 8),
        (torch.zeros(5), None, True, 1),
        (object(), 8, False, 8),
    ],
)
def test_samples_are_counted_from_the_content_of_a_batch(batch, batch_size, by_default, count):
    assert samples_in(batch, batch_size, collated_by_default=by_default) == count


def raising(*_):
    raise RuntimeError("not permitted")


class WithoutTruth(dict):
    """As a TensorDict: a mapping of tensors whose truth value is an error."""

    __bool__ = raising


class WithoutLength(tuple):
    __slots__ = ()
    __len__ = raising


class WithoutValues(dict):
    values = raising


class WithoutClass:
    @property
    def __class__(self):
        raise RuntimeError("not permitted")


class Recursive(dict):
    def values(self):
        return [self]


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: WithoutTruth(image=torch.zeros(5, 3)), 5),
        (WithoutTruth, 0),
        (lambda: (WithoutTruth(image=torch.zeros(5, 3)),), 5),
        (WithoutLength, 8),
        (lambda: WithoutValues(image=torch.zeros(5, 3)), 8),
        (WithoutClass, 8),
        (Recursive, 0),
        (lambda: [None, torch.zeros(5)], 8),
    ],
)
def test_a_batch_that_raises_when_it_is_counted_has_the_size_that_was_requested(make, count):
    assert samples_in(make(), 8, collated_by_default=True) == count


@pytest.mark.parametrize("attached", [False, True])
def test_a_batch_that_raises_when_it_is_counted_is_returned(folder, attached):
    data = ObjectIterableDataset(f"file://{folder}/", transform=key_of)
    kind = torch.utils.data.DataLoader if attached else torchobj.DataLoader
    loader = kind(ObjectMapDataset(f"file://{folder}/", transform=key_of) if attached else data, 36, collate_fn=Opaque)
    if attached:
        torchobj.attach(loader)
    assert [len(batch.samples) for batch in loader] == [36, 36, 24]
    assert loader.stats().batches == 3


class Opaque:
    """A batch that raises whatever is done with it."""

    def __init__(self, samples):
        self.samples = samples

    __len__ = __bool__ = __iter__ = __eq__ = __getitem__ = __repr__ = raising
    __hash__ = None


def start_slowly(_):
    threading.Event().wait(0.5)


def test_the_time_to_start_workers_is_reported_separately(folder):
    data = ObjectMapDataset(f"file://{folder}/", transform=key_of)
    loader = torchobj.DataLoader(data, batch_size=24, num_workers=1, worker_init_fn=start_slowly)
    began = time.perf_counter()
    assert len(list(loader)) == 4
    lasted = time.perf_counter() - began
    stats = loader.stats()
    assert 0.5 <= stats.startup_s <= stats.elapsed_s <= lasted
    assert stats.waited_s + stats.startup_s <= stats.elapsed_s
    assert "Starting and stopping workers took" in loader.report()


class Wrapping(torch.utils.data.IterableDataset):
    """A user's dataset that yields samples of ours."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)


@pytest.mark.parametrize("workers", [0, 2])
def test_reads_of_a_dataset_within_another_are_counted(folder, workers, caplog):
    data = Wrapping(ObjectIterableDataset(f"file://{folder}/", transform=slow, enable_sharding=True))
    loader = torchobj.DataLoader(data, batch_size=8, num_workers=workers)
    for _ in range(2):
        assert len(list(loader)) == COUNT // 8
    assert loader.stats().bytes_per_s * loader.stats().elapsed_s == pytest.approx(2 * COUNT * SIZE)
    assert "Decoding is the limit" in loader.report()
    assert "each DataLoader worker lists" not in caplog.text


class ReadingAlone(torch.utils.data.IterableDataset):
    """A dataset that reads nothing by torchobj, as `wds.WebDataset`."""

    def __iter__(self):
        yield from map(slow_number, range(COUNT))


def slow_number(number):
    threading.Event().wait(0.001)
    return number


def test_reading_inside_workers_is_not_reported_as_decoding(folder):
    loader = torchobj.DataLoader(ReadingAlone(), batch_size=8, num_workers=2, persistent_workers=True)
    for _ in range(3):
        assert len(list(loader)) == 2 * COUNT // 8
    said = loader.report()
    assert "MB/s" not in said
    assert "Decoding" not in said
    assert "manifest" not in said
    assert "persistent_workers=True" not in said
    assert "cannot measure whether reading or decoding is the limit" in said


@pytest.mark.parametrize("most", ["auto", 8])
def test_a_higher_max_in_flight_is_suggested_only_if_it_was_set(folder, most):
    config = torchobj.StoreConfig(max_in_flight=most)
    inner = ObjectMapDataset(f"file://{folder}/", config=config)
    for data in (inner, torch.utils.data.Subset(inner, range(4)), torch.utils.data.ConcatDataset([inner, [1, 2]])):
        assert max_in_flight_of(data) == (None if most == "auto" else 8)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("attached", [False, True])
def test_counters_belong_to_their_loader(folder, workers, attached):
    def loader_of(data, **settings):
        if attached:
            return torchobj.attach(torch.utils.data.DataLoader(data, num_workers=workers, **settings))
        return torchobj.DataLoader(data, num_workers=workers, **settings)

    data = ObjectMapDataset(f"file://{folder}/", transform=key_of)
    training = loader_of(data, batch_size=8, shuffle=True)
    # Of another dataset: an object of the same one is read once for both if they need it at the same time.
    others = ObjectMapDataset(f"file://{folder}/", transform=key_of)
    validation = loader_of(torch.utils.data.Subset(others, range(24)), batch_size=8)
    fresh = loader_of(data, batch_size=8)
    batches = iter(training)
    for number, _ in enumerate(batches):
        if number == 3:
            assert len(list(validation)) == 3
    counted = [
        (
            stats.samples,
            stats.hits + stats.late + stats.queued + stats.misses,
            round(stats.bytes_per_s * stats.elapsed_s),
        )
        for stats in (training.stats(), validation.stats(), fresh.stats())
    ]
    assert counted == [(COUNT, COUNT, COUNT * SIZE), (24, 24, 24 * SIZE), (0, 0, 0)]
    assert (validation.stats().first_byte_p50_s is None, fresh.stats().first_byte_p50_s) == (False, None)
    assert validation.report().startswith("24 samples in ")
    assert fresh.report() == "No batch was returned yet."


@pytest.mark.parametrize("workers", [0, 2])
def test_failed_samples_belong_to_the_loader_that_read_them(folder, workers):
    data = ObjectMapDataset(f"file://{folder}/", transform=fails, on_error=lambda *_: 0)
    loaders = [torchobj.DataLoader(data, batch_size=8, num_workers=workers) for _ in range(2)]
    for loader, passes in zip(loaders, (1, 2), strict=True):
        for _ in range(passes):
            list(loader)
    assert [loader.stats().failed_samples for loader in loaders] == [COUNT, 2 * COUNT]
    assert data.failed_samples == 3 * COUNT


def test_an_iterable_loader_without_workers_has_its_own_counters(folder):
    data = ObjectIterableDataset(f"file://{folder}/", transform=key_of)
    len(data.manifest)
    first, second = (torchobj.DataLoader(data, batch_size=8) for _ in range(2))
    assert [len(list(first)), len(list(second)), len(list(second))] == [COUNT // 8] * 3
    read = [loader.stats().bytes_per_s * loader.stats().elapsed_s for loader in (first, second)]
    assert read == [pytest.approx(COUNT * SIZE), pytest.approx(2 * COUNT * SIZE)]


def collated_slowly(samples):
    end = time.perf_counter() + 0.05
    while time.perf_counter() < end:
        pass
    return torch.tensor(samples)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_collate_function_is_reported_and_not_the_transform(folder, workers):
    data = ObjectMapDataset(f"file://{folder}/", transform=key_of)
    loader = torchobj.DataLoader(data, batch_size=8, num_workers=workers, collate_fn=collated_slowly)
    assert len(list(loader)) == COUNT // 8
    stats = loader.stats()
    assert stats.waited_for_collate_s > 0.5 * stats.waited_s
    waited_for = (
        stats.waited_for_store_s + stats.waited_for_budget_s + stats.waited_for_decode_s + stats.waited_for_collate_s
    )
    assert waited_for == pytest.approx(stats.waited_s)
    assert "Collation is the limit." in loader.report().splitlines()
    assert loader.collate_fn is collated_slowly


def test_logged_figures_are_those_since_the_previous_call(folder):
    loader = torchobj.DataLoader(ObjectMapDataset(f"file://{folder}/", transform=slow), batch_size=8)
    assert loader.log(0)["torchobj.exposed.share"] == 0
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    first = loader.log(4)
    assert first["torchobj.exposed.share"] > 0.9
    assert first["torchobj.exposed.decode_share"] > 0.5
    assert first["torchobj.exposed.seconds"] == pytest.approx(loader.stats().waited_s / 4)
    causes = [value for name, value in first.items() if name.endswith("_share")]
    assert sum(causes) == pytest.approx(first["torchobj.exposed.share"])
    again = loader.log(5)
    assert (again["torchobj.exposed.share"], again["torchobj.loader.samples_per_second"]) == (0, 0)


def test_one_rank_is_the_slowest(folder):
    loader = torchobj.DataLoader(ObjectMapDataset(f"file://{folder}/", transform=slow), batch_size=8)
    assert len(list(loader)) == COUNT // 8
    found = loader.log(12, ranks=True)
    assert found["torchobj.exposed.slowest.rank"] == 0
    assert found["torchobj.exposed.slowest.share"] == found["torchobj.exposed.share"]
    assert "Of 1 rank, rank 0 waited longest" in loader.report()
