"""`torchobj cache`."""

import time

import pytest

import torchobj
from torchobj import CacheOptions, _torchobj


@pytest.fixture
def folder(bucket, tmp_path):
    """A cache with two objects."""
    folder = tmp_path / "cache"
    config = bucket.config.replaced(cache=CacheOptions(folder=folder, min_free_bytes=0))
    for key in ("a", "b"):
        bucket.write(f"data/{key}", key.encode() * 100_000)
    dataset = torchobj.ObjectMapDataset(f"{bucket.url}/data/", transform=bytes, config=config)
    assert [len(dataset[number]) for number in range(2)] == [100_000, 100_000]
    while _torchobj.request_stats()["cache_pending"]:
        time.sleep(0.001)
    return folder


def files_of(folder):
    return [file for file in folder.rglob("*") if file.is_file() and file.name != "usage"]


def test_files_are_listed_with_their_urls_and_sizes(cli, bucket, folder):
    rows = cli.records("cache", "ls", folder)
    assert sorted(row["url"] for row in rows) == [f"{bucket.url}/data/{key}" for key in ("a", "b")]
    assert {(row["start"], row["end"], row["size"], row["disk_bytes"]) for row in rows} == {
        (0, 100_000, 100_000, 102_400)
    }
    assert all(f"{bucket.url}/data/" in line for line in cli.lines("cache", "ls", folder))
    (used,) = cli.records("cache", "du", folder)
    assert used == {"files": 2, "disk_bytes": 204_800, "accounted_bytes": 204_800, "oldest_s": used["oldest_s"]}
    assert cli.lines("cache", "du", folder) == ["2 files, 200 KiB; the oldest was read 0.0 hours ago"]


def test_damaged_files_are_found_and_deleted(cli, bucket, folder):
    assert cli.lines("cache", "verify", folder) == ["2 files: no damage"]
    for file, at in zip(files_of(folder), (50_000, -1), strict=True):
        content = bytearray(file.read_bytes())
        content[at] ^= 1
        file.write_bytes(content)
    (damaged,) = [line for line in cli.lines("cache", "ls", folder) if "damaged" in line]
    assert bucket.url not in damaged
    done = cli.run("cache", "verify", folder)
    assert (
        done.exit_code == 1
        and "deleted the damaged file of " in done.stdout
        and "deleted a damaged file" in done.stdout
    )
    assert files_of(folder) == [] and cli.records("cache", "du", folder)[0]["accounted_bytes"] == 0


def test_all_files_are_deleted_on_request(cli, folder):
    assert "--yes deletes without a question" in cli.error("cache", "clear", folder)
    assert cli.lines("cache", "clear", folder, "--yes") == ["deleted 2 files, 200 KiB"]
    assert files_of(folder) == []


def test_a_folder_without_a_cache_is_an_error(cli, tmp_path):
    assert "there is no cache in this folder" in cli.error("cache", "ls", tmp_path)
