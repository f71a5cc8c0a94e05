"""`torchobj cp`, by its other names too, on files, trees, globs and streams."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import torchobj
from tests.support.command_line import ROOT, CommandLine, files_of
from tests.support.long_tables import GCS_IN_MATRIX
from torchobj.cli import transfer_run
from torchobj.store.transfers import Progress

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)


def test_the_progress_of_several_transfers_is_their_sum_and_unknown_while_a_total_is():
    reports = []
    total = transfer_run._Total(reports.append)
    first, second = total.part(), total.part()
    first(Progress(0, None, 5, None, 0))
    second(Progress(1, 1, 10, 10, 1))
    first(Progress(2, 3, 15, 20, 0))
    second(Progress(1, 1, 10, 10, 1))
    assert reports == [
        Progress(0, None, 5, None, 0),
        Progress(1, None, 15, None, 1),
        *[Progress(3, 4, 25, 30, 1)] * 2,
    ]


@pytest.mark.parametrize("command", ["cp", "upload"])
def test_a_file_is_uploaded_by_its_name_or_another(cli, bucket, tree, command):
    cli.lines(command, tree / "a.bin", f"{bucket.url}/folder/")
    cli.lines(command, tree / "a.bin", f"{bucket.url}/other")
    cli.lines(command, tree / "a.bin", bucket.url)
    assert bucket.keys() == ["a.bin", "folder/a.bin", "other"]
    assert bucket.body("other") == (tree / "a.bin").read_bytes()


@pytest.mark.parametrize("command", ["cp", "download"])
def test_an_object_is_downloaded_by_its_name_or_another(cli, bucket, tmp_path, command):
    bucket.write("folder/k", b"bytes")
    cli.lines(command, f"{bucket.url}/folder/k", tmp_path)
    cli.lines(command, f"{bucket.url}/folder/k", tmp_path / "other")
    assert (tmp_path / "k").read_bytes() == (tmp_path / "other").read_bytes() == b"bytes"


def test_several_files_are_uploaded_to_a_folder(cli, bucket, tree):
    [record] = cli.records("cp", tree / "a.bin", tree / "b.txt", f"{bucket.url}/x/")
    assert bucket.keys() == ["x/a.bin", "x/b.txt"]
    assert (record["files"], record["bytes"], record["failed"]) == (2, 1000, 0)
    assert "must be a folder" in cli.error("cp", tree / "a.bin", tree / "b.txt", f"{bucket.url}/x")


@pytest.mark.providers("s3", "gs")
def test_trees_are_copied_into_the_destination(cli, bucket, tree, tmp_path):
    cli.lines("cp", "-r", tree, f"{bucket.url}/x")
    assert bucket.keys() == ["x/a.bin", "x/b.txt", "x/sub/c.bin"]
    cli.lines("cp", "-r", f"{bucket.url}/x/", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tree)


def test_a_tree_of_a_prefix_does_not_contain_what_is_beside_it(cli, bucket, tmp_path):
    for key in ("train/0", "training/1"):
        bucket.write(key, b"1")
    cli.lines("cp", "-r", f"{bucket.url}/train", tmp_path / "out")
    assert files_of(tmp_path / "out") == {"0": b"1"}


def test_globs_are_copied_with_their_paths_below_the_wildcards(cli, bucket, tree, tmp_path):
    cli.lines("cp", f"{tree}/**/*.bin", f"{bucket.url}/x/")
    assert bucket.keys() == ["x/a.bin", "x/sub/c.bin"]
    cli.lines("cp", f"{bucket.url}/x/s*/*.bin", tmp_path / "out")
    assert list(files_of(tmp_path / "out")) == ["sub/c.bin"]


def test_a_folder_is_refused_without_recursive(cli, bucket, tree):
    assert "--recursive" in cli.error("cp", tree, f"{bucket.url}/x/")
    assert "--recursive" in cli.error("cp", f"{bucket.url}/x/", tree)


@pytest.mark.parametrize("source", ["nothing/*.jpg", "nothing/"])
def test_sources_that_name_nothing_are_an_error(cli, bucket, tmp_path, source):
    message = cli.error("cp", "-r", f"{bucket.url}/{source}", tmp_path / "out")
    assert f"{bucket.url}/{source}" in message and "`torchobj ls` shows what exists" in message


def test_a_missing_source_is_named(cli, bucket, tmp_path):
    assert f"{tmp_path}/none: no such file" in cli.error("cp", tmp_path / "none", bucket.url)
    assert f"{bucket.url}/none" in cli.error("cp", f"{bucket.url}/none", tmp_path)


def test_a_target_folder_that_is_a_file_is_refused(cli, bucket, tree):
    bucket.write("x/k", b"1")
    assert "is a file, and must be a folder" in cli.error("cp", "-r", f"{bucket.url}/x", tree / "a.bin")
    assert (tree / "a.bin").read_bytes() == b"a.bin" * 100


def test_local_to_local_is_refused(cli, tree, tmp_path):
    assert "both local" in cli.error("cp", tree / "a.bin", tmp_path / "x")


@pytest.mark.parametrize("key", ["x/..", "x/."])
def test_a_key_that_does_not_end_in_a_file_name_is_refused(cli, bucket, tmp_path, key):
    assert "does not end in a file name" in cli.error("cp", f"{bucket.url}/{key}", tmp_path)


def test_keys_that_leave_the_target_folder_are_refused_by_name_and_the_rest_is_copied(cli, bucket, tmp_path):
    for key in ("x/good", "x/../evil"):
        bucket.write(key, b"1")
    done = cli.run("cp", "-r", f"{bucket.url}/x/", tmp_path / "out" / "in")
    assert done.exit_code == 1 and "x/../evil" in done.stderr and "1 failed" in done.stdout
    assert files_of(tmp_path / "out") == {"in/good": b"1"}


def test_an_unreadable_file_is_listed_and_the_rest_is_copied(cli, bucket, tree):
    (tree / "dangling").symlink_to("nothing")
    done = cli.run("cp", "-r", tree, f"{bucket.url}/x/")
    assert "dangling" in done.output
    assert bucket.keys() == ["x/a.bin", "x/b.txt", "x/sub/c.bin"]


@pytest.mark.providers("s3", "gs")
def test_objects_are_copied_from_bucket_to_bucket_with_their_metadata(cli, bucket, other_bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.put("x/k", b"bytes", content_type="text/plain", metadata={"label": "cat"})
    store.put("x/sub/l", b"2")
    cli.lines("cp", f"{bucket.url}/x/k", f"{other_bucket.url}/copy")
    cli.lines("cp", "-r", f"{bucket.url}/x/", f"{other_bucket.url}/tree/")
    assert other_bucket.keys() == ["copy", "tree/k", "tree/sub/l"]
    copied = torchobj.Store(other_bucket.url, config=bucket.config).head("copy")
    assert copied.content_type == "text/plain" and copied.metadata == {"label": "cat"}


@pytest.mark.providers("s3")
@pytest.mark.parametrize("first", ["s3", "gs"])
def test_objects_are_copied_from_provider_to_provider(bucket, gcs_bucket, tmp_path, monkeypatch, first):
    cli = CommandLine(tmp_path, monkeypatch, bucket, gcs_bucket)
    source, destination = (bucket, gcs_bucket) if first == "s3" else (gcs_bucket, bucket)
    data = os.urandom(9 << 20)
    torchobj.Store(source.url, config=source.config).put("x/k", data, content_type="text/plain", metadata={"a": "b"})
    cli.lines("cp", "-r", f"{source.url}/x", f"{destination.url}/y")
    assert destination.body("y/k") == data
    [record] = cli.records("head", f"{destination.url}/y/k")
    assert record["content_type"] == "text/plain" and record["metadata"] == {"a": "b"}
    assert "have different endpoints" in cli.error(
        "cp", "--endpoint-url", "http://127.0.0.1:9", f"{source.url}/x/k", f"{destination.url}/k"
    )


def test_folders_that_contain_each_other_are_refused(cli, bucket):
    assert "contain each other" in cli.error("cp", "-r", f"{bucket.url}/x/", f"{bucket.url}/x/y/")
    assert "are the same" in cli.error("cp", f"{bucket.url}/k", f"{bucket.url}/k")


@pytest.mark.providers("s3", "gs")
def test_headers_and_metadata_are_set(cli, bucket, tree):
    given = ["--content-type", "text/plain", "--metadata", "a=b=c"]
    cli.lines("cp", *given, tree / "b.txt", f"{bucket.url}/k")
    [record] = cli.records("head", f"{bucket.url}/k")
    assert record["content_type"] == "text/plain" and record["metadata"]["a"] == "b=c"
    cli.lines("cp", "-r", *given, tree, f"{bucket.url}/x/")
    assert cli.records("head", f"{bucket.url}/x/a.bin")[0]["content_type"] == "text/plain"
    assert "for uploads, not for" in cli.error("cp", *given, f"{bucket.url}/k", tree)
    assert "NAME=VALUE" in cli.error("cp", "--metadata", "a", tree / "b.txt", f"{bucket.url}/k")


def test_unchanged_files_are_skipped(cli, bucket, tree):
    cli.lines("cp", "-r", tree, f"{bucket.url}/x/")
    (tree / "a.bin").write_bytes(b"new")
    [record] = cli.records("cp", "-r", "--skip-unchanged", tree, f"{bucket.url}/x/")
    assert (record["files"], record["unchanged"]) == (1, 2)


@pytest.mark.parametrize("command", [["cp", "-r", "--skip-unchanged"], ["sync"]], ids=["cp", "sync"])
def test_nothing_to_do_is_said(cli, bucket, tree, command):
    cli.lines(*command, tree, f"{bucket.url}/x/")
    assert cli.lines(*command, tree, f"{bucket.url}/x/") == ["nothing to do: 3 files unchanged"]
    assert cli.run(*command, "--dry-run", tree, f"{bucket.url}/x/").stderr == "nothing to do: 3 files unchanged\n"


@pytest.mark.providers("gs")
def test_an_emulator_of_gcs_without_credentials_names_the_option(cli, bucket, monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nonexistent.json")
    message = cli.error("ls", "--endpoint-url", bucket.server.endpoint, bucket.url)
    assert message.endswith("an emulator takes requests with --no-sign-request")
    assert "emulator" not in cli.error("ls", bucket.url)


def test_a_dry_run_copies_nothing(cli, bucket, tree):
    lines = cli.lines("cp", "-r", "--dry-run", tree, f"{bucket.url}/x/")
    assert lines[0] == f"would copy {tree}/a.bin -> {bucket.url}/x/a.bin" and len(lines) == 3
    assert bucket.keys() == []


def test_the_standard_input_is_uploaded(cli, bucket):
    done = cli.process("cp", "-", f"{bucket.url}/k", stdin=subprocess.PIPE)
    assert done.returncode == 0 and bucket.body("k") == b""
    process = cli.start("cp", "-", f"{bucket.url}/k", stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    process.communicate(b"streamed" * 1000)
    assert process.returncode == 0 and bucket.body("k") == b"streamed" * 1000


def test_a_fifo_is_uploaded_as_the_standard_input(cli, bucket, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    writer = subprocess.Popen(["sh", "-c", f"printf abc > {tmp_path}/fifo"])
    with (tmp_path / "fifo").open("rb") as fifo:
        done = cli.process("cp", "-", f"{bucket.url}/k", stdin=fifo)
    assert done.returncode == 0 and writer.wait() == 0 and bucket.body("k") == b"abc"


def test_a_fifo_is_a_source(cli, bucket, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    writer = subprocess.Popen(["sh", "-c", f"printf abc > {tmp_path}/fifo"])
    done = cli.process("cp", tmp_path / "fifo", f"{bucket.url}/k", "--content-type", "text/plain")
    assert done.stdout.startswith(b"copied 1 file, 3 B") and writer.wait() == 0 and bucket.body("k") == b"abc"
    command = f"{sys.executable} -m torchobj cp <(printf abcd) {bucket.url}/k"
    subprocess.run(["bash", "-c", command], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert bucket.body("k") == b"abcd"


def test_a_fifo_is_not_moved_and_a_device_is_read_by_the_shell_only(cli, bucket, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert cli.error("mv", tmp_path / "fifo", f"{bucket.url}/k").endswith("fifo: a FIFO cannot be moved; use cp")
    message = cli.error("cp", "/dev/zero", f"{bucket.url}/k")
    assert f"`torchobj cp - {bucket.url}/k < /dev/zero`" in message


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_the_standard_output_by_its_path_receives_the_object_only(cli, bucket, tmp_path, name):
    bucket.write("k", b"bytes\n")
    (tmp_path / "link").symlink_to("/dev/stdout")
    target = name if name.startswith("/") else tmp_path / name
    shell = f"(echo before; {sys.executable} -m torchobj cp {bucket.url}/k {target}; echo after) > {tmp_path}/out"
    subprocess.run(["bash", "-c", shell], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (tmp_path / "out").read_bytes() == b"before\nbytes\nafter\n"
    assert (tmp_path / "link").is_symlink() and Path("/dev/stdout").is_symlink()


def test_a_fifo_and_a_descriptor_are_destinations_of_a_copy_but_not_of_a_move(cli, bucket, tmp_path):
    bucket.write("k", b"bytes")
    os.mkfifo(tmp_path / "fifo")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit((tmp_path / "fifo").read_bytes)
        assert cli.lines("cp", f"{bucket.url}/k", tmp_path / "fifo", "--skip-unchanged")[0].startswith("copied 1 file")
        assert read.result() == b"bytes"
    with (tmp_path / "out").open("wb", buffering=0) as out:
        cli.lines("cp", f"{bucket.url}/k", f"/dev/fd/{out.fileno()}")
    assert (tmp_path / "out").read_bytes() == b"bytes"
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("fifo", "null"):
        assert "cannot be verified" in cli.error("mv", f"{bucket.url}/k", tmp_path / name)
    assert bucket.body("k") == b"bytes"


def test_a_file_of_proc_is_uploaded_with_its_bytes(cli, bucket):
    assert cli.lines("cp", "/proc/self/status", f"{bucket.url}/k")[0].startswith("copied 1 file")
    assert bucket.body("k").startswith(b"Name:")


def test_a_manifest_is_written_into_a_device(cli, bucket, tmp_path):
    bucket.write("k", b"bytes")
    (tmp_path / "null").symlink_to("/dev/null")
    cli.lines("manifest", "build", bucket.url, tmp_path / "null")
    assert (tmp_path / "null").is_symlink() and Path("/dev/null").is_char_device()


def test_the_objects_of_a_glob_are_copied_to_the_standard_output(cli, bucket):
    for key in ("b.txt", "a.txt", "c*.jpg"):
        bucket.write(key, key.encode())
    assert cli.process("cp", f"{bucket.url}/*.txt", "-").stdout == b"a.txtb.txt"
    assert cli.process("cp", "--raw", f"{bucket.url}/c*.jpg", "-").stdout == b"c*.jpg"
    assert "no key matches" in cli.error("cp", f"{bucket.url}/*.png", "-")


@pytest.mark.parametrize("command", [["cp"], ["cp", "--dry-run"], ["cp", "--skip-unchanged"]])
def test_a_glob_without_matches_names_the_option_for_keys_with_wildcards(cli, bucket, tmp_path, command):
    bucket.write("x[1].txt", b"1")
    message = cli.error(*command, f"{bucket.url}/x[1].txt", tmp_path / "out")
    assert f"{bucket.url}/x[1].txt: no file or key matches; --raw takes wildcards as they are" in message
    assert "--raw" in cli.error(*command, f"{bucket.url}/x[1].txt", f"{bucket.url}/y*", tmp_path / "out")
    assert "no file or key matches" in cli.error(*command, f"{tmp_path}/*.png", bucket.url)
    cli.lines("cp", "--raw", f"{bucket.url}/x[1].txt", tmp_path / "one")
    assert (tmp_path / "one").read_bytes() == b"1"


def test_an_object_is_copied_to_the_standard_output_without_other_text(cli, bucket):
    bucket.write("k", b"bytes")
    done = cli.process("cp", f"{bucket.url}/k", "-")
    assert done.stdout == b"bytes" and done.returncode == 0


def test_a_stream_has_one_object_at_its_other_end(cli, bucket, tree):
    assert "must name an object" in cli.error("cp", "-", f"{bucket.url}/x/")
    assert "must name an object" in cli.error("cp", tree / "a.bin", "-")
    assert "only source" in cli.error("cp", "-", tree / "a.bin", f"{bucket.url}/k")


@pytest.mark.parametrize("command", [["cp", "-r"], ["sync"], ["mv", "-r"]], ids=["cp", "sync", "mv"])
def test_a_download_of_a_folder_skips_keys_of_temporary_files_with_a_warning(cli, bucket, tmp_path, command):
    kept = ["x/.torchobj-doctor-1", "x/s/.torchobj-2", "x/.torchobj-d/file"]
    for key in ("x/a", "x/s/b", *kept):
        bucket.write(key, b"1")
    done = cli.run(*command, f"{bucket.url}/x", tmp_path / "out")
    assert done.exit_code == 0 and list(files_of(tmp_path / "out")) == ["a", "s/b"]
    assert all(f"{bucket.url}/{key} has the name of a temporary file: skipped" in done.stderr for key in kept)
    assert bucket.keys() == (sorted(kept) if command[0] == "mv" else sorted(["x/a", "x/s/b", *kept]))
