"""`torchobj.GroupDataset`: objects with a common stem, equal to grouping local files."""

import json
import logging
from pathlib import Path

import pytest
import torch

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.prefetching import Taken, all_free
from torchobj import decode
from torchobj.exceptions import ConfigError, ObjectNotFoundError
from torchobj.warn_once import PROCESS

FIELDS = {"image": ".jpg", "mask": ".mask.png", "meta": ".json"}
SUFFIXES = tuple(FIELDS.values())
STEMS = [*(f"{number}" for number in range(20)), "a", "a-b", "a/b", "a/é #%20", "a.b", ".hidden", "deep/er/x y"]


def body(stem, suffix):
    return json.dumps([stem, suffix]).encode()


def write(write_one, stems=STEMS, suffixes=SUFFIXES):
    for stem in stems:
        for suffix in suffixes:
            write_one(f"{stem}{suffix}", body(stem, suffix))


def in_memory(name, stems=STEMS, suffixes=SUFFIXES):
    write(torchobj.Store(f"memory://{name}/train/").put, stems, suffixes)
    return f"memory://{name}/train"


def decoded(sample):
    return {name: value if name == "__key__" else decode.json(value) for name, value in sample.items()}


def expected(stem):
    return {"__key__": stem, **{name: [stem, suffix] for name, suffix in FIELDS.items()}}


def test_a_sample_is_a_dict_of_readers_with_its_key():
    url = in_memory("group-readers")
    dataset = torchobj.GroupDataset(url, FIELDS)
    assert "not listed yet, fields: image, mask, meta" in repr(dataset)
    sample = dataset[-1]
    assert list(sample) == ["__key__", "image", "mask", "meta"]
    assert (sample["__key__"], sample["mask"].url) == ("deep/er/x y", f"{url}/deep/er/x y.mask.png")
    assert sample["mask"].read() == body("deep/er/x y", ".mask.png")
    assert [dataset.key(number) for number in range(len(dataset))] == sorted(STEMS)
    assert dataset.key(-1) == "deep/er/x y"
    with pytest.raises(IndexError):
        dataset.key(len(dataset))
    with pytest.raises(KeyError, match="no field 'imag' in 'deep/er/x y': its fields are image, mask, meta"):
        sample["imag"]


class LocalGroups(torch.utils.data.Dataset):
    """The same groups of local files."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.stems = sorted(str(file.relative_to(folder)).removesuffix(".jpg") for file in folder.rglob("*.jpg"))

    def __len__(self):
        return len(self.stems)

    def __getitem__(self, index):
        stem = self.stems[index]
        parts = {name: json.loads((self.folder / f"{stem}{suffix}").read_bytes()) for name, suffix in FIELDS.items()}
        return {"__key__": stem, **parts}


def shuffled(kind, dataset, **settings):
    torch.manual_seed(3)
    loader = kind(dataset, batch_size=4, shuffle=True, collate_fn=list, **settings)
    return [sample for batch in loader for sample in batch]


@pytest.mark.providers("s3", GCS_IN_MATRIX)
@pytest.mark.parametrize("method", [None, "fork", "forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_a_shuffled_epoch_equals_local_files_and_every_read_is_announced(bucket, tmp_path, method):
    def write_both(name, data):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
        bucket.write(f"train/{name}", data)

    write(write_both)
    settings = {} if method is None else {"num_workers": 2, "multiprocessing_context": method}
    dataset = torchobj.GroupDataset(f"{bucket.url}/train/", FIELDS, decoded, config=bucket.config)
    with Taken() as taken:
        found = shuffled(torchobj.DataLoader, dataset, **settings)
    assert found == shuffled(torch.utils.data.DataLoader, LocalGroups(tmp_path))
    assert sorted(sample["__key__"] for sample in found) == sorted(STEMS)
    assert (taken.misses, taken.announced, taken.objects) == (0, 3 * len(STEMS), 3 * len(STEMS))
    assert all_free()


def test_the_longest_suffix_wins():
    url = in_memory("group-longest", ["a", "b"], [".png", ".mask.png", ".big.mask.png"])
    fields = {"image": ".png", "big": ".big.mask.png", "mask": ".mask.png"}
    dataset = torchobj.GroupDataset(url, fields, decoded)
    assert list(dataset) == [
        {"__key__": stem, **{name: [stem, suffix] for name, suffix in fields.items()}} for stem in "ab"
    ]


def test_other_objects_are_ignored():
    url = in_memory("group-others", ["a"], [*FIELDS.values(), ".txt", ".JPG", ""])
    store = torchobj.Store("memory://group-others")
    for name in ("train/.jpg", "train/sub/.json", "training/x.jpg", "x.jpg"):
        store.put(name, b"")
    assert list(torchobj.GroupDataset(url, FIELDS, decoded)) == [expected("a")]


def incomplete(name, count=1):
    url = in_memory(name)
    for number in range(count):
        torchobj.Store(f"memory://{name}").delete(f"train/{number}.mask.png")
    torchobj.Store(f"memory://{name}").delete("train/0.json")
    return url


def test_a_group_with_missing_parts_is_an_error_that_names_them():
    dataset = torchobj.GroupDataset(incomplete("group-missing"), FIELDS)
    for use in (len, lambda it: it[0], lambda it: next(iter(torchobj.DataLoader(it, num_workers=1)))):
        with pytest.raises(FileNotFoundError, match=rf"memory://group-missing/train/: 1 of {len(STEMS)} groups are "
                           r"incomplete: '0' has no mask \(\.mask\.png\) and no meta \(\.json\); upload the objects, or "
                           "pass missing='drop'"):  # fmt: skip
            use(dataset)
    with pytest.raises(ObjectNotFoundError, match=r"'2' has no mask \(\.mask\.png\); and 4 more; upload"):
        len(torchobj.GroupDataset(incomplete("group-missing-more", 7), FIELDS))


def test_incomplete_groups_can_be_dropped_with_a_count(caplog):
    dataset = torchobj.GroupDataset(incomplete("group-dropped", 2), FIELDS, decoded, missing="drop")
    with caplog.at_level(logging.WARNING, "torchobj"):
        assert [sample["__key__"] for sample in dataset] == [stem for stem in sorted(STEMS) if stem not in "01"]
    [message] = caplog.messages
    assert message.startswith(f"memory://group-dropped/train/: 2 of {len(STEMS)} groups are incomplete and were dropped: "
                              "'0' has no mask (.mask.png) and no meta (.json); '1' has no mask")  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_a_folder_without_complete_groups_is_an_error():
    url = in_memory("group-wrong", ["a", "b"], [".jpg"])
    for fields, message in (({"x": ".bin", "y": ".txt"}, r"no object has a name that ends with one of \.bin, \.txt"),
                            ({"x": ".jpg", "y": ".jpeg"}, r"2 of 2 groups are incomplete.*check the suffixes")):  # fmt: skip
        with pytest.raises(ObjectNotFoundError, match=message):
            len(torchobj.GroupDataset(url, fields, missing="drop"))


def failing(sample):
    if sample["__key__"] == "1":
        raise ValueError("cannot decode")
    return sample["__key__"]


def test_a_transform_that_raises_names_the_first_object_of_the_sample(caplog, monkeypatch):
    monkeypatch.setattr(PROCESS, "_once", {})
    url = in_memory("group-failing", ["0", "1", "2"])
    with pytest.raises(ValueError, match="cannot decode") as raised:
        torchobj.GroupDataset(url, FIELDS, failing)[1]
    assert raised.value.__notes__ == [f"in build of sample 1, {url}/1.jpg"]
    dataset = torchobj.GroupDataset(url, FIELDS, failing, on_error="replace")
    assert (list(dataset), dataset.failed_samples) == (["0", "2", "2"], 1)
    assert f"sample 1, {url}/1.jpg, was replaced" in caplog.text


@pytest.mark.parametrize(("fields", "message"), [
    ({}, "must be suffixes by field"), (".jpg", "must be suffixes by field"), ({"a": ""}, "must be suffixes by field"),
    ({"a": ".x", "b": ".x"}, "must be fields with different suffixes"), ({"__key__": ".x"}, "must be without '__key__'"),
])  # fmt: skip
def test_wrong_fields_are_refused_at_once(fields, message):
    with pytest.raises(ConfigError, match=message):
        torchobj.GroupDataset("memory://group/train", fields)


def test_wrong_settings_are_refused_at_once():
    with pytest.raises(ConfigError, match="missing='skip': must be 'raise' or 'drop'"):
        torchobj.GroupDataset("memory://group/train", FIELDS, missing="skip")
    with pytest.raises(ConfigError, match="transform=3: must be callable"):
        torchobj.GroupDataset("memory://group/train", FIELDS, 3)
