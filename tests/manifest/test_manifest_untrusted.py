"""A manifest file of an attacker takes little memory and names no objects but those of stores."""

import re
import subprocess
import sys

import pyarrow
import pytest
from pyarrow import parquet

from torchobj import Manifest, exceptions
from torchobj._torchobj import Buffer
from torchobj.manifest.parquet import read

ROWS = 1 << 16

#: Loads a file. Prints the error and by how many MiB the peak of resident memory grew.
LOADING = """
import resource, sys
import pyarrow.compute, pyarrow.parquet
from torchobj import Manifest, exceptions
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    Manifest.load(sys.argv[1])
except exceptions.ManifestError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def write(path, *, bases, keys, versions=None, **settings):
    """Writes a file with the metadata of a manifest."""
    versions = [None] * len(keys) if versions is None else versions
    table = pyarrow.table(
        {
            "base": pyarrow.array(bases, pyarrow.string()),
            "key": pyarrow.array(keys, pyarrow.large_string()).cast(pyarrow.string()),
            "size": pyarrow.array([1] * len(keys), pyarrow.int64()),
            "version": pyarrow.array(versions, pyarrow.string()),
        }
    )
    settings = {"use_dictionary": ["base"], "compression": "zstd"} | settings
    with parquet.ParquetWriter(path, table.schema, store_schema=False, **settings) as writer:
        writer.write_table(table, row_group_size=ROWS)
        writer.add_key_value_metadata({"torchobj.manifest.format": "1", "torchobj.manifest.digest": "0" * 32})


def loaded_elsewhere(path):
    """The error and the MiB of another process that loads a file."""
    command = [sys.executable, "-c", LOADING, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    error, mib = done.stdout.rsplit("\n", 2)[:2]
    return error, int(mib)


def repeated(text):
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 20_000, pyarrow.int32()), [text]).cast(
        pyarrow.large_string()
    )


@pytest.mark.parametrize("column", ["key", "version"])
def test_a_long_text_in_a_dictionary_is_refused_before_it_is_decoded(tmp_path, column):
    texts = repeated("k" * 50_000)
    short = [str(number) for number in range(len(texts))]
    keys, versions = (texts, None) if column == "key" else (short, texts.cast(pyarrow.string()))
    write(tmp_path / "m", bases=["s3://b"] * len(texts), keys=keys, versions=versions, use_dictionary=["base", column])
    assert (tmp_path / "m").stat().st_size < 200_000
    error, mib = loaded_elsewhere(tmp_path / "m")
    assert "has the encoding" in error
    assert mib < 300


def test_a_long_prefix_of_many_keys_is_refused_before_it_is_decoded(tmp_path):
    texts = repeated("k" * 50_000)
    write(tmp_path / "m", bases=["s3://b"] * len(texts), keys=texts, column_encoding={"key": "DELTA_BYTE_ARRAY"})
    assert (tmp_path / "m").stat().st_size < 20_000
    error, mib = loaded_elsewhere(tmp_path / "m")
    assert "has the encoding 7" in error
    assert mib < 300


def test_a_column_that_decompresses_to_more_than_the_longest_keys_is_refused(tmp_path):
    write(tmp_path / "m", bases=["s3://b"] * 20_000, keys=repeated("k" * 50_000))
    assert (tmp_path / "m").stat().st_size < 2_000_000
    error, mib = loaded_elsewhere(tmp_path / "m")
    assert re.search("a column of a row group has 10[0-9]* bytes, at most", error)
    assert mib < 300


@pytest.mark.parametrize("column", ["bases", "keys", "versions"])
def test_a_text_longer_than_that_of_any_store_is_refused(tmp_path, column):
    rows = {"bases": ["s3://b"], "keys": ["k"], "versions": ["1"]}
    write(tmp_path / "m", **rows | {column: ["s3://" + "b" * 5000]})
    with pytest.raises(exceptions.ManifestError, match=f"a {column[:-1]} of 5005 bytes"):
        Manifest.load(tmp_path / "m")


@pytest.mark.parametrize(
    "base", ["", "http://evil", "s3://bkt/", "s3://b\nx", "s3://", "gcs://b", "s3://u:p@b", "file://host", "s3://b/k"]
)
def test_a_base_that_is_not_that_of_a_store_is_refused(tmp_path, base):
    write(tmp_path / "m", bases=["s3://good", base], keys=["k", "l"])
    with pytest.raises(exceptions.ManifestError, match="its base '.*is not the URL of a store") as caught:
        Manifest.load(tmp_path / "m")
    assert "\n" not in str(caught.value)
    assert "u:p" not in str(caught.value)


@pytest.mark.parametrize("base", ["file://", "memory://m"])
@pytest.mark.parametrize("name", ["s3://b/m", "gs://b/m", "gcs://b/m", "file:///m", "memory://other/m"])
def test_only_a_local_manifest_names_objects_of_this_machine(tmp_path, base, name):
    manifest = Manifest.from_urls([f"{base}/etc/passwd"])
    manifest.save(tmp_path / "m")
    data = Buffer((tmp_path / "m").read_bytes())
    if name.startswith(("file", "memory")):
        assert read(data, name) == manifest
        return
    with pytest.raises(exceptions.ManifestError, match=f"{name}: .*objects of this machine.*{base}.*download"):
        read(data, name)


def test_the_longest_keys_and_versions_are_saved_and_loaded(tmp_path):
    manifest = Manifest.from_urls(f"s3://b/{number:01024}" for number in range(ROWS + 1))
    manifest.save(tmp_path / "m")
    assert Manifest.load(tmp_path / "m") == manifest


def test_more_objects_than_the_bytes_of_the_file_can_name_are_refused(tmp_path, monkeypatch):
    Manifest.from_urls(f"s3://b/{number}" for number in range(1000)).save(tmp_path / "m")
    monkeypatch.setattr("torchobj.manifest.parquet.row_limit", lambda size: 999)
    with pytest.raises(exceptions.ManifestError, match=r"damaged: 1000 objects in \d+ bytes"):
        Manifest.load(tmp_path / "m")
