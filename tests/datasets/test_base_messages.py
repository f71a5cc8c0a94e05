"""Warnings and errors of datasets about arguments that do not have the intended effect."""

import itertools
import logging
import mmap
import tarfile

import pytest
import torch.utils.data

import torchobj
from tests.support.long_tables import often
from torchobj.warn_once import FORKED

COUNT = 6


def number_of(reader):
    return bytes(reader)[0]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "objects").mkdir()
    for number in range(COUNT):
        (tmp_path / "objects" / f"{number}.bin").write_bytes(bytes([number]))
    return f"file://{tmp_path}/objects/"


@pytest.fixture
def log_file(tmp_path):
    """A file with the log of this process and its workers, including spawned ones, which inherit standard error."""
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("torchobj").addHandler(handler)
    yield tmp_path / "log"
    logging.getLogger("torchobj").removeHandler(handler)
    handler.close()


@pytest.mark.parametrize(
    ("filters", "named"),
    [
        ({}, ": no objects; check"),
        ({"glob": "*.png"}, " with glob='*.png': no objects; check"),
        ({"suffixes": ".jpg"}, " with suffixes=['.jpg']: no objects; check"),
        ({"glob": "**", "suffixes": [".a", ".b"], "limit": 3}, "glob='**', suffixes=['.a', '.b'], limit=3: no objects"),
    ],
)
@pytest.mark.parametrize("kind", [torchobj.ObjectMapDataset, torchobj.ObjectIterableDataset])
def test_a_dataset_without_objects_names_its_prefix_and_filters(folder, kind, filters, named, caplog):
    url = folder if filters else f"{folder}nothing/"
    assert list(kind(url, **filters, allow_empty=True)) == []
    assert f"{url}{named}" in caplog.text or (url in caplog.text and named in caplog.text)
    assert "None" not in caplog.text
    assert "[]" not in caplog.text


def run_of(dataset, workers, epochs=2, **settings):
    loader = torchobj.DataLoader(dataset, batch_size=2, num_workers=workers, **settings)
    return [[number for batch in loader for number in batch.tolist()] for _ in range(epochs)]


def test_set_epoch_applies_to_the_dataset_and_its_workers(folder):
    data = torchobj.ObjectIterableDataset(folder, transform=number_of, shuffle=True)
    len(data.manifest)
    run_of(data, 2, 1)
    data.set_epoch(3)
    assert data.state_dict()["epoch"] == 3
    workers = run_of(data, 2, 1)[0]
    assert workers[0:2] == list(data)[0:2]


class Within(torch.utils.data.Dataset):
    """A user's dataset that has others as attributes."""

    def __init__(self, held, first):
        self.held, self.first = held, first

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return self.first(self)[index]


class Streaming(torch.utils.data.IterableDataset):
    """A user's iterable dataset of the samples of another one, divided among workers."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return itertools.islice(self.inner, worker.id, None, worker.num_workers)


WITHIN = {
    "an attribute": lambda inner: Within(inner, lambda each: each.held),
    "a list": lambda inner: Within([inner], lambda each: each.held[0]),
    "a list in a dict": lambda inner: Within({"a": ([inner],)}, lambda each: each.held["a"][0][0]),
    "a dataset of the user": lambda inner: Within(
        [Within({"a": inner}, lambda each: each.held["a"])], lambda each: each.held[0]
    ),
    "torch's subset of it": lambda inner: torch.utils.data.Subset(
        Within([inner], lambda each: each.held[0]), range(COUNT)
    ),
    "an iterable dataset": Streaming,
    "a mixture": lambda inner: torchobj.interleave([Streaming(inner)]),
}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", often(1, [2, 4]))
@pytest.mark.parametrize("make", often(3, reversed(WITHIN.values())), ids=reversed(WITHIN))
@pytest.mark.parametrize("kind", [torchobj.DataLoader, torch.utils.data.DataLoader], ids=["torchobj", "torch"])
def test_workers_that_list_are_warned_of_once_in_all_epochs(folder, log_file, monkeypatch, kind, make, workers):
    monkeypatch.setattr(FORKED, "_flags", mmap.mmap(-1, 1 << 16))
    inner = torchobj.ObjectMapDataset(folder, transform=number_of)
    data = make(inner)
    for _ in range(3):
        loader = kind(data, num_workers=workers, multiprocessing_context="fork")
        assert sorted(map(int, loader)) == list(range(COUNT))
    # torch's loader does nothing for what workers inherit.
    expected = int(kind is torch.utils.data.DataLoader)
    assert log_file.read_text().count("each DataLoader worker lists the prefix itself") == expected
    assert (f"{COUNT} objects" in repr(inner)) is not bool(expected)


def test_a_worker_that_lists_does_not_hide_that_another_dataset_reads_its_index(
    folder, log_file, monkeypatch, tmp_path
):
    monkeypatch.setattr(FORKED, "_flags", mmap.mmap(-1, 1 << 16))
    with tarfile.open(tmp_path / "a.tar", "w") as shard:
        shard.add(tmp_path / "objects" / "0.bin", "0.bin")
    objects = torchobj.ObjectMapDataset(folder, transform=number_of)
    samples = torchobj.TarMapDataset((tmp_path / "a.tar").as_uri(), transform=lambda sample: sample["bin"][0])
    data = Within([objects, samples], lambda each: [each.held[1][0], *map(each.held[0].__getitem__, range(1, COUNT))])
    for _ in range(2):
        loader = torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context="fork")
        assert sorted(map(int, loader)) == list(range(COUNT))
    log = log_file.read_text()
    assert log.count("each DataLoader worker lists the prefix itself") == 1
    # The worker that reads the index has found its shards before.
    assert f"{folder}: each DataLoader worker lists the prefix itself" in log
    assert log.count("each DataLoader worker reads the index itself") == 1


def test_shards_that_are_prepared_before_the_loop_are_indexed_once(log_file, monkeypatch, tmp_path):
    monkeypatch.setattr(FORKED, "_flags", mmap.mmap(-1, 1 << 16))
    tar_of(tmp_path / "a.tar", "0.bin", "1.bin")
    counts = []
    for prepares in (True, False):
        data = torchobj.TarIterableDataset(
            (tmp_path / "a.tar").as_uri(), enable_sharding=True, rank=0, world_size=2, uneven="drop", transform=len
        )
        if prepares:
            data.prepare()
        else:
            _ = data.manifest
        loader = torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="fork")
        assert len(list(loader)) == 1
        counts.append(log_file.read_text().count("reads the index itself"))
    assert counts == [0, 1]
    assert "or dataset.prepare() of an iterable dataset" in log_file.read_text()


def tar_of(path, *names):
    with tarfile.open(path, "w") as shard:
        for name in names:
            shard.addfile(tarfile.TarInfo(name))


def of_samples(url):
    data = torchobj.TarMapDataset(url, decode={"jpg": bytes}, transform=lambda sample: len(sample["bin"]))
    return Within(data, lambda each: each.held)


def of_stream(url):
    return Streaming(torchobj.TarIterableDataset(url, uneven="drop", transform=lambda sample: len(sample["bin"])))


@pytest.mark.parametrize("kind", [torchobj.DataLoader, torch.utils.data.DataLoader], ids=["torchobj", "torch"])
@pytest.mark.parametrize("make", often(1, [of_stream, of_samples]))
def test_what_workers_find_in_a_prefix_is_logged_once_in_all_epochs(tmp_path, log_file, monkeypatch, kind, make):
    monkeypatch.setattr(FORKED, "_flags", mmap.mmap(-1, 1 << 16))
    for folder in ("shards", "shards/_temporary", "others"):
        (tmp_path / folder).mkdir()
        tar_of(tmp_path / folder / "a.tar", *(f"{number}.bin" for number in range(COUNT)))
        (tmp_path / folder / "a.tar.index.parquet").write_bytes(b"damaged")
    for folder in ("shards", "others"):
        for _ in range(3):
            list(kind(make(f"{tmp_path.as_uri()}/{folder}/"), num_workers=2, multiprocessing_context="fork"))
        if kind is torchobj.DataLoader:
            continue
        log = log_file.read_text()
        assert log.count("names that begin with '_' or '.' skipped") == log.count("skipped") == 1
        # Of each dataset, because the second one has other objects.
        indexes = 1 + (folder == "others")
        assert log.count("not a Parquet file") == indexes
        assert log.count("decode has only jpg") == (indexes if make is of_samples else 0)
    if kind is torchobj.DataLoader:
        assert "each DataLoader worker" not in log_file.read_text()
