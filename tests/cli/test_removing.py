"""`torchobj rm` and `torchobj uploads`."""

import re

import pytest

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)


@pytest.fixture
def filled(bucket):
    for key in ("train", "train/0.jpg", "train/1.png", "training/2.jpg"):
        bucket.write(key, b"1")
    return bucket


def test_rm_deletes_an_object(cli, filled):
    assert cli.lines("rm", "--yes", f"{filled.url}/train") == [f"delete {filled.url}/train"]
    assert filled.keys() == ["train/0.jpg", "train/1.png", "training/2.jpg"]


@pytest.mark.providers("s3", "gs")
def test_rm_deletes_a_folder_and_nothing_beside_it(cli, filled):
    cli.lines("rm", "--yes", "-r", f"{filled.url}/train")
    assert filled.keys() == ["train", "training/2.jpg"]


def test_rm_deletes_the_keys_that_match_a_glob(cli, filled):
    cli.lines("rm", "--yes", f"{filled.url}/**/*.jpg")
    assert filled.keys() == ["train", "train/1.png"]


def test_rm_without_a_terminal_refuses(cli, filled):
    message = cli.error("rm", f"{filled.url}/train")
    assert message == (
        f"torchobj: cannot ask without a terminal: delete {filled.url}/train? --yes deletes without a question"
    )
    assert "train" in filled.keys()


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1)])
def test_rm_asks_on_a_terminal(cli, filled, answer, code):
    ended, shown = cli.on_terminal("rm", "-r", f"{filled.url}/train", answer=answer)
    assert re.search(r"delete 2 objects, 2 B, of \S+/train\? \[y/N\]", shown)
    assert ended == code
    assert ("train/0.jpg" in filled.keys()) == (code == 1)


def test_rm_refuses_a_folder_without_recursive(cli, filled):
    assert "--recursive" in cli.error("rm", "--yes", f"{filled.url}/train/")
    assert "--recursive" in cli.error("rm", "--yes", filled.url)


@pytest.mark.parametrize("path", ["", "/", "/**", "/*", "/**/*"])
def test_rm_of_a_whole_bucket_needs_its_own_option(cli, filled, path):
    keys, url = filled.keys(), f"{filled.url}{path}"
    before = ["rm", "--yes", "-r", f"{filled.url}/train", url]
    assert f"{url}: is a whole bucket; --whole-bucket deletes all of its objects" in cli.error(*before)
    assert filled.keys() == keys
    assert len(cli.lines("rm", "-r", "--dry-run", url)) == (1 if path == "/*" else len(keys))
    done = cli.run("rm", "--yes", "-r", "--whole-bucket", url)
    assert filled.keys() == ([] if path != "/*" else [key for key in keys if "/" in key])
    assert done.exit_code == 0
    assert path == "/*" or done.stderr == f"deleting {len(keys)} objects, {len(keys)} B, of {url}\n"


def test_the_option_for_whole_buckets_does_not_replace_the_question(cli, filled):
    message = cli.error("rm", "-r", "--whole-bucket", filled.url)
    assert f"delete {len(filled.keys())} objects" in message and "--yes" in message


def test_rm_of_an_object_that_does_not_exist_is_an_error(cli, filled):
    assert "no such object" in cli.error("rm", "--yes", f"{filled.url}/nothing")


def test_rm_deletes_nothing_if_one_of_its_arguments_names_nothing(cli, filled):
    cli.error("rm", "--yes", f"{filled.url}/train", f"{filled.url}/nothing")
    assert "train" in filled.keys()


def test_rm_refuses_local_files(cli, tmp_path):
    (tmp_path / "file").touch()
    assert "deletes objects of buckets only" in cli.error("rm", "--yes", tmp_path / "file")
    assert (tmp_path / "file").exists()


def test_a_dry_run_of_rm_deletes_nothing(cli, filled):
    assert cli.lines("rm", "-r", "--dry-run", f"{filled.url}/train") == [
        f"would delete {filled.url}/train/0.jpg",
        f"would delete {filled.url}/train/1.png",
    ]
    assert "train/0.jpg" in filled.keys()


def test_rm_refuses_a_glob_that_is_a_key_too(cli, bucket):
    for key in ("img[1].jpg", "img1.jpg"):
        bucket.write(key, b"1")
    assert "--raw" in cli.error("rm", "--yes", f"{bucket.url}/img[1].jpg")
    assert len(bucket.keys()) == 2
    cli.lines("rm", "--yes", f"{bucket.url}/img[[]1].jpg")
    assert bucket.keys() == ["img1.jpg"]


def test_rm_with_raw_deletes_the_key_with_wildcards(cli, bucket):
    for key in ("img[1].jpg", "img1.jpg"):
        bucket.write(key, b"1")
    cli.lines("rm", "--yes", "--raw", f"{bucket.url}/img[1].jpg")
    assert bucket.keys() == ["img1.jpg"]


@pytest.mark.providers("s3")
class TestUploads:
    @pytest.fixture
    def unfinished(self, bucket):
        bucket.boto.create_multipart_upload(Bucket=bucket.name, Key="runs/large")
        return bucket

    def test_unfinished_uploads_are_listed(self, cli, unfinished):
        [line] = cli.lines("uploads", "list", f"{unfinished.url}/runs/")
        assert line.endswith(f"{unfinished.url}/runs/large")
        assert cli.lines("uploads", "list", f"{unfinished.url}/other/") == []

    def test_recent_uploads_are_kept(self, cli, unfinished):
        cli.lines("uploads", "sweep", "--yes", "--older-than", "1h", unfinished.url)
        assert len(unfinished.uploads()) == 1

    def test_old_uploads_are_aborted(self, cli, unfinished):
        [record] = cli.records("uploads", "sweep", "--yes", "--older-than", "0s", unfinished.url)
        assert record["action"] == "abort" and record["url"] == f"{unfinished.url}/runs/large"
        assert unfinished.uploads() == []

    def test_a_sweep_without_a_terminal_refuses(self, cli, unfinished):
        assert "--yes" in cli.error("uploads", "sweep", "--older-than", "0s", unfinished.url)
        assert len(unfinished.uploads()) == 1

    def test_an_age_without_a_known_unit_is_a_wrong_call(self, cli, unfinished):
        assert cli.run("uploads", "sweep", "--older-than", "1y", unfinished.url).exit_code == 2


def test_a_closed_writer_leaves_no_unfinished_upload(cli, bucket):
    with torchobj.open(f"{bucket.url}/k", "wb", config=bucket.config) as writer:
        writer.write(b"1")
    assert cli.lines("uploads", "list", bucket.url) == []
