"""Damaged and unusual tar shards: each ends in the right samples or in one error that names the shard."""

import gzip
import io
import random
import tarfile

import numpy as np
import pytest

import torchobj
from torchobj.exceptions import ConfigError, ObjectChangedError, ObjectNotFoundError, TarError

STORE = "memory://tar-stream-bad"


def tar_of(*members, **options):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def put(name, data):
    torchobj.Store(STORE).put(name, data)
    return f"{STORE}/{name}"


def samples_of(url, **options):
    return torchobj.TarIterableDataset(url, shuffle_shards=False, **options)


def key(sample):
    return sample["__key__"]


GOOD = tar_of(("a.txt", b"1"), ("b.txt", b"2"))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("text", b"no tar at all, " * 200, "not a tar"),
        ("empty", b"", "empty|not a tar|ends"),
        ("cut", tar_of(("a.txt", b"1"), ("b.txt", bytes(3000)))[:2500], "ends|truncated|cut"),
        (
            "cut-gzip",
            gzip.compress(tar_of(("a.txt", b"1"), ("b.txt", random.Random(1).randbytes(9000))))[:-4000],
            "gzip|ends",
        ),
    ],
)
def test_a_shard_that_cannot_be_read_is_named_and_the_next_one_is_read(name, data, message):
    suffix = "tar.gz" if "gzip" in name else "tar"
    urls = [put(f"{name}/bad.{suffix}", data), put(f"{name}/good.tar", GOOD)]
    iterator = iter(samples_of(urls, transform=key))
    found = []
    with pytest.raises(TarError, match=rf"bad\.{suffix}.*({message})"):
        found.extend(iterator)
    assert list(iterator) == ["a", "b"]
    skipping = samples_of(urls, transform=key, on_error="skip")
    assert list(skipping)[-2:] == ["a", "b"]
    assert skipping.failed_samples == 1
    replacing = samples_of(urls, transform=key, on_error=lambda number, url, error: f"{number} of {url}")
    assert f"{STORE}/{name}/bad.{suffix}" in list(replacing)[-3]


def test_members_without_an_extension_are_left_out():
    url = put("extension.tar", tar_of(("README", b"x"), ("a.txt", b"1"), ("dir/LICENSE", b"x"), ("b.txt", b"2")))
    assert [key(sample) for sample in samples_of(url)] == ["a", "b"]


def test_a_sample_with_a_duplicate_member_is_an_error_and_the_others_are_read():
    url = put("duplicate.tar", tar_of(("a.txt", b"1"), ("a.txt", b"2"), ("b.txt", b"3"), ("a.txt", b"4")))
    iterator = iter(samples_of(url, transform=key))
    with pytest.raises(TarError, match=r"duplicate\.tar.*txt"):
        next(iterator)
    # The same key in another place is another sample, as for webdataset.
    assert list(iterator) == ["b", "a"]


def test_samples_of_a_compressed_shard_in_a_shuffle_buffer_are_read_again_in_one_pass(monkeypatch):
    members = [(f"{number:04d}.bin", random.Random(number).randbytes(2000)) for number in range(100)]
    url = put("held.tar.gz", gzip.compress(tar_of(*members)))
    samples = samples_of(url, shuffle_buffer=30)
    next(iter(samples))
    resumed = samples_of(url, shuffle_buffer=30)
    resumed.load_state_dict(samples.state_dict())
    read = []
    original = torchobj.TarIterableDataset._read
    monkeypatch.setattr(
        torchobj.TarIterableDataset,
        "_read",
        lambda self, parts, number: original(self, (read.append(part) or part for part in parts), number),
    )
    assert len(list(resumed)) == 99
    # One for the samples in the buffer, one for the rest of the stream.
    assert len(read) == 2


STATES = [
    {"stream": [1, 5, 1 << 40]},
    {"stream": [99, 0, 0]},
    {"stream": [-1, 0, 0]},
    {"stream": ["0", 0, 0]},
    {"stream": [0, 0]},
    {"stream": [0.5, 0, 0]},
    {"stream": 7},
    {},
    {"stream": [0, 1, 512], "held": [0, 0, 0, 1 << 50], "draws": 1},
    {"stream": [0, 1, 512], "held": [9, 0, 0, 512], "draws": 1},
    {"stream": [0, 1, 512], "held": [0, -1, 0, 512], "draws": 1},
    {"stream": [0, 1, 512], "held": [0, 0, 0], "draws": 1},
    {"stream": [0, 1, 512], "held": [0, 0, 0, 512] * 9, "draws": 1},
    {"stream": [0, 1, 512], "held": [0, 0, 0, 512], "draws": "x"},
]


@pytest.mark.parametrize("position", STATES, ids=str)
def test_a_state_with_a_position_that_cannot_be_is_refused(position):
    urls = [put("states/0.tar", GOOD), put("states/1.tar", GOOD)]
    samples = samples_of(urls, shuffle_buffer=4)
    next(iter(samples))
    state = samples.state_dict()
    samples.load_state_dict(state | {"position": position})
    with pytest.raises(ConfigError, match="position of the state"):
        iter(samples)
    samples.load_state_dict(state)
    assert len(list(samples)) == 3
    with pytest.raises(ConfigError, match="epoch of the state"):
        samples.load_state_dict(state | {"epoch": 1 << 63})


def test_samples_that_an_index_promises_and_a_shard_lacks_are_failures_so_that_ranks_stay_even(monkeypatch):
    pytest.importorskip("pyarrow")
    url = put("promised.tar", GOOD)
    samples = samples_of(url, uneven="drop", transform=key, on_error=lambda number, url, error: f"{number}: {error}")
    monkeypatch.setattr(samples, "_counts", lambda: np.array([4]))
    monkeypatch.setattr(samples, "_part", lambda segment, begin: (0, len(GOOD)))
    found = list(samples)
    assert found[:2] == ["a", "b"]
    assert len(found) == 4
    assert "promised.tar: has no sample 2, which its index has" in found[2]


def test_samples_that_were_not_read_because_of_one_failure_share_one_note():
    pytest.importorskip("pyarrow")
    url = put("shared.tar", tar_of(*((f"{number:04d}.txt", b"x" * 600) for number in range(300))))
    errors = []
    samples = samples_of(url, uneven="pad", on_error=lambda number, url, error: errors.append(error))
    samples.prepare()
    put("shared.tar", GOOD + bytes(1 << 19))
    list(samples)
    assert len(errors) == 300
    assert len(errors[-1].__notes__) <= 2


@pytest.mark.parametrize("suffix", ["tar.bz2", "tar.xz"])
def test_a_compression_that_is_not_supported_is_named(suffix):
    with pytest.raises(ConfigError, match="recompress it with gzip or zstd"):
        list(samples_of(put(f"other.{suffix}", GOOD)))


@pytest.mark.parametrize("suffix", ["tar.gz", "tgz"])
def test_compressed_shards_are_read_as_streams_and_resumed(suffix):
    members = [(f"{number:04d}.bin", random.Random(number).randbytes(20_000)) for number in range(100)]
    url = put(f"compressed.{suffix}", gzip.compress(tar_of(*members)))
    samples = samples_of(url, shuffle_buffer=10)
    samples.set_epoch(0)
    whole = [(key(sample), bytes(sample["bin"])) for sample in samples]
    assert sorted(whole) == [(name.removesuffix(".bin"), data) for name, data in members]
    iterator = iter(samples)
    head = [(key(sample), bytes(sample["bin"])) for sample, _ in zip(iterator, range(41), strict=False)]
    resumed = samples_of(url, shuffle_buffer=10)
    resumed.load_state_dict(samples.state_dict())
    # zip drew one sample more.
    assert head + [whole[41]] + [(key(sample), bytes(sample["bin"])) for sample in resumed] == whole


def test_a_policy_for_compressed_shards_is_refused_because_their_samples_are_not_counted():
    url = put("counted.tar.gz", gzip.compress(GOOD))
    with pytest.raises(ConfigError, match=r"counted\.tar\.gz"):
        list(samples_of(url, uneven="drop"))


def test_a_sparse_member_is_refused_by_name(tmp_path):
    header = bytearray(tar_of(("holes.bin", b"x"), format=tarfile.GNU_FORMAT))
    header[156:157] = b"S"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    with pytest.raises(TarError, match=r"holes\.bin.*sparse|sparse.*holes\.bin"):
        list(samples_of(put("sparse.tar", bytes(header))))


def test_a_member_larger_than_a_range_and_the_budget_is_one_buffer():
    body = random.Random(5).randbytes(40 << 20)
    url = put("large.tar", tar_of(("a.bin", body), ("a.cls", b"7"), ("b.bin", b"small")))
    first, second = samples_of(url)
    assert first["bin"] == body
    assert (first["cls"], second["bin"]) == (b"7", b"small")


def test_a_decoder_that_raises_names_shard_key_and_extension():
    url = put("decoder.tar", tar_of(("a.json", b"{}"), ("b.json", b"{broken"), ("c.json", b"[]")))
    samples = samples_of(url, decode={"json": torchobj.decode.json}, transform=key)
    iterator = iter(samples)
    assert next(iterator) == "a"
    with pytest.raises(ValueError, match="Expecting") as raised:
        next(iterator)
    notes = "\n".join(raised.value.__notes__)
    assert "'json'" in notes
    assert "'b'" in notes
    assert url in notes
    assert next(iterator) == "c"
    assert samples.failed_samples == 1


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(ConfigError, match="matches no object"):
        list(samples_of(f"{STORE}/none-*.tar"))
    with pytest.raises(ObjectNotFoundError, match="none-0"):
        list(samples_of(f"{STORE}/none-{{000..001}}.tar"))


def test_a_shard_that_is_replaced_after_the_listing_is_an_error():
    url = put("replaced.tar", GOOD)
    samples = samples_of(url, transform=key)
    assert list(samples) == ["a", "b"]
    put("replaced.tar", tar_of(("c.txt", b"3")) + bytes(512))
    with pytest.raises(ObjectChangedError, match="replaced.tar"):
        list(samples)


def test_a_stale_index_beside_a_shard_is_not_used_to_divide_it():
    pytest.importorskip("pyarrow")
    with torchobj.shards.TarWriter(f"{STORE}/indexed.tar") as writer:
        for name in "abc":
            writer.write({"__key__": name, "txt": b"1"})
    put("indexed.tar", GOOD)
    assert list(samples_of(f"{STORE}/indexed.tar", transform=key, uneven="drop")) == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decode": {".jpg": bytes}}, "decode"),
        ({"decode": {"jpg": 3}}, "decode"),
        ({"decode": {"JPG": bytes}}, "lower case"),
        ({"decode": {"jpg;png": bytes}}, "one per entry"),
        ({"shuffle_buffer": -1}, "shuffle_buffer"),
        ({"shuffle_buffer": True}, "shuffle_buffer"),
        ({"shuffle_shards": 1}, "shuffle_shards"),
        ({"uneven": "truncate"}, "uneven"),
        ({"transform": 3}, "transform"),
        ({"on_error": "skip", "uneven": "drop"}, "on_error"),
        ({"seed": -1}, "seed"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        torchobj.TarIterableDataset(f"{STORE}/x.tar", **arguments)
