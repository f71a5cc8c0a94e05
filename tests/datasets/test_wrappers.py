"""Datasets within others: torch's wrappers, and datasets of users that contain some."""

import logging

import pytest
import torch.utils.data

import torchobj
from torchobj.datasets import wrappers

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


class Within(torch.utils.data.Dataset):
    """A user's dataset that has others as attributes."""

    def __init__(self, held, first):
        self.held, self.first = held, first

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return self.first(self)[index]


class Hiding(list):
    def __iter__(self):
        raise RuntimeError("not permitted")


def test_a_loader_looks_at_few_of_the_values_of_any_dataset():
    class Counted(list):
        looked = 0

        def __iter__(self):
            for each in super().__iter__():
                Counted.looked += 1
                yield each

    inner = torchobj.ObjectMapDataset("memory://searched-within/", allow_empty=True)
    rows = Counted(Counted(Counted((x, y)) for y in range(200)) for x in range(200))
    samples = Counted(Counted(["a"] * 900) for _ in range(900))
    data = Within({"rows": rows, "samples": samples, "large": Counted(range(10**5)), "held": [[inner]]}, None)
    wrappers.prepare_workers(data)
    assert "0 objects" in repr(inner)
    assert Counted.looked < 20_000
    # What cannot be looked at is skipped.
    wrappers.prepare_workers(Within(Hiding([inner]), None))


def test_samples_do_not_hide_a_dataset_within_a_dataset_beside_them():
    inner = torchobj.ObjectMapDataset("memory://beside-within/", allow_empty=True)
    samples = [[number] * 20 for number in range(1000)]
    wrappers.prepare_workers(Within(samples, Within([inner], None)))
    assert "0 objects" in repr(inner)


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_a_loader_lists_a_dataset_within_another_for_its_workers(folder, log_file, context):
    data = torch.utils.data.ConcatDataset([torchobj.ObjectMapDataset(folder, transform=number_of)])
    loader = torchobj.DataLoader(data, num_workers=2, multiprocessing_context=context, lookahead=0)
    assert sorted(map(int, loader)) == list(range(COUNT))
    assert f"{COUNT} objects" in repr(data.datasets[0])
    assert "each DataLoader worker" not in log_file.read_text()
