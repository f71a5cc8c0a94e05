"""`torchobj.ObjectDataset`: samples of objects that the user names, read ahead like those of a listing."""

import json
import multiprocessing
import pickle

import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, random_split

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.prefetching import Taken, all_free, eventually, stats
from torchobj import ObjectRef, _torchobj, exceptions
from torchobj.loader import lookahead

# test_each_store.py reads from GCS in each run.
pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

COUNT = 40


def body(number):
    return bytes([number]) * (100 + 37 * number)


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"{number} é.bin").write_bytes(body(number))
        (tmp_path / f"{number}.json").write_text(json.dumps({"label": 3 * number}))
    return tmp_path


class Pairs(torchobj.ObjectDataset):
    """An object and its label."""

    def __init__(self, folder, **settings):
        super().__init__(**settings)
        self.folder = folder

    def __len__(self):
        return COUNT

    def objects_at(self, index):
        return [
            ObjectRef(f"file://{self.folder}/{index} é.bin"),
            ObjectRef(f"file://{self.folder}/{index}.json", size=12 if index == 3 else None),
        ]

    def build(self, index, readers):
        image, label = readers
        return index, bytes(image), json.load(label)["label"]


def pair(number):
    return number, body(number), 3 * number


class Shard(torchobj.ObjectDataset):
    """Samples are ranges of one object; its constructor does not call the base class's."""

    def __init__(self, url, ends):
        self.url, self.ends = url, ends

    def __len__(self):
        return len(self.ends)

    def objects_at(self, index):
        return [ObjectRef(self.url, self.ends[index - 1] if index else 0, self.ends[index])]

    def build(self, index, readers):
        [reader] = readers
        return index, reader.read()


@pytest.fixture
def shard(tmp_path):
    bodies = [body(number) for number in range(COUNT)]
    (tmp_path / "shard.tar").write_bytes(b"".join(bodies))
    ends = [sum(map(len, bodies[: number + 1])) for number in range(COUNT)]
    return Shard(f"file://{tmp_path}/shard.tar", ends)


def run(loader_class, dataset, **settings):
    torch.manual_seed(7)
    return [sample for batch in loader_class(dataset, shuffle=True, collate_fn=list, **settings) for sample in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_pairs_come_in_torchs_order_with_their_bytes_and_were_announced(folder, workers):
    settings = {"batch_size": 7, "num_workers": workers}
    stock = run(torch.utils.data.DataLoader, [pair(number) for number in range(COUNT)], **settings)
    with Taken() as taken:
        assert run(torchobj.DataLoader, Pairs(folder), **settings) == stock
    assert (taken.misses, taken.announced, taken.objects) == (0, 2 * COUNT, 2 * COUNT)
    assert all_free()


def test_a_sample_that_was_read_before_its_use_is_a_hit(folder, monkeypatch):
    # All is announced before the first batch is requested.
    monkeypatch.setattr(lookahead, "_MAX_DRAWING_S", 60)
    with Taken() as taken:
        iterator = iter(torchobj.DataLoader(Pairs(folder), batch_size=4, num_workers=1, collate_fn=list))
        first = next(iterator)
        read = taken.before["objects"] + 2 * COUNT
        assert eventually(lambda: stats()["objects"] == read)
        assert [sample for batch in [first, *iterator] for sample in batch] == [pair(n) for n in range(COUNT)]
    # torch has requested two more batches by then.
    assert taken.hits >= 2 * (COUNT - 3 * 4)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_can_be_ranges_of_one_object_and_only_the_ranges_are_read(shard, workers):
    before = stats()["bytes"]
    with Taken() as taken:
        found = run(torchobj.DataLoader, shard, batch_size=5, num_workers=workers)
    assert sorted(found) == [(number, body(number)) for number in range(COUNT)]
    assert taken.misses == 0
    assert stats()["bytes"] - before == sum(len(body(number)) for number in range(COUNT))
    assert all_free()


@pytest.mark.parametrize("context", ["forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_workers_can_be_spawned(folder, context):
    with Taken() as taken:
        found = run(torchobj.DataLoader, Pairs(folder), batch_size=7, num_workers=2, multiprocessing_context=context)
    assert sorted(found) == [pair(number) for number in range(COUNT)]
    assert (taken.misses, taken.announced) == (0, 2 * COUNT)


def test_workers_of_a_plain_dataloader_read_through_the_process_that_created_the_dataset(folder):
    with Taken() as taken:
        found = run(torch.utils.data.DataLoader, Pairs(folder), batch_size=7, num_workers=2)
    assert sorted(found) == [pair(number) for number in range(COUNT)]
    assert (taken.misses, taken.announced) == (2 * COUNT, 0)


def test_a_subclass_that_does_not_call_the_base_constructor_works_under_a_plain_dataloader(shard):
    expected = [(number, body(number)) for number in range(COUNT)]
    assert sorted(run(torch.utils.data.DataLoader, shard, batch_size=5, num_workers=1)) == expected
    assert [shard[number] for number in range(COUNT)] == expected
    assert list(shard) == expected


def test_an_unannounced_sample_is_read_while_announced_ones_are(folder):
    dataset = Pairs(folder)
    assert dataset[5] == pair(5)
    assert dataset[-1] == pair(COUNT - 1)
    iterator = iter(torchobj.DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=list))
    assert next(iterator) == [pair(0), pair(1)]
    assert dataset[COUNT - 2] == pair(COUNT - 2)
    assert dataset.__getitems__([1, 1, -1]) == [pair(1), pair(1), pair(COUNT - 1)]
    assert [sample for batch in iterator for sample in batch] == [pair(number) for number in range(2, COUNT)]


def test_objects_of_torchs_dataset_wrappers_are_announced(folder, shard):
    plain = Pairs(folder)
    first, second = random_split(plain, [25, 15], generator=torch.Generator().manual_seed(0))
    wrapped = {
        "subset": Subset(plain, [5, 3, 3, 39]),
        "split": first,
        "concatenated": ConcatDataset([second, shard]),
        "stacked": StackDataset(plain, shard),
        "next to a listing": ConcatDataset(
            [plain, torchobj.ObjectMapDataset(f"file://{folder}/", suffixes=".json", transform=bytes)]
        ),
    }
    for name, outer in wrapped.items():
        with Taken() as taken:
            found = run(torchobj.DataLoader, outer, batch_size=4, num_workers=1)
        assert sorted(map(repr, found)) == sorted(repr(outer[index]) for index in range(len(outer))), name
        assert taken.misses == 0, name
        assert taken.announced >= len(outer), name
    assert all_free()


class Several(torchobj.ObjectDataset):
    """Samples of objects in several buckets and schemes."""

    def __init__(self, urls, **settings):
        super().__init__(**settings)
        self.urls = urls

    def __len__(self):
        return len(self.urls)

    def objects_at(self, index):
        return [ObjectRef(url) for url in self.urls[index]]

    def build(self, index, readers):
        return [(reader.url, reader.key, reader.bucket, reader.read()) for reader in readers]


def test_a_sample_can_have_any_number_of_objects_of_several_buckets_and_schemes(bucket, other_bucket, folder):
    bucket.write("a b+ü%20//c", b"one")
    other_bucket.write("k", b"two")
    torchobj.Store("memory://several").put("m", b"three")
    urls = [f"{bucket.url}/a b+ü%20//c", f"{other_bucket.url}/k", "memory://several/m", f"file://{folder}/0.json"]
    expected = list(zip(urls, (b"one", b"two", b"three", b'{"label": 0}'), strict=True))
    dataset = Several([urls, [], urls[1:2] * 3], config=bucket.config)
    for workers in (0, 2):
        with Taken() as taken:
            found = list(torchobj.DataLoader(dataset, batch_size=None, num_workers=workers))
        assert [[(url, data) for url, _, _, data in sample] for sample in found] == [expected, [], expected[1:2] * 3]
        assert taken.misses == 0
        assert list(found[0][0][1:3]) == ["a b+ü%20//c", bucket.name]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_object_that_cannot_be_read_is_an_error_of_its_sample_only(folder, workers):
    (folder / "7.json").unlink()
    iterator = iter(torchobj.DataLoader(Pairs(folder), batch_size=1, num_workers=workers, collate_fn=list))
    for number in range(COUNT):
        if number == 7:
            with pytest.raises(exceptions.ObjectNotFoundError) as caught:
                next(iterator)
            told = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
            assert f"get file://{folder}/7.json" in told
            assert f"in the read of sample 7, file://{folder}/7.json" in told
        else:
            assert next(iterator) == [pair(number)]
    # torch stops its workers here, not in the garbage collector, where it waits for ten seconds.
    assert next(iterator, None) is None
    del iterator, caught
    assert all_free()


class Fussy(Pairs):
    """Raises in `build`."""

    def build(self, index, readers):
        if index == 4:
            raise ArithmeticError("four")
        return super().build(index, readers)


def stand_in(index, url, error):
    return index, url.rsplit("/", 1)[1], type(error).__name__


def test_on_error_of_the_dataset_handles_a_bad_sample(folder):
    (folder / "7.json").unlink()
    replaced = Fussy(folder, on_error="replace")
    assert [replaced[number][0] for number in (3, 4, 7)] == [3, 5, 8]
    assert replaced.failed_samples == 2
    called = run(torchobj.DataLoader, Fussy(folder, on_error=stand_in), batch_size=8, num_workers=2)
    bad = [(4, "4 é.bin", "ArithmeticError"), (7, "7.json", "ObjectNotFoundError")]
    assert sorted(called, key=repr) == sorted(bad + [pair(n) for n in range(COUNT) if n not in (4, 7)], key=repr)
    with pytest.raises(ArithmeticError) as caught:
        Fussy(folder)[4]
    assert caught.value.__notes__ == [f"in build of sample 4, file://{folder}/4 é.bin"]
    for policy in ("skip", "ignore"):
        with pytest.raises(exceptions.ConfigError, match="on_error"):
            Fussy(folder, on_error=policy)


class Odd(torchobj.ObjectDataset):
    """`objects_at` returns invalid values."""

    def __len__(self):
        return 4

    def objects_at(self, index):
        return {0: [], 1: "file:///x", 2: ObjectRef("file:///x"), 3: None}[index]

    def build(self, index, readers):
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_an_invalid_sequence_of_refs_is_an_error_of_its_sample(workers):
    iterator = iter(torchobj.DataLoader(Odd(), batch_size=1, num_workers=workers))
    assert next(iterator).tolist() == [0]
    for _ in range(3):
        with pytest.raises(TypeError, match="must be a sequence of ObjectRef"):
            next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_missing_bucket_or_unknown_scheme_is_an_error_of_its_sample(folder):
    urls = [[f"file://{folder}/0.json"], ["ftp://host/x"], [f"file://{folder}/1.json"]]
    for workers in (0, 1):
        iterator = iter(torchobj.DataLoader(Several(urls), batch_size=None, num_workers=workers))
        assert next(iterator)[0][3] == b'{"label": 0}'
        with pytest.raises(exceptions.ConfigError, match="no store for scheme"):
            next(iterator)
        assert next(iterator)[0][3] == b'{"label": 3}'
    with pytest.raises(exceptions.ConfigError, match="no store for scheme"):
        Several(urls)[1]


def test_invalid_indices_are_refused(folder):
    dataset = Pairs(folder)
    for index in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError, match=f"of {COUNT} samples"):
            dataset[index]
    with pytest.raises(TypeError, match="must be an int"):
        dataset["3"]
    with pytest.raises(NotImplementedError, match=r"ObjectDataset must define __len__\(\)"):
        torchobj.ObjectDataset()[0]


class Doubled(Pairs):
    def __getitem__(self, index):
        return [super().__getitem__(index)] * 2


def test_a_batch_has_the_samples_of_an_overridden_getitem(folder):
    with Taken() as taken:
        found = list(torchobj.DataLoader(Doubled(folder), batch_size=8, num_workers=1, collate_fn=list))
    assert [sample for batch in found for sample in batch] == [[pair(number)] * 2 for number in range(COUNT)]
    assert taken.misses == 0


class Nothing(torchobj.ObjectDataset):
    def __len__(self):
        return 1


def test_a_method_missing_in_a_subclass_is_named():
    with pytest.raises(NotImplementedError, match=r"Nothing must define objects_at\(index\)"):
        Nothing()[0]


def test_an_object_replaced_since_its_ref_was_created_is_an_error(folder):
    store = torchobj.Store("memory://replaced-objects")
    old = store.put("k", b"old")
    assert [
        reader.read()
        for reader in _torchobj.read_refs([("", store.config)], [ObjectRef("memory://replaced-objects/k", version=old)])
    ] == [b"old"]
    store.put("k", b"new")
    [error] = _torchobj.read_refs([("", store.config)], [ObjectRef("memory://replaced-objects/k", version=old)])
    assert isinstance(error, exceptions.ObjectChangedError)


class Raw(Pairs):
    """Returns the readers themselves."""

    def build(self, index, readers):
        return readers[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_returned_readers_are_a_ragged_batch_that_outlives_the_workers(folder, workers):
    batches = list(torchobj.DataLoader(Raw(folder), batch_size=8, num_workers=workers))
    assert [bytes(batch[index].numpy()) for batch in batches for index in range(len(batch))] == [
        body(number) for number in range(COUNT)
    ]
    del batches
    assert all_free()


def read_elsewhere(dataset, queue):
    queue.put([dataset[number] for number in (0, COUNT - 1)])


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_another_process_reads_for_itself(folder, method):
    dataset = Pairs(folder)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=read_elsewhere, args=(dataset, queue))
    process.start()
    assert queue.get(timeout=150) == [pair(0), pair(COUNT - 1)]
    process.join(150)
    assert pickle.loads(pickle.dumps(dataset))[3] == pair(3)


def test_a_ref_is_checked_compared_and_pickled():
    ref = ObjectRef("s3://bucket/a key/é", 5, 9, size=100, version='"e"')
    assert (ref.url, ref.key, ref.start, ref.end, ref.size, ref.version) == (
        "s3://bucket/a key/é",
        "a key/é",
        5,
        9,
        100,
        '"e"',
    )
    assert pickle.loads(pickle.dumps(ref)) == ref
    assert eval(repr(ref)) == ref
    assert len({ref, pickle.loads(pickle.dumps(ref)), ObjectRef(ref.url), ObjectRef(ref.url, 0)}) == 2
    assert repr(ObjectRef("memory://b/k")) == "ObjectRef('memory://b/k')"
    with pytest.raises(AttributeError):
        ref.start = 3
    for arguments, said in (
        (("bucket/key",), "bucket/key: not a URL"),
        (("s3://bucket",), "s3://bucket: names no object"),
        (("s3://b/k", -1), "s3://b/k: start=-1: must be 0 or more"),
        (("s3://b/k", 0, 5, -1), "s3://b/k: size=-1: must be 0 or more"),
        (("s3://b/k", 7, 5), "s3://b/k: range 7..5: must have start <= end"),
        (("s3://b/" + "k" * 20_000,), "URL and version have 20007 bytes: must be at most 16384"),
    ):
        with pytest.raises(exceptions.ConfigError) as caught:
            ObjectRef(*arguments)
        assert said in str(caught.value)
    with pytest.raises(TypeError):
        ObjectRef(3)


class Records(torchobj.ObjectDataset):
    """Records of 100 bytes of one object."""

    def __init__(self, url, count, **settings):
        super().__init__(**settings)
        self.url, self.count = url, count

    def __len__(self):
        return self.count

    def objects_at(self, index):
        return [ObjectRef(self.url, index * 100, index * 100 + 100)]

    def build(self, index, readers):
        return index, readers[0].read()


def test_shuffled_ranges_of_an_object_take_few_requests(bucket, control):
    count = 1000
    bucket.write("records", b"".join(number.to_bytes(2, "big") * 50 for number in range(count)))
    control.clear_requests()
    records = Records(f"{bucket.url}/records", count, config=bucket.config)
    loader = torchobj.DataLoader(records, batch_size=10, shuffle=True, collate_fn=list)
    read = [sample for batch in loader for sample in batch]
    assert sorted(read) == [(number, number.to_bytes(2, "big") * 50) for number in range(count)]
    # Reads start while later records are still drawn.
    assert len(control.requests("GetObject")) <= count // 2
