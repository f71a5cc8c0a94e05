"""Indexes of tar shards: built from headers, saved and loaded, selected by shards, and refused when they are stale."""

import io
import pickle
import tarfile

import pyarrow.parquet
import pytest

import torchobj
from torchobj.exceptions import AccessDeniedError, ConfigError, TarError, TarIndexError
from torchobj.shards import index as index_module
from torchobj.shards import index_file
from torchobj.shards.index import TarIndex, TarMember, TarSample
from torchobj.shards.index_file import TarShard, members_table, shard_url, write
from torchobj.shards.shard_urls import shard_manifest

BASE = "memory://tar-index"
MIB = 1 << 20


def tar_of(members):
    """The bytes of a tar shard of (name, bytes)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def shards_at(folder, count=3):
    """Puts shards of two samples each into a folder. Returns their pattern."""
    store = torchobj.Store(BASE)
    for number in range(count):
        members = [(f"{number}a.jpg", b"x" * 700), (f"{number}a.cls", b"1"), (f"{number}b.jpg", b"")]
        store.put(f"{folder}/{number}.tar", tar_of(members))
    return f"{BASE}/{folder}/{{0..{count - 1}}}.tar"


def all_samples(index):
    return [index.sample(number) for number in range(len(index))]


def test_an_index_has_the_key_and_the_ranges_of_each_sample():
    index = TarIndex.build(shards_at("ranges"))
    assert (len(index), index.counts()) == (6, [2, 2, 2])
    first = (TarMember("jpg", 512, 700), TarMember("cls", 2048, 1))
    assert index.sample(0) == TarSample(f"{BASE}/ranges/0.tar", "0a", 0, 2560, first)
    assert index.sample(5) == TarSample(f"{BASE}/ranges/2.tar", "2b", 2560, 3072, (TarMember("jpg", 3072, 0),))
    assert index.data_range(0)[1:] == (512, 2049)
    with pytest.raises(IndexError, match="sample 6 of 6"):
        index.sample(6)
    assert repr(index) == "<TarIndex of 3 shards, 6 samples, 9 members>"


def test_ranges_of_an_index_contain_the_bytes_of_the_members():
    pattern = shards_at("bytes")
    for sample in all_samples(TarIndex.build(pattern)):
        [data] = torchobj.get_many([sample.url])
        with tarfile.open(fileobj=io.BytesIO(bytes(data))) as tar:
            for member in sample.members:
                expected = tar.extractfile(f"{sample.key}.{member.field}").read()
                assert bytes(data)[member.offset : member.offset + member.size] == expected


def test_a_loaded_index_is_equal_and_its_shards_are_relative_to_the_file():
    index = TarIndex.build(shards_at("saved"))
    index.save(f"{BASE}/saved/index.parquet")
    loaded = TarIndex.load(f"{BASE}/saved/index.parquet")
    assert (loaded.shards, all_samples(loaded)) == (index.shards, all_samples(index))
    [data] = torchobj.get_many([f"{BASE}/saved/index.parquet"])
    table = pyarrow.parquet.read_table(pyarrow.BufferReader(bytes(data)))
    assert table["shard"].to_pylist()[:3] == ["0.tar"] * 3


def test_an_index_elsewhere_names_the_urls_of_its_shards(tmp_path):
    index = TarIndex.build(shards_at("elsewhere"))
    index.save(tmp_path / "index.parquet")
    assert TarIndex.load(str(tmp_path / "index.parquet")).shards == index.shards
    assert TarIndex.from_bytes(bytes(index)).shards == index.shards


def test_a_pickled_index_is_equal():
    index = TarIndex.build(shards_at("pickled"))
    assert all_samples(pickle.loads(pickle.dumps(index))) == all_samples(index)


def test_shards_are_selected_in_any_order_and_repeatedly():
    pattern = shards_at("selected")
    index = TarIndex.build(pattern)
    named = [f"{BASE}/selected/{number}.tar" for number in (2, 0, 2)]
    selected = TarIndex.load_or_build(shard_manifest(named), index)
    assert [sample.key for sample in all_samples(selected)] == ["2a", "2b", "0a", "0b", "2a", "2b"]
    selected.save(f"{BASE}/selected/repeated.parquet")
    assert TarIndex.load(f"{BASE}/selected/repeated.parquet").counts() == [2, 2]


def test_a_shard_that_the_index_lacks_is_an_error():
    index = TarIndex.build(shards_at("lacking"))
    torchobj.Store(BASE).put("lacking/3.tar", tar_of([("a.txt", b"1")]))
    with pytest.raises(TarIndexError, match=r"does not contain the shard memory://tar-index/lacking/3\.tar"):
        TarIndex.load_or_build(shard_manifest(f"{BASE}/lacking/*.tar"), index)


def test_an_index_beside_its_shard_is_used_and_others_are_built(monkeypatch):
    pattern = shards_at("beside")
    urls = TarIndex.build(f"{BASE}/beside/{{0..1}}.tar").save_per_shard()
    assert urls == [f"{BASE}/beside/{number}.tar.index.parquet" for number in range(2)]
    built = []
    read = index_module._members_of
    monkeypatch.setattr(
        "torchobj.shards.index._members_of", lambda shards, *others: built.extend(shards) or read(shards, *others)
    )
    index = TarIndex.load_or_build(shard_manifest(pattern))
    assert [shard.name for shard in built] == [f"{BASE}/beside/2.tar"]
    assert [sample.key for sample in all_samples(index)] == ["0a", "0b", "1a", "1b", "2a", "2b"]


def test_the_index_of_the_shard_writer_is_used(monkeypatch):
    with torchobj.ShardWriter(f"{BASE}/written/%06d.tar", maxcount=2) as writer:
        for number in range(3):
            writer.write({"__key__": f"k{number}", "txt": "text", "json": {"n": number}})
    index = TarIndex.build(f"{BASE}/written/*.tar")
    monkeypatch.setattr("torchobj.shards.index._members_of", None)
    assert all_samples(TarIndex.load_or_build(shard_manifest(f"{BASE}/written/*.tar"))) == all_samples(index)


def test_a_stale_index_beside_its_shard_is_built_again(caplog):
    pattern = shards_at("stale")
    TarIndex.build(pattern).save_per_shard()
    torchobj.Store(BASE).put("stale/1.tar", tar_of([("new.txt", b"1")]))
    index = TarIndex.load_or_build(shard_manifest(pattern))
    assert [sample.key for sample in all_samples(index)] == ["0a", "0b", "new", "2a", "2b"]
    assert "stale/1.tar.index.parquet: is for memory://tar-index/stale/1.tar of 10240 bytes and version" in caplog.text
    assert "its headers are read instead" in caplog.text


def test_a_damaged_index_beside_its_shard_is_built_again(caplog):
    pattern = shards_at("damaged")
    TarIndex.build(pattern).save_per_shard()
    torchobj.Store(BASE).put("damaged/1.tar.index.parquet", b"not an index")
    assert TarIndex.load_or_build(shard_manifest(pattern)).counts() == [2, 2, 2]
    assert "not a Parquet file" in caplog.text


@pytest.mark.parametrize("name", [
    "http://host/a.tar", "s3:///x", "FILE:///x", "://", "s3://bucket", "s3://bucket/", "gs://bucket/folder/",
    "s3://user:secret@bucket/a.tar", "s3://buc\nket/a.tar", "s3:/bucket/a.tar", "../1.tar", "",
])  # fmt: skip
def test_an_index_that_names_a_shard_by_no_url_is_refused_and_built_again(name, caplog):
    pattern = shards_at("named")
    TarIndex.build(pattern).save_per_shard()
    numbers = {"offset": [512], "size": [0], "begin": [0], "end": [1024]}
    file = io.BytesIO()
    write(
        file, [TarShard(name, 10240, None)], members_table({"shard": [name], "key": ["x"], "field": ["a"], **numbers})
    )
    url = f"{BASE}/named/1.tar.index.parquet"
    torchobj.Store(BASE).put("named/1.tar.index.parquet", file.getvalue())
    with pytest.raises(TarIndexError, match=rf"^{url}: .*; build the index again") as raised:
        TarIndex.load(url)
    assert "secret" not in f"{raised.value}{raised.value.__cause__}"
    assert TarIndex.load_or_build(shard_manifest(pattern)).counts() == [2, 2, 2]
    assert f"{url}: " in caplog.text and "its headers are read instead" in caplog.text
    assert torchobj.TarMapDataset(pattern)[3]["__key__"] == "1b"
    assert len(list(torchobj.TarIterableDataset(pattern, uneven="drop"))) == 6


def test_an_index_whose_metadata_is_nested_too_deeply_is_refused(monkeypatch):
    monkeypatch.setattr(index_file.json, "dumps", lambda _: "[" * 100_000)
    file = io.BytesIO()
    write(file, [TarShard("a.tar", 10240, None)], members_table({name: [] for name in index_file.COLUMNS}))
    torchobj.Store(BASE).put("nested.parquet", file.getvalue())
    with pytest.raises(TarIndexError, match=f"^{BASE}/nested.parquet: not an index of tar shards, or damaged: "):
        TarIndex.load(f"{BASE}/nested.parquet")


def test_an_index_whose_sample_has_a_field_twice_is_refused():
    numbers = {"offset": [512, 1024], "size": [0, 0], "begin": [0, 0], "end": [1024, 1024]}
    file = io.BytesIO()
    members = members_table({"shard": ["a.tar"] * 2, "key": ["x", "x"], "field": ["cls", "cls"], **numbers})
    write(file, [TarShard("a.tar", 10240, None)], members)
    torchobj.Store(BASE).put("twice.parquet", file.getvalue())
    with pytest.raises(TarIndexError, match="damaged: a sample has the field 'cls' twice"):
        TarIndex.load(f"{BASE}/twice.parquet")


def test_a_stale_index_that_is_named_is_refused_with_both_versions():
    pattern = shards_at("refused")
    TarIndex.build(pattern).save(f"{BASE}/refused/index.parquet")
    old = shard_manifest(pattern).entry(1)[3]
    torchobj.Store(BASE).put("refused/1.tar", tar_of([("new.txt", b"1")]))
    new = shard_manifest(pattern).entry(1)[3]
    with pytest.raises(TarIndexError, match=f"version {old}, but the shard has 10240 bytes and version {new}"):
        TarIndex.load_or_build(shard_manifest(pattern), f"{BASE}/refused/index.parquet")


def test_a_store_that_hides_absent_objects_has_no_index_beside_its_shards(monkeypatch):
    pattern = shards_at("hidden")
    get = index_module.get_many

    def refused(urls, **options):
        # The headers of shards are read by references.
        is_of_files = bool(urls) and isinstance(urls[0], str)
        return [AccessDeniedError("403") for _ in urls] if is_of_files else get(urls, **options)

    monkeypatch.setattr(index_module, "get_many", refused)
    assert TarIndex.load_or_build(shard_manifest(pattern)).counts() == [2, 2, 2]


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar.zst"])
def test_a_compressed_shard_is_refused_by_its_name(name):
    torchobj.Store(BASE).put(f"compressed/{name}", b"anything")
    with pytest.raises(ConfigError, match=f"compressed/{name}: a compressed shard has no random access"):
        TarIndex.build(f"{BASE}/compressed/{name}")


def test_a_shard_that_is_not_a_tar_is_refused_with_its_url():
    torchobj.Store(BASE).put("other/a.tar", b"no tar" * 1000)
    with pytest.raises(TarError, match="memory://tar-index/other/a.tar"):
        TarIndex.build(f"{BASE}/other/a.tar")


def test_members_without_an_extension_are_not_samples_and_equal_keys_of_shards_are():
    store = torchobj.Store(BASE)
    store.put("keys/0.tar", tar_of([("README", b"text"), ("a.txt", b"0"), ("b.txt", b"1"), ("a.txt", b"2")]))
    store.put("keys/1.tar", tar_of([("a.txt", b"3")]))
    index = TarIndex.build(f"{BASE}/keys/*.tar")
    assert [sample.key for sample in all_samples(index)] == ["a", "b", "a", "a"]


def test_an_index_in_a_bucket_must_not_name_files_of_this_machine():
    with pytest.raises(TarIndexError, match="must not name shards of this machine"):
        shard_url("file:///etc/passwd", "s3://bucket/index.parquet")
    with pytest.raises(TarIndexError, match="not beside it"):
        shard_url("../a.tar", "s3://bucket/x/index.parquet")
    assert shard_url("a.tar", "s3://bucket/x/index.parquet") == "s3://bucket/x/a.tar"


def test_the_index_of_a_gibibyte_of_large_members_reads_two_percent_of_it_at_most(tmp_path, monkeypatch):
    path = tmp_path / "large.tar"
    with path.open("wb") as file:
        for number in range(256):
            info = tarfile.TarInfo(f"{number:04d}.bin")
            info.size = 4 * MIB
            file.write(info.tobuf())
            # The body is a hole of the file.
            file.seek(info.size, 1)
        file.write(bytes(1024))
    read = []
    get = index_module.get_many

    def counted(refs, **options):
        read.extend(ref.end - ref.start for ref in refs)
        return get(refs, **options)

    monkeypatch.setattr(index_module, "get_many", counted)
    index = TarIndex.build(f"file://{path}")
    assert len(index) == 256
    assert index.sample(255).members == (TarMember("bin", 256 * (4 * MIB + 512) - 4 * MIB, 4 * MIB),)
    assert sum(read) <= path.stat().st_size * 0.02


def test_progress_ends_with_all_shards_and_bytes():
    states = []
    TarIndex.build(shards_at("progress"), progress=states.append)
    assert (states[-1].files_done, states[-1].files_total) == (3, 3)
    assert states[-1].bytes_done == states[-1].bytes_total == 3 * 10240


def test_many_stale_indexes_are_one_warning(caplog):
    pattern = shards_at("many-stale")
    manifest = torchobj.shards.TarIndex.build(pattern)
    manifest.save_per_shard()
    for number in range(2):
        torchobj.Store(BASE).put(f"many-stale/{number}.tar", tar_of([("new.txt", b"%d" % number)]))
    TarIndex.load_or_build(shard_manifest(pattern))
    found = [record.getMessage() for record in caplog.records if "read instead" in record.getMessage()]
    assert len(found) == 1
    assert "the headers of 2 such shards are read instead; `torchobj index` writes new indexes" in found[0]
