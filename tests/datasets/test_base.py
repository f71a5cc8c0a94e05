"""Map and iterable datasets under torch's own DataLoader."""

import io
import logging
import mmap
import pickle
import signal

import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset

import torchobj
from tests.support import warm_python
from tests.support.long_tables import GCS_IN_MATRIX, often
from tests.support.prefetching import eventually
from torchobj import exceptions
from torchobj.warn_once import FORKED

# test_each_store.py reads from GCS in each run.
pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

COUNT = 50


def label_of(reader):
    return int(reader.key.split("/")[-1].split(".")[0]), reader.read()


def key_of(reader):
    return reader.key


def raises_for_seven(reader):
    if reader.key.endswith("07.bin"):
        raise ArithmeticError("seven")
    return reader.read()


def replacement(index, url, error):
    return f"{index} {url.rsplit('/', 1)[1]} {type(error).__name__}".encode()


@pytest.fixture
def filled(bucket):
    for number in range(COUNT):
        bucket.write(f"train/{number:02}.bin", f"body {number}".encode() * number)
    bucket.write("train/", b"")
    bucket.write("train/labels.csv", b"x")
    bucket.write("training.txt", b"x")
    return bucket


def expected(number):
    return f"body {number}".encode() * number


def dataset(bucket, **settings):
    return bucket.map_dataset(f"{bucket.url}/train/", config=bucket.config, suffixes=".bin", **settings)


def test_no_request_is_sent_before_the_first_use(bucket, control):
    bucket.map_dataset(f"{bucket.url}-missing/x/", config=bucket.config)
    assert control.requests() == []


def test_a_prefix_is_listed_once_and_without_its_folder(filled, control):
    control.clear_requests()
    everything = filled.map_dataset(f"{filled.url}/train/", config=filled.config)
    assert len(everything) == COUNT + 1
    assert len(everything) == len(list(everything))
    assert [request.operation for request in control.requests()].count("ListObjectsV2") == 1
    raw = filled.map_dataset(f"{filled.url}/train", config=filled.config)
    assert len(raw) == COUNT + 2


def test_glob_suffixes_and_limit_filter_the_listing(filled):
    url = f"{filled.url}/train/"
    for settings, count in (
        ({"glob": "*.bin"}, COUNT),
        ({"glob": "0?.bin"}, 10),
        ({"glob": "*.csv"}, 1),
        ({"suffixes": (".csv", "9.bin")}, 6),
        ({"suffixes": ".bin", "limit": 7}, 7),
        ({"glob": "nothing", "allow_empty": True}, 0),
    ):
        assert len(filled.map_dataset(url, config=filled.config, **settings)) == count, settings
    with pytest.raises(exceptions.ConfigError, match="limit=0"):
        filled.map_dataset(url, limit=0)
    with pytest.raises(exceptions.ConfigError, match=r"a\[b"):
        len(filled.map_dataset(url, config=filled.config, glob="a[b"))


def test_samples_have_positive_and_negative_indices(filled):
    samples = dataset(filled, transform=label_of)
    assert samples[3] == (3, expected(3))
    assert samples[-1] == (49, expected(49))
    assert samples[torch.tensor(5)] == (5, expected(5))
    for index in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError, match=f"index {index} of {COUNT} samples"):
            samples[index]
    with pytest.raises(TypeError, match="must be an int"):
        samples["3"]
    with pytest.raises(TypeError, match="must be an int"):
        samples[1:3]


@pytest.mark.parametrize(
    ("context", "workers"),
    often(2, [("fork", 2), ("forkserver", 2), ("spawn", 1), ("spawn", 2)]),
)
def test_workers_read_the_right_bytes_after_the_parent_did(filled, context, workers):
    samples = dataset(filled, transform=label_of)
    assert samples[1] == (1, expected(1))
    loader = DataLoader(samples, batch_size=8, shuffle=True, num_workers=workers, multiprocessing_context=context)
    for _ in range(2 if context == "fork" else 1):
        seen = {label: body for labels, bodies in loader for label, body in zip(labels.tolist(), bodies, strict=True)}
        assert seen == {number: expected(number) for number in range(COUNT)}
    assert samples[2] == (2, expected(2))


def test_batches_have_torchs_order(filled):
    samples = dataset(filled, transform=label_of)
    for settings in ({"shuffle": True}, {"batch_size": None}, {"batch_size": 7, "drop_last": True}, {"batch_size": 4}):
        stock = DataLoader(range(COUNT), generator=torch.Generator().manual_seed(3), **settings)
        ours = DataLoader(samples, generator=torch.Generator().manual_seed(3), **settings)
        for indices, (labels, _) in zip(stock, ours, strict=True):
            assert torch.as_tensor(indices).tolist() == torch.as_tensor(labels).tolist()


@pytest.mark.providers("s3", "gs")
def test_a_batch_is_read_concurrently_without_head_requests(filled, control):
    samples = dataset(filled, transform=label_of)
    len(samples)
    control.clear_requests()
    batch = samples.__getitems__([4, 2, 4])
    assert [label for label, _ in batch] == [4, 2, 4]
    # What is requested twice is copied if it is being read when its turn comes, and else read again.
    operations = [request.operation for request in control.requests()]
    assert operations in (["GetObject"] * 2, ["GetObject"] * 3)
    assert all("if-match" in request.headers or "eneration" in request.target for request in control.requests())


def test_subsets_and_concatenations_are_read_in_batches(filled):
    samples = dataset(filled, transform=label_of)
    half = Subset(samples, [1, 3, 5])
    assert [label for label, _ in half.__getitems__([0, 2])] == [1, 5]
    both = ConcatDataset([half, samples])
    assert [both[index][0] for index in (0, 3, 4)] == [1, 0, 1]


def test_samples_of_an_overridden_getitem_are_in_the_batch(filled):
    class Doubled(filled.map_dataset):
        def __getitem__(self, index):
            return super().__getitem__(index)[0] * 2

    samples = Doubled(f"{filled.url}/train/", config=filled.config, suffixes=".bin", transform=label_of)
    assert next(iter(DataLoader(samples, batch_size=4))).tolist() == [0, 2, 4, 6]


def test_an_exception_in_a_transform_names_the_sample(filled):
    samples = dataset(filled, transform=raises_for_seven)
    with pytest.raises(ArithmeticError) as caught:
        samples[7]
    assert caught.value.__notes__ == [f"in the transform of sample 7, {filled.url}/train/07.bin"]
    with pytest.raises(ArithmeticError, match=r"of sample 7, .*/train/07.bin"):
        list(DataLoader(samples, batch_size=5, num_workers=1))


@pytest.mark.providers("s3", "gs")
def test_a_failed_sample_is_replaced_or_handled(filled, control):
    samples = dataset(filled, transform=raises_for_seven, on_error="replace")
    assert samples[7] == expected(8)
    assert samples.__getitems__([6, 7, 8]) == [expected(6), expected(8), expected(8)]
    assert samples.failed_samples == 2
    control.faults({"operation": "GetObject", "key": "0[4-6].bin", "action": {"status": 403, "code": "AccessDenied"}})
    assert samples[4] == expected(8)
    handled = dataset(filled, transform=raises_for_seven, on_error=replacement)
    assert handled.__getitems__([3, 4, 7]) == [expected(3), b"4 04.bin AccessDeniedError", b"7 07.bin ArithmeticError"]
    with pytest.raises(exceptions.AccessDeniedError):
        dataset(filled)[4]
    for wrong in ("skip", "ignore", 3):
        with pytest.raises(exceptions.ConfigError, match="on_error="):
            dataset(filled, on_error=wrong)


def test_an_object_changed_or_deleted_since_the_listing_is_an_error(filled):
    samples = dataset(filled, transform=label_of)
    len(samples)
    filled.write("train/05.bin", b"longer than before" * 9)
    filled.remove("train/06.bin")
    with pytest.raises(exceptions.ObjectChangedError, match="train/05.bin"):
        samples[5]
    with pytest.raises(exceptions.ObjectNotFoundError, match="train/06.bin"):
        samples[6]
    assert samples[7] == (7, expected(7))


def test_an_empty_prefix_is_an_empty_dataset_with_a_warning_if_that_is_allowed(bucket, caplog):
    caplog.set_level(logging.WARNING)
    empty = bucket.map_dataset(f"{bucket.url}/nothing/", config=bucket.config, allow_empty=True)
    assert (len(empty), list(empty)) == (0, [])
    assert "no objects" in caplog.text
    with pytest.raises(IndexError):
        empty[0]


@pytest.mark.providers("s3")
def test_objects_by_name_need_no_listing(filled, control):
    control.clear_requests()
    uris = (f"{filled.url}/train/{number:02}.bin" for number in (9, 3))
    samples = filled.map_dataset.from_objects(uris, s3client_config=filled.config, transform=label_of)
    assert (len(samples), samples[0], samples[1]) == (2, (9, expected(9)), (3, expected(3)))
    assert {request.operation for request in control.requests()} == {"GetObject"}
    one = filled.map_dataset.from_objects(f"{filled.url}/train/01.bin", s3client_config=filled.config)
    assert one[0].read() == expected(1)
    with pytest.raises(exceptions.ConfigError, match="names no object"):
        filled.map_dataset.from_objects([filled.url])


@pytest.mark.providers("s3")
def test_a_range_reader_fetches_what_is_read(filled, control):
    torchobj.Store(filled.url, config=filled.config).put("big/x", bytes(20 << 20))
    for constructor, most in (
        (torchobj.S3ReaderConstructor.range_based(100_000), 150_000),
        (torchobj.S3ReaderConstructor.range_based(0), 100),
        (torchobj.S3ReaderConstructor.dcp_optimized(), 1 << 20),
    ):
        control.clear_requests()
        samples = filled.map_dataset.from_prefix(
            f"{filled.url}/big/",
            s3client_config=filled.config,
            reader_constructor=constructor,
            transform=lambda r: r.read(10),
        )
        assert samples[0] == bytes(10)
        assert sum(request.bytes_sent for request in control.requests("GetObject")) <= most


def test_a_listed_dataset_is_pickled_with_its_listing_compactly(filled, control):
    samples = dataset(filled, transform=label_of)
    assert len(samples) == COUNT
    data = pickle.dumps(samples)
    assert len(data) < 60 * COUNT + 2500
    control.clear_requests()
    copy = pickle.loads(data)
    assert (len(copy), copy[3]) == (COUNT, (3, expected(3)))
    assert copy.manifest == samples.manifest
    assert "ListObjectsV2" not in {request.operation for request in control.requests()}


def test_images_are_decoded_from_the_reader(bucket):
    for number in range(4):
        out = io.BytesIO()
        Image.new("L", (8, 8), number).save(out, "PNG")
        bucket.write(f"{number}.png", out.getvalue())
    samples = bucket.map_dataset(bucket.url, config=bucket.config, transform=lambda r: Image.open(r).getpixel((0, 0)))
    assert list(samples) == [0, 1, 2, 3]


def test_folders_are_datasets_too(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(str(number))
    samples = torchobj.ObjectMapDataset(f"file://{tmp_path}/", transform=lambda reader: reader.read())
    assert (len(samples), samples[2], samples[0]) == (3, b"2", b"0")


@pytest.mark.providers("s3")
def test_an_iterable_dataset_reads_in_order_and_shards_over_workers(filled):
    settings = {"s3client_config": filled.config, "transform": lambda reader: reader.key}
    keys = [f"train/{number:02}.bin" for number in range(COUNT)] + ["train/labels.csv"]
    everything = filled.iterable_dataset.from_prefix(f"{filled.url}/train/", **settings)
    assert list(everything) == keys
    assert list(everything) == keys
    sharded = filled.iterable_dataset.from_prefix(f"{filled.url}/train/", enable_sharding=True, **settings)
    seen = list(DataLoader(sharded, batch_size=None, num_workers=2))
    assert sorted(seen) == keys
    first = iter(everything)
    assert next(first) == keys[0]
    first.close()


def test_ctrl_c_does_not_wait_for_a_read_of_an_iterable_dataset(filled, control):
    control.faults({"operation": "GetObject", "action": {"delay_first_byte_s": 60}})
    script = (
        "import sys, torchobj, pickle\n"
        "config = pickle.loads(bytes.fromhex(sys.argv[2]))\n"
        "list(torchobj.ObjectIterableDataset(sys.argv[1], config=config))\n"
    )
    arguments = [f"{filled.url}/train/", pickle.dumps(filled.config).hex()]
    with warm_python.Process(["-c", script, *arguments]) as reading:
        assert eventually(lambda: any(rule["fired"] for rule in control.fault_report()))
        reading.send_signal(signal.SIGINT)
        reading.wait(50)
        assert "KeyboardInterrupt" in reading.errors()


def listings(control):
    return [request.operation for request in control.requests()].count("ListObjectsV2")


def in_order(filled):
    """A map-style and an iterable dataset, neither of them listed."""
    url, settings = f"{filled.url}/train/", {"config": filled.config, "transform": key_of}
    return filled.map_dataset(url, **settings), filled.iterable_dataset(url, enable_sharding=True, **settings)


def keys_by_workers(samples, context):
    """Returns the batches of two workers; a batch sampler needs no length before the workers start."""
    loader = DataLoader(samples, batch_size=8, num_workers=2, multiprocessing_context=context)
    return sorted(key for batch in loader for key in batch)


@pytest.fixture
def log_file(tmp_path):
    """A file with the log of processes that are forked from here."""
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("torchobj").addHandler(handler)
    yield tmp_path / "log"
    logging.getLogger("torchobj").removeHandler(handler)
    handler.close()


@pytest.mark.parametrize("context", [pytest.param("spawn", marks=pytest.mark.matrix), "forkserver"])
@pytest.mark.providers("s3")
def test_the_parent_lists_for_workers_that_are_spawned(filled, control, context):
    for samples in in_order(filled):
        control.clear_requests()
        assert len(keys_by_workers(samples, context)) == COUNT + 1
        assert listings(control) == 1


def test_a_listing_that_fails_is_an_error_in_the_parent_and_not_in_a_spawned_worker(bucket):
    missing = bucket.iterable_dataset(f"{bucket.url}-missing/x/", config=bucket.config)
    with pytest.raises(exceptions.BucketNotFoundError, match="NoSuchBucket|bucket does not exist"):
        iter(DataLoader(missing, num_workers=1, multiprocessing_context="spawn"))


def test_forked_workers_do_not_repeat_the_parents_listing(filled, control, log_file):
    mapped, iterable = in_order(filled)
    assert len(mapped) == len(iterable.manifest) == COUNT + 1
    control.clear_requests()
    for samples in (mapped, iterable):
        assert len(keys_by_workers(samples, "fork")) == COUNT + 1
    assert listings(control) == 0
    assert log_file.read_text() == ""


def test_forked_workers_that_have_to_list_warn_once_how_to_list_once(filled, log_file, monkeypatch):
    for samples in in_order(filled):
        monkeypatch.setattr(FORKED, "_flags", mmap.mmap(-1, 1 << 16))
        log_file.write_text("")
        for _ in range(2):
            assert len(keys_by_workers(samples, "fork")) == COUNT + 1
        [said] = [line for line in log_file.read_text().splitlines() if "itself" in line]
        assert "len(dataset)" in said
        assert "dataset.prepare()" in said


@pytest.mark.parametrize("on_error", ["replace", replacement])
def test_a_worker_warns_once_about_replaced_samples_and_counts_them(filled, log_file, on_error):
    samples = dataset(filled, transform=raises_for_seven, on_error=on_error)
    assert len(samples) == COUNT
    loader = DataLoader(Subset(samples, [6, 7, 7]), num_workers=1, collate_fn=list, multiprocessing_context="fork")
    assert len(list(loader)) == 3
    [said] = log_file.read_text().splitlines()
    assert f"sample 7, {filled.url}/train/07.bin, was replaced: ArithmeticError: seven" in said
    assert samples.failed_samples == 2
