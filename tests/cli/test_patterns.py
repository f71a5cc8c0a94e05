"""`--exclude` and `--include` of `torchobj cp` and `sync`, and the content types of uploads."""

import gzip
import mimetypes

import pytest

from tests.support.command_line import files_of
from tests.support.long_tables import GCS_IN_MATRIX, often
from torchobj.cli.transfer_run import guessed_type, types_by_end

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

COPY = pytest.mark.parametrize("command", [["cp", "-r"], ["sync"]], ids=["cp", "sync"])


@COPY
@pytest.mark.parametrize(
    ("options", "names"),
    often(
        3,
        [
            (["--exclude=*", "--include=*.bin", "--exclude", "sub/*", "--include", "b*"], ["a.bin", "b.txt"]),
            (["--exclude", "sub"], ["a.bin", "b.txt", "sub/c.bin"]),
            (["--exclude", "[ab].*"], ["sub/c.bin"]),
            (["--exclude", "*.bin"], ["b.txt"]),
            (["--exclude", "*", "--include", "*.bin"], ["a.bin", "sub/c.bin"]),
            (["--include", "*.bin", "--exclude", "*c*"], ["a.bin", "b.txt"]),
        ],
    ),
)
def test_the_last_pattern_that_matches_decides_in_each_direction(
    cli, bucket, other_bucket, tree, tmp_path, command, options, names
):
    plan = cli.lines(*command, *options, "--dry-run", tree, f"{bucket.url}/up")
    assert plan == [f"would copy {tree}/{name} -> {bucket.url}/up/{name}" for name in names]
    assert cli.records(*command, *options, tree, f"{bucket.url}/up")[0]["files"] == len(names)
    assert bucket.keys() == [f"up/{name}" for name in names]
    cli.lines("sync", tree, f"{bucket.url}/x")
    cli.lines(*command, *options, f"{bucket.url}/x", tmp_path / "down")
    assert list(files_of(tmp_path / "down")) == names
    cli.lines(*command, *options, f"{bucket.url}/x", other_bucket.url)
    assert other_bucket.keys() == names


def test_patterns_are_relative_to_the_folder_above_the_wildcards_of_a_glob(cli, bucket, synced, tmp_path):
    cli.lines("cp", f"{synced}/**", tmp_path / "down", "--exclude", "x/*", "--exclude", "sub/*")
    assert list(files_of(tmp_path / "down")) == ["a.bin", "b.txt"]


def test_single_sources_are_selected_by_their_last_names(cli, bucket, tree):
    cli.lines("cp", tree / "a.bin", tree / "b.txt", f"{bucket.url}/k/", "--exclude", "*.bin")
    assert bucket.keys() == ["k/b.txt"]
    assert "select none of them" in cli.error("cp", tree / "a.bin", f"{bucket.url}/k/", "--exclude", "a*")
    assert "no file or key is selected" in cli.error("cp", "-r", tree, f"{bucket.url}/y", "--exclude", "*")
    assert "a stream has no name" in cli.error("cp", "-", f"{bucket.url}/k/b.txt", "--exclude", "a")
    for source in (f"{bucket.url}/k/*", f"{bucket.url}/k/b.txt"):
        assert "do not apply to the standard output" in cli.error("cp", source, "-", "--exclude", "a")
    assert bucket.keys() == ["k/b.txt"]


@pytest.mark.parametrize("place", ["bucket", "local", "other bucket"])
def test_sync_deletes_nothing_that_is_excluded(cli, bucket, other_bucket, tree, synced, tmp_path, place):
    target = {"bucket": f"{bucket.url}/y", "local": tmp_path / "y", "other bucket": f"{other_bucket.url}/y"}[place]
    source = tree if place == "bucket" else synced
    cli.lines("sync", source, target)
    for name in ("keep.log", "sub/keep.log", "old.bin"):
        if place == "local":
            (target / name).write_bytes(b"1")
        else:
            (bucket if place == "bucket" else other_bucket).write(f"y/{name}", b"1")
    (tree / "b.txt").unlink()
    bucket.remove("x/b.txt")
    options = ("--delete", "--exclude", "*.log")
    dry = cli.lines("sync", *options, "--dry-run", source, target)
    done = cli.lines("sync", *options, source, target)
    deleted = [f"{target}/b.txt", f"{target}/old.bin"]
    assert [line for line in dry if "delete" in line] == [f"would delete {name}" for name in deleted]
    assert [line for line in done if line.startswith("delete ")] == [f"delete {name}" for name in deleted]
    # What is excluded in both is not deleted either, although it is not transferred.
    cli.lines("sync", "--delete", "--force", "--exclude", "*", source, target)
    left = list(files_of(target)) if place == "local" else (bucket if place == "bucket" else other_bucket).keys()
    names = ["a.bin", "keep.log", "sub/c.bin", "sub/keep.log"]
    assert [name.removeprefix("y/") for name in left if not name.startswith("x/")] == names


def content_type(bucket, key):
    if bucket.url.startswith("gs:"):
        return bucket.official.get_blob(key).content_type
    return bucket.boto.head_object(Bucket=bucket.name, Key=key)["ContentType"]


NAMES = ["a.jpg", "b.TXT", "c.html", "d.json", "e.tar.gz", "f.tgz", "g", ".png", "h.unknown", "x/i.png", "j.pdf.png"]


@pytest.mark.parametrize("command", [["cp", "-r"], ["sync"], ["mv", "-r"]], ids=["cp", "sync", "mv"])
def test_content_types_of_a_tree_are_guessed_from_names_as_the_standard_library_does(cli, bucket, tmp_path, command):
    folder = tmp_path / "files"
    (folder / "x").mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_bytes(b"1")
    cli.lines(*command, folder, f"{bucket.url}/k")
    expected = {name: mimetypes.guess_type(name)[0] or "application/octet-stream" for name in NAMES}
    assert {name: content_type(bucket, f"k/{name}") for name in NAMES} == expected


def test_content_types_of_files_and_streams_are_guessed_from_names(cli, bucket, tmp_path):
    for name in ("a.jpg", "plain", "c.json"):
        (tmp_path / name).write_bytes(gzip.compress(b"1"))
    cli.lines("cp", tmp_path / "a.jpg", f"{bucket.url}/a")
    cli.lines("cp", tmp_path / "plain", f"{bucket.url}/b.css")
    cli.lines("cp", tmp_path / "c.json", f"{bucket.url}/c.json", "--content-type", "text/x-mine")
    assert cli.run("cp", "-", f"{bucket.url}/d.csv", stdin=b"1,2").exit_code == 0
    types = [content_type(bucket, key) for key in ("a", "b.css", "c.json", "d.csv")]
    assert types == ["image/jpeg", "text/css", "text/x-mine", "text/csv"]


def test_a_content_type_that_is_given_is_that_of_each_upload(cli, bucket, synced, tree):
    cli.lines("sync", "--content-type", "text/x-mine", tree, f"{bucket.url}/y")
    assert {content_type(bucket, f"y/{name}") for name in files_of(tree)} == {"text/x-mine"}
    assert "--content-type: for uploads" in cli.error("sync", "--content-type", "a/b", synced, tree)


def test_ends_of_names_have_the_types_of_the_standard_library():
    table = types_by_end()
    assert {".jpg", ".tar.gz", ".tgz", ".json.xz"} <= table.keys()
    assert all(kind == mimetypes.guess_type(f"x{end}")[0] for end, kind in table.items())
    assert guessed_type("data:x.png") == "image/png" and guessed_type("g", "https:h.png") == "image/png"


@COPY
def test_what_is_excluded_is_no_failure_if_it_cannot_be_read(cli, bucket, tree, command):
    (tree / "cache").mkdir()
    (tree / "cache" / "broken").symlink_to("nowhere")
    (tree / "cache" / "loop").symlink_to("loop")
    assert cli.run(*command, tree, f"{bucket.url}/y").exit_code == 1
    cli.lines(*command, tree, f"{bucket.url}/y", "--exclude", "cache/*")
    assert bucket.keys() == ["y/a.bin", "y/b.txt", "y/sub/c.bin"]


def test_sync_deletes_although_what_is_excluded_cannot_be_read(cli, bucket, tree):
    cli.lines("sync", tree, f"{bucket.url}/y")
    bucket.write("y/cache/kept", b"1")
    (tree / "a.bin").unlink()
    (tree / "cache").symlink_to("nowhere")
    done = cli.run("sync", "--delete", tree, f"{bucket.url}/y")
    assert done.exit_code == 1 and "y/a.bin" in bucket.keys()
    options = ("--delete", "--exclude", "cache", "--exclude", "cache/*")
    cli.lines("sync", *options, tree, f"{bucket.url}/y")
    assert bucket.keys() == ["y/b.txt", "y/cache/kept", "y/sub/c.bin"]


def test_a_glob_of_local_files_does_not_read_other_entries(cli, bucket, tree):
    (tree / "old").symlink_to("nowhere")
    cli.lines("cp", f"{tree}/*.txt", f"{bucket.url}/y/")
    assert bucket.keys() == ["y/b.txt"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "{url}/my [2020-08-04]/"],
        ["cat", "{url}/p[z-a]"],
        ["cp", "-r", "{url}/my [2020-08-04]", "down"],
        ["cp", "{url}/{{a", "down"],
        ["rm", "-r", "--yes", "{url}/my [2020-08-04]"],
        ["scan", "{url}/q[x"],
        ["manifest", "build", "{url}/my [2020-08-04]/", "m.parquet"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_a_name_that_is_no_pattern_is_refused_with_what_takes_it_as_it_is(cli, bucket, arguments):
    bucket.write("my [2020-08-04]/a", b"a")
    error = cli.error(*[argument.format(url=bucket.url) for argument in arguments])
    assert "--raw takes wildcards as they are" in error
    assert "[[] and [{] stand for the characters" in error
    assert cli.lines("cat", f"{bucket.url}/my [[]2020-08-04]/a") == ["a"]
    assert cli.lines("cat", "--raw", f"{bucket.url}/my [2020-08-04]/a") == ["a"]
