"""Samples of tar shards as dicts: missing fields are named with their sample, and decoders that match nothing."""

import copy
import io
import json
import logging
import pickle
import traceback

import pytest
import torch.utils.data

import torchobj
from tests.support.long_tables import often
from torchobj.datasets.containers.tar_samples import Sample

KINDS = [torchobj.TarIterableDataset, torchobj.TarMapDataset]
MESSAGE = "train-001.tar: its fields are cls, png"


@pytest.fixture(scope="module")
def pattern(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tar-samples")
    with torchobj.ShardWriter(f"file://{folder}/train-%03d.tar", maxcount=2) as writer:
        for number in range(4):
            writer.write({"__key__": str(number), "png" if number == 2 else "jpg": b"image", "cls": number})
    return f"file://{folder}/train-*.tar"


def jpg_of(sample):
    return bytes(sample["jpg"])


def jpgs_of(batch):
    return [bytes(sample["jpg"]) for sample in batch]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{"collate_fn": jpgs_of}, {}, {"batch_size": None}], ids=["user", "", "transform"])
@pytest.mark.parametrize(
    ("loader", "workers"),
    often(2, [(torchobj.DataLoader, 0), (torchobj.DataLoader, 1), (torch.utils.data.DataLoader, 1)]),
)
def test_a_missing_field_is_named_with_its_sample(pattern, kind, workers, settings, loader):
    # A transform, a function of the user that collates, and the default collation of samples of different fields.
    transform = jpg_of if settings.get("batch_size", 4) is None else None
    settings = {"batch_size": 4, "multiprocessing_context": "fork" if workers else None, **settings}
    with pytest.raises(KeyError) as raised:
        list(loader(kind(pattern, transform=transform), num_workers=workers, **settings))
    assert "no field 'jpg' in '2', file://" in str(raised.value)
    assert MESSAGE in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "settings",
    [
        {"decode": {"cls": json.loads}},
        {"transform": lambda sample: json.loads(sample["cls"])},
        {"transform": lambda sample: sample["cls"].split()},
        {"decode": {"cls": int.from_bytes}, "transform": lambda sample: sample["jpg"] + b""},
    ],
)
def test_a_buffer_that_is_used_as_bytes_is_an_error_that_names_the_conversion(pattern, kind, workers, settings):
    with pytest.raises((TypeError, AttributeError)) as raised:
        list(torchobj.DataLoader(kind(pattern, **settings), batch_size=None, num_workers=workers))
    assert "pass bytes(buffer), or buffer.decode()" in "".join(traceback.format_exception(raised.value))


class RolloutBuffer:
    """Of another library."""


@pytest.mark.parametrize(
    "transform",
    [
        lambda _: io.BufferedReader(io.BytesIO()).split(),
        lambda _: RolloutBuffer().split(),
        lambda _: b"".join([RolloutBuffer()]),
    ],
)
def test_other_classes_with_this_word_in_their_names_are_no_buffer(pattern, transform):
    with pytest.raises((TypeError, AttributeError)) as raised:
        list(torchobj.TarIterableDataset(pattern, transform=transform))
    assert "bytes(buffer)" not in "".join(traceback.format_exception(raised.value))


def test_a_missing_field_is_named_where_the_sample_is_used(pattern):
    samples = torchobj.TarIterableDataset(pattern, shuffle_buffer=2, shuffle_shards=False)
    assert sum("jpg" in sample for sample in samples) == 3
    for sample in (next(each for each in samples if each["__key__"] == "2"), torchobj.TarMapDataset(pattern)[2]):
        for each in (sample, pickle.loads(pickle.dumps(sample)), copy.deepcopy(sample)):
            with pytest.raises(KeyError) as raised:
                each["jpg"]
            assert raised.value.args == (f"no field 'jpg' in '2', {sample['__url__']}: its fields are cls, png",)
        assert (sample.get("jpg"), isinstance(sample, dict), set(sample)) == (
            None, True, {"__key__", "__url__", "png", "cls"},
        )  # fmt: skip


def test_a_sample_is_equal_to_a_dict_and_its_copies_are_dicts():
    fields = {"__key__": "a", "__url__": "s3://bucket/a.tar", "cls": 1}
    sample = Sample(fields)
    assert (sample, repr(sample)) == (fields, repr(fields))
    assert type(copy.copy(sample)) is type(sample.copy()) is dict
    for batch in (
        next(iter(torchobj.DataLoader([sample] * 3, batch_size=3))),
        next(iter(torchobj.DataLoader([sample], batch_size=None))),
    ):
        assert type(batch) is dict


@pytest.fixture
def lines(tmp_path):
    """The lines that this process and its workers log."""
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("torchobj").addHandler(handler)
    yield lambda: (tmp_path / "log").read_text().splitlines()
    logging.getLogger("torchobj").removeHandler(handler)
    handler.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("workers", "method"), [
    (0, None), (2, "fork"),
])  # fmt: skip
def test_decoders_that_match_no_field_are_named_once(pattern, kind, workers, method, lines):
    dataset = kind(pattern, decode={"jpeg": bytes, "class": int})
    for _ in range(2):
        loader = torchobj.DataLoader(
            dataset, batch_size=2, num_workers=workers, multiprocessing_context=method, collate_fn=list
        )
        assert len([sample for batch in loader for sample in batch]) == 4
    [line] = lines()
    assert "has the fields cls, jpg" in line
    assert "decode has only jpeg, class, so that nothing is decoded" in line


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decode", [None, {}, {"jpg": bytes}, {"absent": bytes, "cls": bytes}], ids=str)
def test_decoders_of_which_one_matches_are_not_named(pattern, kind, decode, lines):
    assert len(list(torchobj.DataLoader(kind(pattern, decode=decode), batch_size=None))) == 4
    assert lines() == []
