"""Warnings and errors of datasets about arguments that do not have the intended effect."""

import logging
import mmap

import pytest
import torch.utils.data

import torchobj
from torchobj.datasets import worker_process
from torchobj.exceptions import ConfigError

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
    assert list(kind(url, **filters)) == []
    assert f"{url}{named}" in caplog.text or (url in caplog.text and named in caplog.text)
    assert "None" not in caplog.text
    assert "[]" not in caplog.text


@pytest.mark.parametrize("kind", ["MapDataset", "IterableDataset"])
@pytest.mark.parametrize(
    ("provider", "scheme", "other", "others"),
    [
        ("S3", "s3", "GCS", ["gs://bucket/x", "gcs://bucket/x"]),
        ("GCS", "gs", "S3", ["s3://bucket/x"]),
    ],
)
def test_a_dataset_of_one_provider_names_the_classes_that_accept_other_urls(kind, provider, scheme, other, others):
    accepting = f"Object{kind}"
    cls = getattr(torchobj, f"{provider}{kind}")
    for make in (cls, cls.from_prefix, cls.from_objects):
        for url in ("file:///folder/x", "memory://folder/x"):
            with pytest.raises(ConfigError, match=f"^url='{url}': scheme .*, expected {scheme}://; use {accepting}$"):
                make(url)
        for url in others:
            with pytest.raises(ConfigError, match=f"expected {scheme}://; use {other}{kind} or {accepting}$"):
                make(url)
    for url in ("az://bucket/x", "/folder/x"):
        with pytest.raises(ConfigError, match="expected"):
            cls(url)


def run_of(dataset, workers, epochs=2, **settings):
    loader = torchobj.DataLoader(dataset, batch_size=2, num_workers=workers, **settings)
    return [[number for batch in loader for number in batch.tolist()] for _ in range(epochs)]


@pytest.mark.parametrize("loader_class", [torchobj.DataLoader, torch.utils.data.DataLoader])
def test_workers_that_each_yield_all_objects_cause_one_warning(folder, log_file, loader_class):
    data = torchobj.ObjectIterableDataset(folder, transform=number_of)
    loader = loader_class(data, batch_size=2, num_workers=2)
    len(data.manifest)
    for _ in range(2):
        assert sorted(number for batch in loader for number in batch.tolist()) == sorted([*range(COUNT)] * 2)
    said = [line for line in log_file.read_text().splitlines() if "enable_sharding" in line]
    assert len(said) == 1, said
    assert said[0].startswith(f"{folder}: each of 2 DataLoader workers yields all samples")


class Half(torch.utils.data.IterableDataset):
    """A wrapper that gives each worker its own part."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return (sample for number, sample in enumerate(self.dataset) if number % worker.num_workers == worker.id)


def test_workers_that_yield_each_sample_once_cause_no_warning(folder, log_file):
    sharded = torchobj.ObjectIterableDataset(folder, transform=number_of, enable_sharding=True)
    plain = torchobj.ObjectIterableDataset(folder, transform=number_of)
    len(plain.manifest)
    for dataset, workers in ((sharded, 2), (plain, 0), (plain, 1), (Half(plain), 2)):
        [found] = run_of(dataset, workers, 1)
        assert sorted(found) == list(range(COUNT))
    assert "enable_sharding" not in log_file.read_text()


def test_set_epoch_applies_to_the_dataset_and_its_workers(folder):
    data = torchobj.ObjectIterableDataset(folder, transform=number_of, shuffle=True)
    len(data.manifest)
    run_of(data, 2, 1)
    data.set_epoch(3)
    assert data.state_dict()["epoch"] == 3
    workers = run_of(data, 2, 1)[0]
    assert workers[0:2] == list(data)[0:2]


class Within(torch.utils.data.Dataset):
    """A user's dataset that has one of torchobj in a list."""

    def __init__(self, inner):
        self.parts = [inner]

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return self.parts[0][index]


def test_workers_that_list_are_warned_of_once_in_all_epochs(folder, log_file, monkeypatch):
    monkeypatch.setattr(worker_process, "_repeated", mmap.mmap(-1, 1))
    data = Within(torchobj.ObjectMapDataset(folder, transform=number_of))
    for _ in range(3):
        loader = torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context="fork")
        assert sorted(map(int, loader)) == list(range(COUNT))
    assert log_file.read_text().count("each DataLoader worker lists the prefix itself") == 1


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_a_loader_lists_a_dataset_within_another_for_its_workers(folder, log_file, context):
    data = Within(torchobj.ObjectMapDataset(folder, transform=number_of))
    loader = torchobj.DataLoader(data, num_workers=2, multiprocessing_context=context, lookahead=0)
    assert sorted(map(int, loader)) == list(range(COUNT))
    assert f"{COUNT} objects" in repr(data.parts[0])
    assert "each DataLoader worker" not in log_file.read_text()
