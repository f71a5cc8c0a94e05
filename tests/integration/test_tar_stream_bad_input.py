"""Damaged and unusual tar shards: each ends in the right samples or in one error that names the shard."""

import gzip
import io
import random
import tarfile

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


@pytest.mark.parametrize("suffix", ["tar.gz", "tgz"])
def test_compressed_shards_are_read_as_streams_and_resumed(suffix):
    members = [(f"{number:04d}.bin", random.Random(number).randbytes(20_000)) for number in range(100)]
    url = put(f"compressed.{suffix}", gzip.compress(tar_of(*members)))
    samples = samples_of(url, shuffle_buffer=10)
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
    with torchobj.TarWriter(f"{STORE}/indexed.tar") as writer:
        for name in "abc":
            writer.write({"__key__": name, "txt": b"1"})
    put("indexed.tar", GOOD)
    assert list(samples_of(f"{STORE}/indexed.tar", transform=key, uneven="drop")) == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decode": {".jpg": bytes}}, "decode"),
        ({"decode": {"jpg": 3}}, "decode"),
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
