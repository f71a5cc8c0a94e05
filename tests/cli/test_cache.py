"""`torchobj cache`."""

import os
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
    return [file for file in folder.glob("v1/??/*") if file.is_file()]


def test_files_are_listed_with_their_urls_and_sizes(cli, bucket, folder):
    rows = cli.records("cache", "ls", folder)
    assert sorted(row["url"] for row in rows) == [f"{bucket.url}/data/{key}" for key in ("a", "b")]
    assert {(row["start"], row["end"], row["size"], row["disk_bytes"]) for row in rows} == {
        (0, 100_000, 100_000, 102_400)
    }
    assert all(f"{bucket.url}/data/" in line for line in cli.lines("cache", "ls", folder))
    (used,) = cli.records("cache", "du", folder)
    assert used == {"files": 2, "disk_bytes": 204_800, "accounted_bytes": 204_800, "oldest_s": used["oldest_s"]}
    os.utime(files_of(folder)[0], (1e9, 1e9))
    assert cli.lines("cache", "du", folder) == ["2 files, 200 KiB; the oldest was read 2001-09-09T01:46:40Z"]


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
    asked = cli.error("cache", "clear", folder)
    assert f"delete 2 files, 200 KiB, of the cache in {folder}? --yes deletes without a question" in asked
    assert cli.lines("cache", "clear", folder, "--yes") == ["deleted 2 files, 200 KiB"]
    assert files_of(folder) == []


def test_the_files_that_were_read_last_are_kept_up_to_a_size(cli, bucket, folder):
    old, new = files_of(folder)
    os.utime(old, (1e9, 1e9))
    assert cli.lines("cache", "clear", folder, "--yes", "--max-bytes", "204800") == ["deleted 0 files, 0 B"]
    assert cli.lines("cache", "clear", folder, "--yes", "--max-bytes", "204799") == ["deleted 1 file, 100 KiB"]
    assert files_of(folder) == [new]


def test_of_files_that_were_read_in_the_same_second_as_many_as_fit_are_kept(cli, folder):
    for file in files_of(folder):
        os.utime(file, (1e9, 1e9))
    last = max(files_of(folder))
    asked = cli.error("cache", "clear", folder, "--max-bytes", "150000")
    assert "of 2 files, 200 KiB, delete all but 146 KiB" in asked
    assert cli.lines("cache", "clear", folder, "--yes", "--max-bytes", "150000") == ["deleted 1 file, 100 KiB"]
    assert files_of(folder) == [last]


def test_options_of_a_store_are_unknown(cli, folder):
    for option in (["--region", "r"], ["--profile", "p"], ["--endpoint-url", "http://e"], ["--no-sign-request"]):
        done = cli.run("cache", "ls", *option, folder)
        assert done.exit_code == 2 and "No such option" in done.stderr and option[0] in done.stderr


def test_files_of_other_programs_are_named_and_kept(cli, folder):
    others = [
        folder / "v1" / "notes.txt",
        files_of(folder)[0].parent / "notes.txt",
        folder / "v1" / "writing" / "notes.txt",
    ]
    for other in others:
        other.write_text("mine")
    (folder / "v1" / "writing" / "folder").mkdir()
    others.append(folder / "v1" / "writing" / "folder")
    for command, *arguments in (["ls"], ["verify"], ["clear", "--yes"]):
        lines = cli.lines("cache", command, folder, *arguments)
        assert all(f"{other} is not a file of the cache and is kept" in lines for other in others)
        rows = cli.records("cache", command, folder, *arguments)
        assert {row["path"] for row in rows if row.get("action") == "keep"} == set(map(str, others))
    assert files_of(folder) == [others[1]]
    assert all(other.read_text() == "mine" for other in others[:3]) and others[3].is_dir()


def test_a_lost_count_is_found_again(cli, folder):
    (folder / "v1" / "usage").unlink()
    assert cli.records("cache", "du", folder)[0]["accounted_bytes"] is None
    cli.lines("cache", "verify", folder)
    assert cli.records("cache", "du", folder)[0]["accounted_bytes"] == 204_800


def test_a_folder_without_a_cache_is_an_error(cli, tmp_path):
    error = cli.error("cache", "ls", tmp_path)
    assert "there is no cache in this folder" in error and error.count("os error") == 1
