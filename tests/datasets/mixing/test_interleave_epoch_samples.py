"""`epoch_samples` of mixtures: the number of samples of an epoch of the job, whatever the lengths of its datasets."""

import collections
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import torchobj
from torchobj.exceptions import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("epoch-samples")
    for name, first, rows in (("a", 0, 40), ("b", 100, 24)):
        (path / name).mkdir()
        pq.write_table(pa.table({"id": range(first, first + rows)}), path / name / "rows.parquet", row_group_size=4)
    (path / "few").mkdir()
    pq.write_table(pa.table({"id": [200]}), path / "few/rows.parquet")
    return path


def row_id(row):
    return row["id"]


def rows(folder, name, **options):
    return torchobj.ParquetIterableDataset(f"file://{folder}/{name}/", transform=row_id, **options)


def mixed(folder, samples, *args, names=("a", "b"), **options):
    members = [rows(folder, name, shuffle=True) for name in names]
    return torchobj.interleave(members, *args, epoch_samples=samples, **options)


@pytest.mark.parametrize("samples", [1, 30, 500])
@pytest.mark.parametrize("probabilities", [None, [0.75, 0.25], [1.0, 0.0]], ids=str)
def test_an_epoch_has_this_number_of_samples(folder, samples, probabilities):
    mixture = mixed(folder, samples, probabilities)
    first, second = list(mixture), list(mixture)
    assert len(first) == len(second) == len(torchobj.DataLoader(mixture)) == samples
    assert samples == 1 or first != second
    counts = collections.Counter(first)
    # No sample is repeated before all of its dataset were drawn.
    for of_dataset in ([each for each in counts if each < 100], [each for each in counts if each >= 100]):
        assert not of_dataset or max(map(counts.get, of_dataset)) - min(map(counts.get, of_dataset)) <= 1


def test_the_ranks_have_equal_parts_rounded_up(folder):
    found = []
    for rank in range(3):
        mixture = mixed(folder, 40, rank=rank, world_size=3)
        loader = torchobj.DataLoader(mixture, batch_size=4, num_workers=2)
        batches = [batch.tolist() for batch in loader]
        assert sum(map(len, batches)) == 14
        assert len(loader) == len(batches) == 4
        found += [number for batch in batches for number in batch]
    assert len(set(found)) == len(found)


def test_a_mixture_of_map_style_datasets_has_this_length(folder):
    members = [range(3), range(10, 20)]
    mixture = torchobj.interleave(members, epoch_samples=9)
    assert [*mixture] == [0, 10, 1, 11, 2, 12, 0, 13, 1]
    assert len(mixture) == 9
    drawn = torchobj.interleave(members, [0.5, 0.5], seed=3, epoch_samples=100_000)
    assert len(drawn) == 100_000
    # The draws are those of a mixture that ends otherwise.
    ended = torchobj.interleave(members, [0.5, 0.5], seed=3)
    assert [drawn[at] for at in range(len(ended))] == list(ended)
    batches = list(torchobj.DataLoader(mixture, batch_size=2, sampler=torch.utils.data.RandomSampler(mixture)))
    assert sum(map(len, batches)) == 9


@pytest.mark.parametrize("done", [1, 45, 59])
def test_an_epoch_is_resumed_exactly(folder, done):
    def loader():
        return torchobj.DataLoader(mixed(folder, 60, [0.3, 0.7]), batch_size=None, num_workers=2)

    whole, first, second = list(loader()), loader(), loader()
    samples = iter(first)
    assert [next(samples) for _ in range(done)] == whole[:done]
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert list(second) == whole[done:]
    assert len(list(second)) == 60


def test_a_state_of_another_number_is_refused(folder):
    mixture, other = mixed(folder, 30), mixed(folder, 31)
    samples = iter(mixture)
    next(samples)
    other.load_state_dict(mixture.state_dict())
    with pytest.raises(ConfigError, match=r"epoch_samples=30 \(now 31\)"):
        iter(other)


def test_a_worker_without_samples_of_one_dataset_draws_from_the_others(folder, caplog):
    for rank in range(2):
        mixture = mixed(folder, 20, names=("a", "few"), rank=rank, world_size=2)
        assert len(list(mixture)) == 10
    assert "datasets[1] of a mixture has no samples for worker 0: its passes over it are empty" in caplog.text


def test_a_worker_without_any_samples_is_an_error(folder):
    mixture = mixed(folder, 20, [1.0, 0.0], names=("few", "b"), rank=1, world_size=2)
    with pytest.raises(ConfigError, match="a worker has no samples of any dataset, and 10 of its epoch are missing"):
        list(mixture)


@pytest.mark.parametrize("samples", [0, -1, 1.5, True, "9"])
def test_an_invalid_number_is_refused(folder, samples):
    with pytest.raises(ConfigError, match="epoch_samples=.*must be 1 or more, or None"):
        mixed(folder, samples)
    with pytest.raises(ConfigError, match="epoch_samples=.*must be 1 or more, or None"):
        torchobj.interleave([range(3)], epoch_samples=samples)
