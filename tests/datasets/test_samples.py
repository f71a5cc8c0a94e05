"""The samples of a dataset are found, read, built and replaced in one place."""

import copy

import numpy as np
import pytest

import torchobj
from torchobj.datasets.wrappers import object_finder, prepare_workers
from torchobj.exceptions import ObjectNotFoundError
from torchobj.workers import process

COUNT = 6


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"{number}").write_bytes(bytes([number]))
    return tmp_path


class Named(torchobj.ObjectDataset):
    def __init__(self, folder, factor=1):
        super().__init__()
        self.folder, self.factor = folder, factor

    def __len__(self):
        return COUNT

    def objects_at(self, index):
        return [torchobj.ObjectRef(f"file://{self.folder}/{index}")]

    def build(self, index, readers):
        return readers[0].read()[0] * self.factor


def test_the_listing_is_resolved_once_for_the_announcements_of_a_pass(folder, monkeypatch):
    dataset, calls = torchobj.ObjectMapDataset(f"file://{folder}/"), []
    listing, resolve = dataset._listing, dataset._listing.reader
    monkeypatch.setattr(listing, "reader", lambda: calls.append(None) or resolve())
    find = object_finder(dataset)
    resolved = len(calls)
    source = resolve().source()
    assert [find([0, 5]), find([-1]), find([2, 3])] == [
        [(source.number, index) for index in indices] for indices in ([0, 5], [5], [2, 3])
    ]
    assert resolved == len(calls) > 0
    with pytest.raises(IndexError, match=f"index {COUNT} of {COUNT} samples"):
        find([COUNT])


def test_a_worker_resolves_the_listing_that_it_has_inherited_no_more(folder, monkeypatch):
    dataset, calls = torchobj.ObjectMapDataset(f"file://{folder}/", transform=lambda reader: reader.read()), []
    assert len(dataset) == COUNT
    find = dataset._listing.objects
    monkeypatch.setattr(dataset._listing, "objects", lambda: calls.append(None) or find())
    dataset.__getitems__([0])
    assert calls
    calls.clear()
    monkeypatch.setattr(process, "in_worker", lambda: True)
    assert (dataset.__getitems__([1, -1]), dataset[2], calls) == ([b"\1", bytes([COUNT - 1])], b"\2", [])


def test_objects_of_a_sample_that_cannot_be_named_are_an_error_in_its_place(folder):
    class Partly(Named):
        def objects_at(self, index):
            if index == 1:
                raise LookupError(index)
            found = super().objects_at(index)
            return {2: found[0], 3: None, 4: [f"file://{folder}/4"]}.get(index, found)

    dataset = Partly(folder)
    find = object_finder(dataset)
    assert (len(find([0, 1, 2, 3, 4, 5])), find([1])) == (2, [])
    samples = dataset._torchobj.in_order(np.arange(COUNT))
    assert next(samples) == 0
    with pytest.raises(LookupError):
        next(samples)
    for index in (2, 3, 4):
        with pytest.raises(
            TypeError, match=rf"Partly.objects_at\({index}\) returned .*must be a sequence of ObjectRef"
        ):
            next(samples)
    assert list(samples) == [5]
    with pytest.raises(LookupError):
        dataset.__getitems__([0, 1])


def test_a_neighbour_whose_objects_cannot_be_named_replaces_no_sample(folder):
    class Failing(Named):
        def objects_at(self, index):
            return [torchobj.ObjectRef(f"file://{folder}/missing")] if index == 0 else [None]

    dataset = Failing(folder)
    dataset._torchobj.failures.on_error = "replace"
    with pytest.raises(TypeError, match=r"objects_at\(1\) returned"):
        dataset[0]


def test_a_copy_of_a_dataset_builds_its_own_samples(folder):
    dataset = Named(folder)
    other = copy.copy(dataset)
    other.factor = 10
    assert (dataset[3], other[3], other.__getitems__([1, -1])) == (3, 30, [10, 50])


@pytest.mark.parametrize("kind", [torchobj.ObjectMapDataset, torchobj.ObjectIterableDataset])
def test_an_object_that_cannot_be_read_is_named_by_its_sample(folder, kind):
    url = f"file://{folder}/missing"
    with pytest.raises(ObjectNotFoundError) as raised:
        list(kind.from_objects([f"file://{folder}/0", url]))
    assert raised.value.__notes__ == [f"in the read of sample 1, {url}"]


def test_a_users_dataset_without_a_length_is_prepared_for_workers(folder):
    class Named(torchobj.ObjectDataset):
        def objects_at(self, index):
            return [torchobj.ObjectRef(f"file://{folder}/{index}")]

        def __getitem__(self, index):
            return index

    dataset = Named()
    prepare_workers(dataset)
    loader = torchobj.DataLoader(dataset, batch_sampler=[[0, 1], [2]], lookahead=0)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2]]


def test_subclasses_may_use_plain_names(folder):
    class Kept(torchobj.ObjectIterableDataset):
        def __init__(self, url):
            super().__init__(url, transform=lambda reader: reader.read()[0])
            self._source, self._start, self._loaded, self._latest, self._within = "train", 0, False, None, None

    assert list(Kept(f"file://{folder}/")) == list(range(COUNT))
