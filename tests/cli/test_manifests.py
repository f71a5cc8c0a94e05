"""`torchobj manifest`."""

import json

import pytest

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)


@pytest.fixture
def filled(bucket):
    for key in ("train/0.jpg", "train/1.jpg", "train/x/2.png", "val/3.jpg"):
        bucket.write(key, b"12345")
    return bucket


def test_a_manifest_of_a_prefix_is_written_and_shown(cli, filled, tmp_path):
    file = tmp_path / "train.parquet"
    [built] = cli.records("manifest", "build", f"{filled.url}/train/", file)
    assert (built["objects"], built["bytes"], built["stores"]) == (3, 15, [filled.url])
    assert cli.records("manifest", "show", file) == [built]
    loaded = torchobj.Manifest.load(file)
    assert loaded.digest() == built["digest"] and loaded.url(0) == f"{filled.url}/train/0.jpg"


def test_a_manifest_is_written_to_a_bucket(cli, filled):
    cli.lines("manifest", "build", f"{filled.url}/train/", f"{filled.url}/manifests/train.parquet")
    listed = [
        json.loads(line)
        for line in cli.lines("manifest", "show", "--list", "--json", f"{filled.url}/manifests/train.parquet")
    ]
    assert [record["url"].rpartition("/")[2] for record in listed] == ["0.jpg", "1.jpg", "2.png"]
    assert {record["size"] for record in listed} == {5}


def test_objects_of_a_manifest_are_selected(cli, filled, tmp_path):
    file = tmp_path / "file.parquet"

    def count(*arguments):
        return cli.records("manifest", "build", *arguments, file)[0]["objects"]

    assert count(f"{filled.url}/**/*.jpg") == 3
    assert count(f"{filled.url}/train/", "--suffix", ".png") == 1
    assert count(filled.url, "--limit", "2") == 2


def test_a_manifest_of_nothing_is_not_written(cli, filled, tmp_path):
    assert "no objects" in cli.error("manifest", "build", f"{filled.url}/none/", tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_a_file_that_is_no_manifest_is_named(cli, filled, tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    assert f"{tmp_path}/file" in cli.error("manifest", "show", tmp_path / "file")
    assert f"{tmp_path}/none" in cli.error("manifest", "show", tmp_path / "none")
