"""`torchobj sync` and `torchobj mv`."""

import os

import pytest

from tests.support.command_line import files_of
from tests.support.long_tables import GCS_IN_MATRIX
from torchobj.cli import transfer_run

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)


def test_sync_transfers_what_is_new_or_changed(cli, bucket, tree, synced):
    (tree / "a.bin").write_bytes(b"A.bin" * 100)
    (tree / "new").write_bytes(b"new")
    [record] = cli.records("sync", tree, synced)
    assert (record["files"], record["unchanged"]) == (2, 2)
    assert bucket.body("x/a.bin") == b"A.bin" * 100 and bucket.body("x/new") == b"new"


def test_sync_downloads_what_is_new_or_changed(cli, bucket, tree, synced):
    bucket.write("x/sub/c.bin", b"changed")
    [record] = cli.records("sync", synced, tree)
    assert (record["files"], record["unchanged"]) == (1, 2)
    assert (tree / "sub/c.bin").read_bytes() == b"changed"


@pytest.mark.providers("s3", "gs")
def test_sync_from_bucket_to_bucket_copies_what_is_new_or_changed(cli, bucket, other_bucket, synced):
    assert cli.records("sync", synced, other_bucket.url)[0]["files"] == 3
    bucket.write("x/b.txt", b"longer than before" * 100)
    [record] = cli.records("sync", synced, other_bucket.url)
    assert (record["files"], record["unchanged"]) == (1, 2)
    assert other_bucket.body("b.txt") == b"longer than before" * 100


def test_sync_deletes_nothing_unless_it_is_told_to(cli, bucket, tree, synced):
    (tree / "a.bin").unlink()
    cli.lines("sync", tree, synced)
    assert "x/a.bin" in bucket.keys()


def test_sync_deletes_only_below_the_destination(cli, bucket, tree, synced):
    for key in ("xy/k", "k"):
        bucket.write(key, b"1")
    (tree / "a.bin").unlink()
    assert cli.lines("sync", "--delete", tree, synced)[-1] == f"delete {synced}/a.bin"
    assert bucket.keys() == ["k", "x/b.txt", "x/sub/c.bin", "xy/k"]


def test_sync_that_only_deletes_has_nothing_to_transfer(cli, bucket, tree, synced):
    (tree / "a.bin").unlink()
    dry = cli.run("sync", "--delete", "--dry-run", tree, synced)
    notes = ["nothing to transfer: 2 files unchanged", f"would delete 1 file below {synced}/"]
    assert (dry.stderr.splitlines(), dry.stdout) == (notes, f"would delete {synced}/a.bin\n")
    status, shown = cli.on_terminal("sync", "--delete", "--dry-run", tree, synced)
    assert (status, shown.splitlines()) == (0, [*notes, f"would delete {synced}/a.bin"])
    done = cli.run("sync", "--delete", tree, synced)
    assert done.stderr == f"deleting 1 file below {synced}/\n"
    assert done.stdout.splitlines() == ["nothing to transfer: 2 files unchanged", f"delete {synced}/a.bin"]
    assert cli.lines("sync", "--delete", tree, synced) == ["nothing to do: 2 files unchanged"]


def test_sync_deletes_local_files_and_follows_no_link(cli, bucket, tree, synced, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("1")
    (tree / "link").symlink_to(outside)
    (tree / "extra").write_text("1")
    bucket.remove("x/sub/c.bin")
    cli.lines("sync", "--delete", synced, tree)
    assert (outside / "precious").exists() and not (tree / "extra").exists() and not (tree / "sub/c.bin").exists()
    assert (tree / "a.bin").exists()


def test_sync_deletes_nothing_after_a_failure(cli, bucket, tree, synced, control):
    (tree / "a.bin").unlink()
    (tree / "b.txt").write_bytes(b"changed")
    control.faults({"operation": "PutObject", "action": {"status": 403, "code": "AccessDenied"}})
    done = cli.run("sync", "--delete", tree, synced)
    assert done.exit_code == 1 and "b.txt" in done.stderr and "x/a.bin" in bucket.keys()


def test_sync_deletes_in_a_whole_bucket_only_with_its_own_option(cli, bucket, other_bucket, tree, synced):
    other_bucket.write("kept", b"1")
    for source in (tree, synced):
        for url in (other_bucket.url, f"{other_bucket.url}/"):
            assert "is a whole bucket; --whole-bucket" in cli.error("sync", "--delete", source, url)
            cli.error("sync", "--delete", "--force", source, url)
    assert other_bucket.keys() == ["kept"]
    assert cli.lines("sync", "--delete", "--dry-run", tree, other_bucket.url)[-1].startswith("would delete")
    cli.lines("sync", tree, other_bucket.url)
    assert "kept" in other_bucket.keys()
    assert "is a whole bucket" in cli.error("sync", "--delete", other_bucket.url, tree)
    done = cli.run("sync", "--delete", "--whole-bucket", tree, other_bucket.url)
    assert done.stderr == f"deleting 1 file below {other_bucket.url}/\n"
    assert other_bucket.keys() == ["a.bin", "b.txt", "sub/c.bin"]


def test_mv_of_a_whole_bucket_needs_its_own_option(cli, bucket, other_bucket, tree, synced):
    keys = bucket.keys()
    for source in (bucket.url, f"{bucket.url}/**"):
        message = cli.error("mv", "-r", source, tree / "new")
        assert f"{source}: is a whole bucket; --whole-bucket moves all of its objects" in message
    for source, url in ((tree, other_bucket.url), (f"{synced}/*", f"{other_bucket.url}/")):
        message = cli.error("mv", "-r", source, url)
        assert f"{url}: is a whole bucket; --whole-bucket moves files into its root" in message
    assert (bucket.keys(), other_bucket.keys(), len(files_of(tree))) == (keys, [], 3)
    assert len(cli.lines("mv", "-r", "--dry-run", bucket.url, tree / "new")) == 3
    done = cli.run("mv", "-r", "--whole-bucket", bucket.url, tree / "new")
    assert done.stderr == "moving 3 files, 1.86 KiB; each is deleted when its copy was verified\n"
    assert bucket.keys() == [] and list(files_of(tree / "new")) == keys
    cli.lines("mv", tree / "a.bin", f"{other_bucket.url}/")
    cli.lines("mv", f"{tree}/*.txt", other_bucket.url)
    assert other_bucket.keys() == ["a.bin", "b.txt"]


def test_sync_of_an_empty_source_needs_force(cli, bucket, tree, synced, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "--force" in cli.error("sync", "--delete", tmp_path / "empty", synced)
    assert len(bucket.keys()) == 3
    cli.lines("sync", "--delete", "--force", tmp_path / "empty", synced)
    assert bucket.keys() == []


def test_a_dry_run_of_sync_changes_nothing(cli, bucket, tree, synced):
    (tree / "a.bin").unlink()
    (tree / "new").write_bytes(b"new")
    (tree / "b.txt").write_bytes(b"longer than before" * 100)
    assert cli.lines("sync", "--delete", "--dry-run", tree, synced) == [
        f"would copy {tree}/b.txt -> {synced}/b.txt",
        f"would copy {tree}/new -> {synced}/new",
        f"would delete {synced}/a.bin",
    ]
    assert bucket.keys() == ["x/a.bin", "x/b.txt", "x/sub/c.bin"] and bucket.body("x/b.txt") == b"b.txt" * 100
    assert cli.records("sync", "--delete", "--dry-run", tree, synced)[-1] == {
        "action": "would delete",
        "url": f"{synced}/a.bin",
    }


def test_a_dry_run_of_sync_shows_no_unchanged_files_and_counts_those_without_a_time(cli, bucket, tree, synced):
    assert cli.lines("sync", "--dry-run", tree, synced) == []
    assert cli.lines("sync", "--dry-run", synced, tree) == []
    (tree / "a.bin").write_bytes(b"A.bin" * 100)
    for key in ("x/b.txt", "x/sub/c.bin"):
        bucket.write(key, b"other" * (len(bucket.body(key)) // 5))
    (tree / "sub/c.bin").write_bytes(b"x" * len(bucket.body("x/sub/c.bin")))
    assert cli.lines("sync", "--dry-run", tree, synced) == [
        f"would compare {tree}/a.bin -> {synced}/a.bin",
        "would compare 2 files of equal size by checksums",
    ]
    assert cli.records("sync", "--dry-run", tree, synced)[-1] == {"action": "would compare", "files": 2}


def test_a_dry_run_of_sync_to_a_new_folder_shows_all_files(cli, bucket, synced, tmp_path):
    lines = cli.lines("sync", "--delete", "--dry-run", synced, tmp_path / "new")
    assert lines[0] == f"would copy {synced}/a.bin -> {tmp_path}/new/a.bin" and len(lines) == 3
    assert not (tmp_path / "new").exists()


def test_mv_moves_a_file_to_a_bucket_and_back(cli, bucket, tree, tmp_path):
    cli.lines("mv", tree / "a.bin", f"{bucket.url}/k")
    assert not (tree / "a.bin").exists() and bucket.body("k") == b"a.bin" * 100
    cli.lines("mv", f"{bucket.url}/k", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"a.bin" * 100 and bucket.keys() == []


def test_mv_moves_trees_and_globs(cli, bucket, other_bucket, tree, tmp_path):
    cli.lines("mv", "-r", tree, f"{bucket.url}/x/")
    assert files_of(tree) == {} and len(bucket.keys()) == 3
    cli.lines("mv", f"{bucket.url}/x/*.bin", f"{other_bucket.url}/y/")
    assert bucket.keys() == ["x/b.txt", "x/sub/c.bin"] and other_bucket.keys() == ["y/a.bin"]
    cli.lines("mv", "-r", f"{bucket.url}/x", tmp_path / "out")
    assert bucket.keys() == [] and list(files_of(tmp_path / "out")) == ["b.txt", "sub/c.bin"]


def test_mv_keeps_a_source_whose_transfer_failed(cli, bucket, tree, control):
    control.faults({"operation": "PutObject", "key": "b.txt", "action": {"status": 403, "code": "AccessDenied"}})
    done = cli.run("mv", "-r", tree, f"{bucket.url}/x/")
    assert done.exit_code == 1 and "b.txt" in done.stderr
    assert list(files_of(tree)) == ["b.txt"] and bucket.keys() == ["x/a.bin", "x/sub/c.bin"]


def test_mv_keeps_a_source_that_changed_meanwhile(cli, bucket, tree, afterwards):
    def change():
        (tree / "a.bin").write_bytes(b"A.bin" * 100)
        bucket.write("k", b"new")

    bucket.write("k", b"old")
    afterwards(change)
    assert "kept, because it changed" in cli.run("mv", f"{bucket.url}/k", tree / "k").stderr
    assert "kept, because it changed" in cli.run("mv", tree / "a.bin", f"{bucket.url}/a").stderr
    assert (tree / "a.bin").exists() and bucket.body("k") == b"new"


def test_a_dry_run_of_mv_moves_nothing(cli, bucket, tree):
    assert cli.lines("mv", "--dry-run", tree / "a.bin", f"{bucket.url}/k") == [
        f"would move {tree}/a.bin -> {bucket.url}/k"
    ]
    assert (tree / "a.bin").exists() and bucket.keys() == []


def test_mv_keeps_a_relative_source_whose_upload_failed_over_an_object_of_its_size(
    cli, bucket, tree, control, monkeypatch
):
    monkeypatch.chdir(tree)
    bucket.write("x/a.bin", b"z" * 500)
    control.faults({"operation": "PutObject", "key": "a.bin", "action": {"status": 403, "code": "AccessDenied"}})
    assert cli.run("mv", "a.bin", "b.txt", f"{bucket.url}/x/").exit_code == 1
    assert list(files_of(tree)) == ["a.bin", "sub/c.bin"]


def test_mv_keeps_objects_of_a_scheme_alias_whose_transfer_failed(cli, bucket, tree, control):
    bucket.write("x/a.bin", b"z" * 500)
    bucket.write("x/b.txt", b"z" * 500)
    control.faults({"operation": "GetObject", "key": "a.bin", "action": {"status": 403, "code": "AccessDenied"}})
    url = bucket.url.replace("gs://", "gcs://")
    assert cli.run("mv", f"{url}/x/a.bin", f"{url}/x/b.txt", tree).exit_code == 1
    assert bucket.keys() == ["x/a.bin"]


def test_mv_keeps_a_source_whose_copy_another_writer_replaced(cli, bucket, tree, afterwards):
    afterwards(lambda: bucket.write("k", b"z" * 500))
    assert "kept, because another writer" in cli.run("mv", tree / "a.bin", f"{bucket.url}/k").stderr
    assert (tree / "a.bin").exists()


@pytest.mark.providers("s3")
@pytest.mark.parametrize("stored", [None, b"A.bin" * 100, b"a"], ids=["nothing", "other bytes", "shorter"])
def test_mv_of_a_tree_keeps_a_file_that_the_server_did_not_store(cli, bucket, tree, control, stored):
    if stored is not None:
        bucket.write("x/a.bin", stored)
    etag = {"etag": '"0123456789abcdef0123456789abcdef"'}
    control.faults({"operation": "PutObject", "key": "a.bin", "action": {"status": 200, "headers": etag}})
    done = cli.run("mv", "-r", tree, f"{bucket.url}/x")
    assert done.exit_code == 1 and f"{tree}/a.bin: kept, because" in done.stderr
    assert list(files_of(tree)) == ["a.bin"] and len(bucket.keys()) == (2 if stored is None else 3)


@pytest.mark.parametrize("is_tree", [True, False])
def test_mv_keeps_a_file_that_was_replaced_while_it_was_read(cli, bucket, tree, monkeypatch, is_tree):
    """Also by one of the same size and time, and although the old one is there again when it would be deleted."""
    other, old = tree.parent / "other", tree.parent / "old"
    other.write_bytes(b"A.bin" * 100)
    state = (tree / "a.bin").stat()
    os.utime(other, ns=(state.st_mtime_ns, state.st_mtime_ns))
    run_all = transfer_run.run_all

    def replaced_meanwhile(*arguments):
        (tree / "a.bin").rename(old)
        other.rename(tree / "a.bin")
        outcome = run_all(*arguments)
        (tree / "a.bin").rename(other)
        old.rename(tree / "a.bin")
        return outcome

    monkeypatch.setattr(transfer_run, "run_all", replaced_meanwhile)
    source = ["-r", tree] if is_tree else [tree / "a.bin"]
    assert "a.bin: kept, because it changed" in cli.run("mv", *source, f"{bucket.url}/x/").stderr
    assert (tree / "a.bin").read_bytes() == b"a.bin" * 100 and bucket.body("x/a.bin") == b"A.bin" * 100


@pytest.mark.parametrize("is_tree", [True, False])
def test_mv_keeps_an_object_whose_file_another_program_replaced(cli, bucket, tree, synced, afterwards, is_tree):
    into = tree.parent / "out"

    def replace():
        (into / "new").write_bytes(b"z" * 500)
        (into / "new").rename(into / "a.bin")

    afterwards(replace)
    source = ["-r", synced] if is_tree else [f"{synced}/a.bin"]
    into.mkdir()
    message = f"{synced}/a.bin: kept, because {into}/a.bin is not the file that was written"
    assert message in cli.run("mv", *source, f"{into}/").stderr
    assert "x/a.bin" in bucket.keys() and len(bucket.keys()) == (1 if is_tree else 3)


@pytest.mark.parametrize("command", ["cp", "mv"])
def test_two_sources_of_one_name_are_refused(cli, bucket, tmp_path, command):
    for key in ("p/1/same", "p/2/same"):
        bucket.write(key, key.encode())
        (tmp_path / key).parent.mkdir(parents=True)
        (tmp_path / key).write_text(key)
    both = ("p/1/same", "p/2/same")
    message = cli.error(command, *(tmp_path / key for key in both), f"{bucket.url}/d/")
    assert f"{bucket.url}/d/same: two sources" in message
    assert "two sources" in cli.error(command, *(f"{bucket.url}/{key}" for key in both), tmp_path)
    assert bucket.keys() == list(both) and all((tmp_path / key).exists() for key in both)


@pytest.mark.parametrize("command", ["cp", "mv"])
def test_trees_and_globs_with_a_common_name_are_refused(cli, bucket, other_bucket, tmp_path, command):
    for key in ("p/1/same", "p/2/same", "p/2/more"):
        bucket.write(key, key.encode())
    trees = [f"{bucket.url}/p/1", f"{bucket.url}/p/2"]
    assert "m/same: two sources" in cli.error(command, "-r", *trees, f"{other_bucket.url}/m/")
    assert "out/same: two sources" in cli.error(command, f"{trees[0]}/*", f"{trees[1]}/s*", tmp_path / "out")
    assert len(bucket.keys()) == 3 and other_bucket.keys() == []


def test_mv_refuses_a_glob_that_is_a_key_too(cli, bucket, tmp_path):
    for key in ("img[1].jpg", "img1.jpg"):
        bucket.write(key, b"1")
    assert "--raw" in cli.error("mv", f"{bucket.url}/img[1].jpg", tmp_path / "out")
    cli.lines("mv", "--raw", f"{bucket.url}/img[1].jpg", tmp_path / "one")
    assert bucket.keys() == ["img1.jpg"] and (tmp_path / "one").exists()


def test_sync_deletes_no_temporary_files(cli, bucket, tree, synced):
    bucket.write("x/sub/.torchobj-1", b"1")
    (tree / "sub/.torchobj-2").write_text("1")
    cli.lines("sync", "--delete", tree, synced)
    assert "x/sub/.torchobj-1" in bucket.keys()
    bucket.remove("x/sub/.torchobj-1")
    cli.lines("sync", "--delete", synced, tree)
    assert (tree / "sub/.torchobj-2").exists()


def test_sync_from_bucket_to_bucket_deletes_no_temporary_files(cli, bucket, other_bucket, synced):
    other_bucket.write(".torchobj-1", b"1")
    cli.lines("sync", "--delete", "--whole-bucket", synced, other_bucket.url)
    assert ".torchobj-1" in other_bucket.keys()


def test_mv_keeps_a_tree_whose_listing_failed_and_moves_the_others(cli, bucket, tree, monkeypatch):
    other = tree.parent / "other"
    other.mkdir()
    (other / "d.bin").write_bytes(b"1" * 500)
    bucket.write("x/a.bin", b"z" * 500)
    upload = transfer_run.upload

    def fail_once(folder, *arguments, **options):
        if folder == tree:
            raise OSError(5, "cannot be listed", str(tree))
        return upload(folder, *arguments, **options)

    monkeypatch.setattr(transfer_run, "upload", fail_once)
    done = cli.run("mv", "-r", tree, other, f"{bucket.url}/x/")
    assert done.exit_code == 1 and "cannot be listed" in done.stderr
    assert len(files_of(tree)) == 3 and files_of(other) == {} and bucket.keys() == ["x/a.bin", "x/d.bin"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["mv", "-r", "{}/x/", "{}/y/"],
        ["rm", "-r", "--yes", "{}/x/"],
        pytest.param(["doctor", "{}/x/", "--write"], marks=pytest.mark.matrix),
    ],
    ids=lambda arguments: arguments[0],
)
def test_objects_are_moved_and_removed_with_a_clock_that_differs(cli, bucket, control, arguments):
    bucket.write("x/1", b"1")
    control.clock(1200)
    done = cli.process(*[argument.format(bucket.url) for argument in arguments])
    control.clock(0)
    assert done.returncode == 0, done.stderr
    assert bucket.keys() == {"mv": ["y/1"], "rm": [], "doctor": ["x/1"]}[arguments[0]]


def test_mv_moves_links_with_the_files_that_they_lead_to(cli, bucket, tree, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"kept")
    for name, target in {"0": "a.bin", "sub/1": "../0", "z": "sub/c.bin", "y": outside}.items():
        (tree / name).symlink_to(target)
    expected = files_of(tree)
    cli.lines("mv", "-r", tree, f"{bucket.url}/k")
    assert {key.removeprefix("k/"): bucket.body(key) for key in bucket.keys()} == expected
    assert not any(path.is_file() or path.is_symlink() for path in tree.rglob("*")) and outside.exists()


def test_mv_keeps_a_link_whose_copy_failed(cli, bucket, tree, control):
    (tree / "link").symlink_to("a.bin")
    control.faults({"operation": "PutObject", "key": "link$", "action": {"status": 403, "code": "AccessDenied"}})
    assert cli.run("mv", "-r", tree, f"{bucket.url}/k").exit_code == 1
    assert (tree / "link").is_symlink() and bucket.keys() == ["k/a.bin", "k/b.txt", "k/sub/c.bin"]


@pytest.mark.parametrize("is_tree", [False, True])
def test_mv_of_a_file_without_a_size_advises_cp(cli, bucket, is_tree):
    source = ["-r", "/proc/self/net/stat"] if is_tree else ["/proc/version"]
    done = cli.run("mv", *source, f"{bucket.url}/k")
    assert done.exit_code == 1
    assert "kept, because its size is not known" in done.stderr and "cannot be moved; use cp" in done.stderr
