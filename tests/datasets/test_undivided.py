"""Workers and ranks that read the same samples are warned of once."""

import logging

import pytest
import torch.utils.data

import torchobj

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
