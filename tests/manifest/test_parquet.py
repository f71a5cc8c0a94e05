"""A manifest file is an ordinary table, and anything else in its place is one typed error."""

import hashlib
import io
import sys

import pandas
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import torchobj
from torchobj import _torchobj, exceptions
from torchobj.config import StoreConfig

MD5 = '"{}"'.format(hashlib.md5(b"x").hexdigest())


def listed(**objects):
    """The manifest of a new store with these objects."""
    store = torchobj.Store("memory://listed")
    for key, data in objects.items():
        store.put(key, data)
    return torchobj.Manifest.from_prefix("memory://listed")


@pytest.fixture
def saved(tmp_path):
    """The manifest of three objects, and the path of its file."""
    manifest = listed(a=b"1", b=b"22", c=b"333")
    path = tmp_path / "m.parquet"
    manifest.save(path)
    return manifest, path


ROWS = st.lists(
    st.tuples(
        st.sampled_from(["s3://a", "gs://b", "file://"]),
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30),
        st.none() | st.integers(0, 2**50),
        st.none() | st.just(MD5) | st.just(MD5[:-1] + '-12"') | st.text("0123456789", min_size=1, max_size=16),
    ),
    max_size=60,
)


def manifest_of(rows):
    """A manifest of `(base, key, size, version)`."""
    builder = _torchobj.ManifestBuilder()
    bases = list(dict.fromkeys(row[0] for row in rows))
    number = lambda values, width: b"".join(value.to_bytes(width, "little", signed=True) for value in values)  # noqa: E731

    def texts(values):
        encoded = [value.encode() for value in values]
        ends = [sum(map(len, encoded[:count])) for count in range(len(encoded) + 1)]
        return number(ends, 4), b"".join(encoded)

    columns = (
        number([bases.index(row[0]) for row in rows], 4),
        *texts([row[1] for row in rows]),
        number([-1 if row[2] is None else row[2] for row in rows], 8),
        *texts([row[3] or "" for row in rows]),
    )
    builder.add(bases, columns)
    return torchobj.Manifest(builder.finish())


@given(ROWS)
@settings(max_examples=60)
def test_a_loaded_manifest_has_the_saved_objects(rows):
    manifest = manifest_of(rows)
    assert [manifest.entry(index) for index in range(len(manifest))] == rows
    manifest.save("memory://files-of-properties/m.parquet")
    loaded = torchobj.Manifest.load("memory://files-of-properties/m.parquet")
    assert loaded == manifest == torchobj.Manifest(bytes(manifest))
    assert loaded.digest() == manifest.digest()
    assert [loaded.entry(index) for index in range(len(loaded))] == rows


def test_pandas_and_pyarrow_read_an_ordinary_table(saved):
    manifest, path = saved
    table = pandas.read_parquet(path)
    assert list(table.columns) == ["base", "key", "size", "version"]
    assert list(table["base"] + "/" + table["key"]) == [manifest.url(index) for index in range(3)]
    assert list(table["size"]) == [1, 2, 3]
    assert list(table["version"]) == [manifest.entry(index)[3] for index in range(3)]
    metadata = parquet.read_schema(path).metadata
    assert metadata[b"torchobj.manifest.format"] == b"1"
    assert metadata[b"torchobj.manifest.digest"] == manifest.digest().encode()
    named = torchobj.Manifest.from_urls(["s3://b/k"])
    named.save(path)
    assert pandas.read_parquet(path)[["size", "version"]].isna().all(axis=None)
    assert torchobj.Manifest.load(str(path)) == named


def test_a_file_of_several_row_groups_has_all_objects(tmp_path, monkeypatch):
    monkeypatch.setattr("torchobj.manifest.parquet._GROUP_ROWS", 1000)
    manifest = torchobj.Manifest.from_urls(f"s3://{'abc'[n % 3 if n > 2500 else 0]}/{n:06}" for n in range(4321))
    manifest.save(tmp_path / "m")
    assert parquet.ParquetFile(tmp_path / "m").metadata.num_row_groups == 5
    assert torchobj.Manifest.load(tmp_path / "m") == manifest


def test_a_prefix_is_listed_with_its_filters():
    store = torchobj.Store("memory://filters")
    for key in ("p/a.jpg", "p/b.png", "p/c.jpg", "p/x/d.jpg", "q"):
        store.put(key, b"1")
    of = torchobj.Manifest.from_prefix
    assert len(of("memory://filters")) == 5
    assert len(of("memory://filters/p/", glob="*.jpg")) == 2
    assert len(of("memory://filters/p/", suffixes=".jpg", limit=2)) == 2
    assert len(of("memory://filters/none/", config=StoreConfig())) == 0
    for wrong in ({"limit": 0}, {"glob": 3}, {"suffixes": 3}, {"config": 3}):
        with pytest.raises(exceptions.ConfigError, match=f"{next(iter(wrong))}="):
            of("memory://filters", **wrong)


def test_an_empty_manifest_is_saved_and_loaded(tmp_path):
    empty = torchobj.Manifest.from_urls([])
    empty.save(tmp_path / "m")
    assert len(torchobj.Manifest.load(tmp_path / "m")) == 0


def test_a_missing_file_and_a_name_without_an_object_are_typed_errors(tmp_path):
    with pytest.raises(exceptions.ObjectNotFoundError, match="none.parquet"):
        torchobj.Manifest.load(tmp_path / "none.parquet")
    for wrong in ("", 3, None):
        with pytest.raises(exceptions.ConfigError, match="path_or_url="):
            torchobj.Manifest.load(wrong)
    with pytest.raises(exceptions.ConfigError, match="names no object"):
        torchobj.Manifest.from_urls([]).save("memory://bucket")


def test_without_pyarrow_the_error_names_the_extra(saved, monkeypatch):
    manifest, path = saved
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for action in (manifest.save, torchobj.Manifest.load):
        with pytest.raises(exceptions.ConfigError, match=r"torchobj\[manifest\]"):
            action(path)


def test_a_failed_save_leaves_the_previous_file(saved, monkeypatch):
    manifest, path = saved
    before = path.read_bytes()

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("torchobj.manifest.parquet._batch", fail)
    with pytest.raises(KeyboardInterrupt):
        manifest.save(path)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def rewritten(path, change=lambda table: table, **metadata):
    """The bytes of a file with the changed table and metadata."""
    table = change(parquet.read_table(path))
    found = {key.decode(): value.decode() for key, value in parquet.read_schema(path).metadata.items()}
    out = io.BytesIO()
    schema = table.schema.remove_metadata()
    with parquet.ParquetWriter(out, schema, store_schema=False, use_dictionary=["base"]) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(found | {f"torchobj.manifest.{key}": value for key, value in metadata.items()})
    return out.getvalue()


def column(name, values):
    return lambda table: table.set_column(table.column_names.index(name), name, values)


FOREIGN = {
    "another format version": (lambda path: rewritten(path, format="2"), "format '2'.*reads 1"),
    "another digest": (lambda path: rewritten(path, digest="0" * 32), "digest of its 3 objects"),
    "a changed size": (lambda path: rewritten(path, column("size", pyarrow.array([1, 2, 4]))), "damaged: the digest"),
    "a size below zero": (lambda path: rewritten(path, column("size", pyarrow.array([1, 2, -4]))), "do not fit"),
    "a missing column": (lambda path: rewritten(path, lambda table: table.drop_columns(["size"])), "its columns are"),
    "another column": (
        lambda path: rewritten(path, lambda table: table.append_column("label", pyarrow.array([1, 2, 3]))),
        "its columns are.*label",
    ),
    "another type": (lambda path: rewritten(path, column("size", pyarrow.array(["1", "2", "3"]))), "size string"),
    "no key": (lambda path: rewritten(path, column("key", pyarrow.array(["a", None, "c"]))), "other rows"),
    "a nested column": (
        lambda path: rewritten(path, column("key", pyarrow.array([["a"], ["b"], ["c"]]))),
        "its columns are",
    ),
    "a row fewer": (lambda path: rewritten(path, lambda table: table.slice(1)), "damaged: the digest"),
    "a table of pandas": (lambda path: pandas.read_parquet(path).to_parquet(), "has no 'torchobj.manifest.format'"),
    "no file of Parquet": (lambda path: b"base,key,size,version\n", "not a Parquet file"),
    "nothing": (lambda path: b"", "not a Parquet file"),
    "a footer longer than the file": (
        lambda path: path.read_bytes()[:-8] + (1 << 30).to_bytes(4, "little") + b"PAR1",
        "a footer of 1073741824 bytes",
    ),
    "no footer": (lambda path: b"PAR1" + bytes(8) + b"PAR1", "not a manifest, or damaged"),
}


@pytest.mark.parametrize(("make", "message"), FOREIGN.values(), ids=FOREIGN)
def test_another_file_is_one_typed_error_that_names_it(saved, make, message):
    path = saved[1]
    path.write_bytes(make(path))
    with pytest.raises(exceptions.ManifestError, match=message) as caught:
        torchobj.Manifest.load(path)
    assert str(path) in str(caught.value)


def test_every_truncation_is_a_typed_error(saved):
    whole = saved[1].read_bytes()
    for length in range(len(whole)):
        saved[1].write_bytes(whole[:length])
        with pytest.raises(exceptions.ManifestError):
            torchobj.Manifest.load(saved[1])


@pytest.mark.parametrize("damage", [0xFF, *(pytest.param(bit, marks=pytest.mark.matrix) for bit in (0x01, 0x80))])
def test_every_damaged_byte_is_a_typed_error_or_without_effect(saved, damage):
    manifest, path = saved
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ damage]) + whole[position + 1 :])
        try:
            assert torchobj.Manifest.load(path) == manifest
        except exceptions.ManifestError:
            continue


def test_row_groups_larger_than_those_of_torchobj_are_refused_before_they_are_read(saved, monkeypatch):
    monkeypatch.setattr("torchobj.manifest.parquet._GROUP_ROWS", 2)
    with pytest.raises(exceptions.ManifestError, match="row group 0 has 3 rows"):
        torchobj.Manifest.load(saved[1])
