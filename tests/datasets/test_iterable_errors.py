"""Iterable datasets: failing samples and invalid settings."""

import copy
import itertools

import pytest

import torchobj
from tests.support.iterables import COUNT, dataset, fails_for_seven, numbers, write_objects
from torchobj import exceptions


@pytest.fixture
def folder(tmp_path):
    return write_objects(tmp_path)


def test_failing_samples_are_skipped_and_counted(folder, caplog):
    samples = dataset(folder, fails_for_seven, on_error="skip")
    assert len(samples.manifest) == COUNT
    (folder / "k200").unlink()
    wanted = [number for number in range(COUNT) if number not in (7, 200)]
    assert list(samples) == wanted
    assert samples.failed_samples == 2
    assert len([record for record in caplog.records if "was skipped: ArithmeticError: seven" in record.message]) <= 1
    assert sorted(numbers(torchobj.DataLoader(samples, batch_size=8, num_workers=2))) == wanted
    iterator = iter(samples)
    list(itertools.islice(iterator, 10))
    samples.load_state_dict(samples.state_dict())
    assert list(samples) == list(iterator)


def test_a_callable_replaces_failing_samples(folder):
    seen = []

    def instead(index, url, error):
        seen.append((index, url, str(error)))
        return -index

    samples = dataset(folder, fails_for_seven, on_error=instead)
    assert list(samples)[6:9] == [6, -7, 8]
    assert seen == [(7, f"file://{folder}/k007", "seven")]
    assert samples.failed_samples == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_sample_raises_and_the_next_one_follows(folder, workers):
    samples = dataset(folder, fails_for_seven)
    assert len(samples.manifest) == COUNT
    (folder / "k200").unlink()
    iterator = iter(torchobj.DataLoader(samples, batch_size=None, num_workers=workers))
    found, errors = [], []
    while len(found) + len(errors) < COUNT:
        try:
            found.append(next(iterator))
        except (ArithmeticError, exceptions.ObjectNotFoundError) as error:
            errors.append(type(error).__name__)
    assert sorted(found) == [number for number in range(COUNT) if number not in (7, 200)]
    assert sorted(errors) == ["ArithmeticError", "ObjectNotFoundError"]
    assert next(iterator, None) is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"on_error": "replace"}, "use 'skip'"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"on_error": "skip", "uneven": "pad"}, "on_error='skip': cannot be combined with uneven"),
        ({"uneven": "cut"}, "uneven='cut'"),
        ({"uneven": "drop", "enable_sharding": False}, "needs enable_sharding=True"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": "x"}, "seed='x'"),
        ({"shuffle": "no"}, "shuffle='no': must be True or False"),
        ({"enable_sharding": "no"}, "enable_sharding='no': must be True or False"),
    ],
)
def test_contradictory_settings_are_refused(folder, settings, said):
    with pytest.raises(exceptions.ConfigError, match=said):
        dataset(folder, **settings)


@pytest.mark.parametrize("epoch", [-1, "a", 1.5, None])
def test_an_invalid_epoch_is_refused(folder, epoch):
    with pytest.raises(exceptions.ConfigError, match=f"epoch={epoch!r}: must be an int, 0 or more"):
        dataset(folder).set_epoch(epoch)


@pytest.mark.parametrize("create", ["from_prefix", "from_objects"])
def test_enable_sharding_is_a_bool_in_the_other_constructors_too(create):
    with pytest.raises(exceptions.ConfigError, match="enable_sharding='no': must be True or False"):
        getattr(torchobj.ObjectIterableDataset, create)("memory://shards/a", enable_sharding="no")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": None}, "seed of the state=None: must be an int, 0 or more"),
        ({"epoch": "1"}, "epoch of the state='1'"),
        ({"done": -1}, "done of the state=-1"),
        ({"shape": 5}, "shape of the state=5: must be a dict"),
    ],
)
def test_what_is_not_a_state_is_refused(folder, change, message):
    samples = dataset(folder, shuffle=True, seed=3)
    before = samples.state_dict()
    with pytest.raises(exceptions.ConfigError, match=message):
        samples.load_state_dict(before | change)
    for state in ({}, [], None, {name: value for name, value in before.items() if name not in change}):
        with pytest.raises(exceptions.ConfigError, match="state"):
            samples.load_state_dict(state)
    assert samples.state_dict() == before
    samples.load_state_dict(before | {"done": 1, "shape": {}})
    with pytest.raises(exceptions.ConfigError, match="cannot be resumed"):
        iter(samples)


def stopping(reader):
    if reader.key.endswith("3"):
        raise StopIteration
    return reader.key


@pytest.mark.parametrize("on_error", ["raise", lambda *_: next(iter(()))], ids=["raise", "handler"])
def test_a_stop_iteration_of_a_transform_or_handler_does_not_end_the_pass(on_error):
    store = torchobj.Store("memory://stopping")
    for number in range(6):
        store.put(f"k{number}", b"x")
    iterator = iter(torchobj.ObjectIterableDataset("memory://stopping/", transform=stopping, on_error=on_error))
    assert [next(iterator) for _ in range(3)] == ["k0", "k1", "k2"]
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(iterator)
    assert list(iterator) == ["k4", "k5"]


def test_a_copy_of_a_dataset_has_its_own_handling_of_errors():
    data = torchobj.ObjectIterableDataset("memory://stopping/")
    other = copy.copy(data)
    other.on_error = "skip"
    assert (data.on_error, other.on_error) == ("raise", "skip")
