"""Trees: every file once, failures by name while the rest goes on, and nothing outside of the target folder."""

import errno
import hashlib
import os
import threading

import pytest

import torchobj
from torchobj import exceptions, files

pytestmark = pytest.mark.providers("s3", "gs")


@pytest.fixture
def store(bucket):
    return torchobj.Store(bucket.url, config=bucket.config)


@pytest.fixture
def source(tmp_path):
    """A folder with files in several folders, one of them large."""
    contents = {f"a/{number}.txt": str(number).encode() * number for number in range(40)}
    contents |= {"b/c/d/deep.bin": os.urandom(17 << 20), "empty": b"", "name with spaces & é.txt": b"x"}
    for name, data in contents.items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes(data)
    return tmp_path / "source", contents


def tree_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names_of(error):
    return sorted(name for name, _ in error.value.failures)


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_tree_is_uploaded_and_downloaded_unchanged(bucket, store, source, tmp_path, slash):
    folder, contents = source
    store.put("prefixed/not below it", b"x")
    size = sum(map(len, contents.values()))
    done = files.upload(folder, f"{bucket.url}/prefix{slash}", config=bucket.config)
    assert done == files.TreeTransfer(transferred=len(contents), skipped=0, bytes=size)
    assert sorted(bucket.keys()) == sorted([*(f"prefix/{name}" for name in contents), "prefixed/not below it"])
    done = files.download(f"{bucket.url}/prefix{slash}", tmp_path / "new" / "back", config=bucket.config)
    assert done == files.TreeTransfer(transferred=len(contents), skipped=0, bytes=size)
    assert tree_of(tmp_path / "new" / "back") == contents


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_tree_goes_to_other_stores_and_back(source, tmp_path, scheme):
    folder, contents = source
    url = f"memory://{tmp_path.name}/p" if scheme == "memory" else f"file://{tmp_path}/store/p"
    files.upload(folder, url)
    assert files.upload(folder, url, skip_unchanged=True).skipped == len(contents)
    files.download(url, tmp_path / "back")
    assert tree_of(tmp_path / "back") == contents
    assert files.download(url, tmp_path / "back", skip_unchanged=True).skipped == len(contents)


def test_only_what_has_changed_is_transferred_again(bucket, source, tmp_path):
    folder, contents = source
    arguments = {"config": bucket.config, "skip_unchanged": True}
    url = f"{bucket.url}/p"
    assert files.upload(folder, url, **arguments).skipped == 0
    assert files.upload(folder, url, **arguments).skipped == len(contents)
    (folder / "a" / "3.txt").write_bytes(b"new")
    assert files.upload(folder, url, **arguments) == files.TreeTransfer(1, len(contents) - 1, 3)
    assert files.download(url, tmp_path / "back", **arguments).transferred == len(contents)
    assert files.download(url, tmp_path / "back", **arguments).skipped == len(contents)
    (tmp_path / "back" / "a" / "5.txt").write_bytes(b"44444")
    assert files.download(url, tmp_path / "back", **arguments) == files.TreeTransfer(1, len(contents) - 1, 5)


def test_a_glob_selects_files_by_their_relative_paths(bucket, source, tmp_path):
    folder, _ = source
    url = f"{bucket.url}/p"
    assert files.upload(folder, url, config=bucket.config, glob="a/1*.txt").transferred == 11
    assert files.download(url, tmp_path / "back", config=bucket.config, glob="**/*5.txt").transferred == 1
    assert os.listdir(tmp_path / "back" / "a") == ["15.txt"]
    with pytest.raises(exceptions.ConfigError, match="glob"):
        files.upload(folder, url, config=bucket.config, glob="a[")


def test_attributes_apply_to_each_object_and_existing_ones_can_be_kept(bucket, store, source):
    folder, contents = source
    store.put("empty", b"mine")
    with pytest.raises(exceptions.TransferError, match="1 of 43 files were not transferred: 'empty'") as error:
        files.upload(folder, bucket.url, config=bucket.config, overwrite=False, metadata={"run": "7"})
    assert isinstance(error.value.failures[0][1], exceptions.PreconditionFailedError)
    assert error.value.result.transferred == len(contents) - 1
    assert bytes(store.get("empty")) == b"mine"
    assert store.head("a/1.txt").metadata["run"] == "7"


def test_progress_of_a_tree_has_its_totals_at_the_end(bucket, source, tmp_path):
    folder, contents = source
    size = sum(map(len, contents.values()))
    seen = []

    def progress(now):
        assert threading.current_thread() is threading.main_thread()
        seen.append(now)

    files.upload(folder, bucket.url, config=bucket.config, progress=progress)
    assert seen[-1] == files.Progress(len(contents), len(contents), size, size, 0)
    files.download(bucket.url, tmp_path / "back", config=bucket.config, progress=progress)
    assert seen[-1] == files.Progress(len(contents), len(contents), size, size, 0)
    files.download(bucket.url, tmp_path / "back", config=bucket.config, skip_unchanged=True, progress=progress)
    assert seen[-1] == files.Progress(len(contents), len(contents), size, size, len(contents))


def test_keys_that_cannot_be_paths_are_refused_by_name_and_the_rest_is_downloaded(tmp_path):
    store = torchobj.Store(f"memory://{tmp_path.name}")
    bad = ["../up", "a/../../up", "//root", "a//b", "./x", "x\0y", "n" * 256, "folder/", "dir/.."]
    # Skipped with a warning. The second one is where the download of `good` is until it is complete.
    temporary = ["t/.torchobj-x/a", f".torchobj-{hashlib.sha256(b'good').hexdigest()[:24]}.part"]
    for key in [*bad, *temporary, "good", "folder2/good"]:
        store.put(f"p/{key}", b"x")
    store.put("p/marker/", b"")
    with pytest.raises(exceptions.TransferError) as error:
        files.download(f"{store.url}/p", tmp_path / "back")
    assert names_of(error) == sorted(bad)
    assert all(isinstance(problem, exceptions.InvalidKeyError) for _, problem in error.value.failures)
    assert sorted(tree_of(tmp_path / "back")) == ["folder2/good", "good"]
    assert os.listdir(tmp_path) == ["back"]


def test_of_a_file_and_a_folder_with_one_name_one_is_refused(tmp_path):
    store = torchobj.Store(f"memory://{tmp_path.name}")
    store.put("p/a", b"file")
    store.put("p/a/b", b"below")
    with pytest.raises(exceptions.TransferError) as error:
        files.download(f"{store.url}/p", tmp_path / "back")
    assert names_of(error) in (["a"], ["a/b"])
    assert isinstance(error.value.failures[0][1], exceptions.InvalidKeyError)


def test_symbolic_links_below_the_target_are_not_followed(tmp_path):
    store = torchobj.Store(f"memory://{tmp_path.name}")
    store.put("link/k", b"x")
    store.put("file", b"x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "link").symlink_to(outside)
    (tmp_path / "back" / "file").symlink_to(outside / "file")
    with pytest.raises(exceptions.TransferError, match="symbolic link") as error:
        files.download(store.url, tmp_path / "back")
    assert names_of(error) == ["link/k"]
    assert os.listdir(outside) == []
    assert not (tmp_path / "back" / "file").is_symlink()


def test_devices_and_pipes_are_not_replaced(tmp_path):
    store = torchobj.Store(f"memory://{tmp_path.name}")
    for key in ("pipe", "link", "good"):
        store.put(key, b"x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    with pytest.raises(exceptions.TransferError, match="device, pipe or socket") as error:
        files.download(store.url, tmp_path)
    assert names_of(error) == ["link", "pipe"]
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "good").read_bytes() == b"x"


def test_a_missing_bucket_is_one_error(bucket, tmp_path):
    for number in range(20):
        (tmp_path / str(number)).write_bytes(b"x")
    url = bucket.url.replace(bucket.name, "no-such-bucket")
    with pytest.raises(exceptions.BucketNotFoundError):
        files.upload(tmp_path, url, config=bucket.config)


def test_the_permissions_of_a_file_that_is_replaced_are_kept(tmp_path):
    store = torchobj.Store(f"memory://{tmp_path.name}")
    store.put("k", b"new")
    path = tmp_path / "k"
    path.write_bytes(b"old")
    path.chmod(0o640)
    files.download_file(f"{store.url}/k", path)
    assert (path.read_bytes(), path.stat().st_mode & 0o7777) == (b"new", 0o640)


def test_the_target_folder_itself_may_be_a_symbolic_link(tmp_path):
    store = torchobj.Store(f"memory://{tmp_path.name}")
    store.put("k", b"x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    files.download(store.url, tmp_path / "link")
    assert os.listdir(tmp_path / "real") == ["k"]


def test_a_target_that_is_a_file_and_a_source_that_is_none_are_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    url = f"memory://{tmp_path.name}"
    with pytest.raises(NotADirectoryError):
        files.download(url, tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        files.upload(tmp_path / "file", url)
    with pytest.raises(FileNotFoundError):
        files.upload(tmp_path / "missing", url)
    with pytest.raises(FileNotFoundError):
        files.upload_file(tmp_path / "missing", f"{url}/k")
    with pytest.raises(IsADirectoryError):
        files.download_file(f"{url}/k", tmp_path)
    with pytest.raises(exceptions.InvalidKeyError, match="regular file"):
        files.upload_file(tmp_path, f"{url}/k")


def test_links_in_a_source_are_followed_and_loops_and_special_files_are_skipped(tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_bytes(b"x")
    (source / "sub" / "up").symlink_to(source)
    (source / "folder").symlink_to(tmp_path / "elsewhere")
    (source / "file").symlink_to(tmp_path / "elsewhere" / "x")
    (source / "dangling").symlink_to("nowhere")
    (source / ".torchobj-left.part").write_bytes(b"temporary")
    os.mkfifo(source / "pipe")
    with pytest.raises(exceptions.TransferError) as error:
        files.upload(source, f"memory://{tmp_path.name}/p")
    assert names_of(error) == ["dangling"]
    keys = [info.key for info in torchobj.Store(f"memory://{tmp_path.name}").list()]
    assert keys == ["p/file", "p/folder/x"]


def test_names_that_are_not_utf8_are_refused_by_name(tmp_path):
    (tmp_path / "source").mkdir()
    with open(os.fsencode(tmp_path / "source") + b"/\xff", "wb"):
        pass
    (tmp_path / "source" / "good").write_bytes(b"")
    with pytest.raises(exceptions.TransferError, match="not UTF-8") as error:
        files.upload(tmp_path / "source", f"memory://{tmp_path.name}")
    assert error.value.result.transferred == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_refused_by_name(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "secret").touch(0o000)
    with pytest.raises(exceptions.TransferError, match="secret"):
        files.upload(tmp_path / "source", f"memory://{tmp_path.name}")


def test_a_failed_object_does_not_stop_the_others(bucket, control, store, tmp_path):
    for number in range(30):
        store.put(f"p/{number}", b"x")
    control.faults({"operation": "GetObject", "key": "p/7$", "action": {"status": 403}})
    with pytest.raises(exceptions.TransferError, match="p/7") as error:
        files.download(f"{bucket.url}/p", tmp_path / "back", config=bucket.config)
    assert names_of(error) == ["7"]
    assert error.value.result == files.TreeTransfer(29, 0, 29)
    assert len(os.listdir(tmp_path / "back")) == 29


def test_an_empty_prefix_and_an_empty_folder_have_no_files(bucket, tmp_path):
    nothing = files.TreeTransfer(0, 0, 0)
    (tmp_path / "empty").mkdir()
    assert files.upload(tmp_path / "empty", bucket.url, config=bucket.config) == nothing
    assert files.download(f"{bucket.url}/none", tmp_path / "back", config=bucket.config) == nothing


@pytest.fixture
def unreadable(tmp_path):
    """A folder with a file, and with entries that cannot be read, in a folder and beside it."""
    source = tmp_path / "source"
    (source / "cache" / "deep").mkdir(parents=True)
    (source / "a.txt").write_bytes(b"1")
    (source / "old.bin").symlink_to("nowhere")
    (source / "cache" / "x.txt").symlink_to("nowhere")
    (source / "cache" / "loop").symlink_to("loop")
    (source / "cache" / "long").symlink_to("n" * 300)
    (source / "cache" / "below").symlink_to("../a.txt/x")
    with open(os.fsencode(source / "cache" / "deep") + b"/\xff", "wb"):
        pass
    return source


CACHED = ["cache/below", "cache/deep/\ufffd", "cache/long", "cache/loop", "cache/x.txt"]


@pytest.mark.parametrize(
    ("selected", "failed"),
    [
        ({"patterns": [("exclude", "cache/*"), ("exclude", "*.bin")]}, []),
        ({"patterns": [("exclude", "*"), ("include", "a.*")]}, []),
        ({"patterns": [("exclude", "*"), ("include", "*.txt")]}, ["cache/x.txt"]),
        ({"patterns": [("exclude", "cache/*"), ("include", "cache/l*"), ("exclude", "*.bin")]}, CACHED[2:4]),
        ({"patterns": [("exclude", "cache/deep*")]}, [*CACHED[:1], *CACHED[2:], "old.bin"]),
        ({"patterns": [("exclude", "cache/*")]}, ["old.bin"]),
        ({"glob": "*.txt"}, []),
        ({"glob": "**/*.txt"}, ["cache/x.txt"]),
        ({"glob": "*/l*"}, CACHED[2:4]),
        ({}, [*CACHED, "old.bin"]),
    ],
)
def test_what_is_not_selected_is_no_failure_if_it_cannot_be_read(unreadable, selected, failed):
    url = f"memory://{unreadable.parent.name}"
    if failed:
        with pytest.raises(exceptions.TransferError) as error:
            files.upload(unreadable, url, **selected)
        assert names_of(error) == failed
    else:
        assert files.upload(unreadable, url, **selected).transferred == 1
    expected = [] if selected.get("glob") == "*/l*" else ["a.txt"]
    assert [info.key for info in torchobj.Store(url).list()] == expected


def test_nothing_is_logged_of_what_is_not_selected(tmp_path, caplog):
    source = tmp_path / "source"
    (source / "cache").mkdir(parents=True)
    (source / "a").write_bytes(b"1")
    (source / "cache" / "up").symlink_to(source)
    os.mkfifo(source / "cache" / "pipe")
    files.upload(source, f"memory://{tmp_path.name}", patterns=[("exclude", "cache/*")])
    assert not caplog.records


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
@pytest.mark.parametrize(
    ("patterns", "fails"),
    [
        ([("exclude", "secret/*")], False),
        ([("exclude", "*"), ("include", "a")], False),
        ([("exclude", "*.txt")], True),
        ([("exclude", "secret/*"), ("include", "*.txt")], True),
    ],
)
def test_a_folder_that_cannot_be_read_is_a_failure_if_a_file_in_it_may_be_selected(tmp_path, patterns, fails):
    source = tmp_path / "source"
    (source / "secret").mkdir(parents=True, mode=0o000)
    (source / "a").write_bytes(b"1")
    if not fails:
        files.upload(source, f"memory://{tmp_path.name}", patterns=patterns)
        return
    with pytest.raises(exceptions.TransferError, match="list file://.*/secret: permission denied"):
        files.upload(source, f"memory://{tmp_path.name}", patterns=patterns)


def test_errors_of_local_files_have_the_operation_on_the_file_and_its_errno(tmp_path):
    url, source = f"memory://{tmp_path.name}", tmp_path / "source"
    source.mkdir()
    (source / "broken").symlink_to("nowhere")
    with pytest.raises(exceptions.TransferError) as error:
        files.upload(source, url)
    [(_, failure)] = error.value.failures
    assert str(failure).startswith(f"get file://{source}/broken: ")
    assert (failure.operation, failure.errno, error.value.errno) == ("get", errno.ENOENT, errno.ENOENT)
    torchobj.Store(url).put("p/sub/k", b"1")
    target = tmp_path / "target"
    target.mkdir()
    (target / "sub").touch()
    with pytest.raises(exceptions.TransferError) as error:
        files.download(f"{url}/p", target)
    [(_, failure)] = error.value.failures
    assert str(failure).startswith(f"put file://{target}/sub/k: ") and failure.errno == errno.ENOTDIR
