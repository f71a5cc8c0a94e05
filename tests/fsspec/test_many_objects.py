"""Methods of the fsspec file system for many objects: what they read, write and report."""

import threading

import fsspec
import pytest
from fsspec.callbacks import Callback

import torchobj
import torchobj.files.transfers
from torchobj import exceptions
from torchobj.store import reads

BUCKET = "many"


@pytest.fixture
def filled(files):
    files.pipe({f"many/d/{number}": str(number).encode() * 3 for number in range(5)})
    files.pipe({"many/d/deep/x": b"xyz", "many/e": b""})
    return files


@pytest.fixture
def calls(monkeypatch):
    """The number of references in each call of get_many."""
    made, real = [], reads.get_many

    def counted(refs, **settings):
        made.append(len(refs))
        return real(refs, **settings)

    monkeypatch.setattr(reads, "get_many", counted)
    return made


def test_ranges_are_read_in_one_call_with_the_semantics_of_slices(files, calls):
    data = bytes(range(10))
    files.pipe("many/k", data)
    bounds = [None, 0, 1, 5, 10, 20, -1, -5, -10, -20]
    pairs = [(start, end) for start in bounds for end in bounds]
    starts, ends = (list(values) for values in zip(*pairs, strict=True))
    assert files.cat_ranges(["many/k"] * len(pairs), starts, ends) == [data[start:end] for start, end in pairs]
    assert len(calls) == 1
    assert files.cat_ranges(["many/k", "memory://many/k"], 2, [3, None], on_error="raise") == [data[2:3], data[2:]]


def test_failed_ranges_are_returned_or_raised(filled):
    paths = ["many/d/1", "many/no", "many/d/2"]
    first, error, second = filled.cat_ranges(paths, [0, 0, 1], 2)
    assert (first, second) == (b"11", b"2")
    assert isinstance(error, FileNotFoundError)
    [error] = filled.cat_ranges(["many/no"], -5, -2)
    assert isinstance(error, FileNotFoundError)
    for end in (2, -1):
        with pytest.raises(exceptions.ObjectNotFoundError, match="many/no"):
            filled.cat_ranges(paths, 0, end, on_error="raise")
    assert filled.cat_ranges([], [], []) == []
    with pytest.raises(exceptions.ConfigError, match="starts has 1 values for 3 paths"):
        filled.cat_ranges(paths, [0], 2)
    with pytest.raises(exceptions.ConfigError, match="on_error='omit'"):
        filled.cat_ranges(paths, 0, 2, on_error="omit")
    with pytest.raises(NotImplementedError):
        filled.cat_ranges(paths, 0, 2, max_gap=1)


def test_cat_reads_globs_lists_and_trees_in_one_call(filled, calls):
    files = {f"many/d/{number}": str(number).encode() * 3 for number in range(5)}
    assert filled.cat("many/d/1") == b"111"
    assert filled.cat(["many/d/1"]) == {"many/d/1": b"111"}
    assert filled.cat("many/d/*") == files
    assert filled.cat("many/d", recursive=True) == files | {"many/d/deep/x": b"xyz"}
    assert filled.cat(["memory://many/d/3", "many/e"], start=1) == {"many/d/3": b"33", "many/e": b""}
    # A range after the end of an object is read again with the others.
    assert calls == [1, 1, 5, 6, 2, 2]


def test_cat_raises_omits_or_returns_errors(filled):
    paths = ["many/d/1", "many/no"]
    with pytest.raises(FileNotFoundError):
        filled.cat(paths)
    assert filled.cat(paths, on_error="omit") == {"many/d/1": b"111"}
    assert isinstance(filled.cat(paths, on_error="return")["many/no"], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        filled.cat("many/none*")
    with pytest.raises(exceptions.ConfigError, match="on_error='ignore'"):
        filled.cat(paths, on_error="ignore")


def test_pipe_writes_concurrently(files, monkeypatch):
    together, put = threading.Barrier(4), torchobj.Store.put

    def waiting(*arguments, **settings):
        together.wait(timeout=150)
        return put(*arguments, **settings)

    monkeypatch.setattr(torchobj.Store, "put", waiting)
    files.pipe({f"many/{name}": name.encode() for name in "abcd"})
    assert files.cat("many/*") == {f"many/{name}": name.encode() for name in "abcd"}


def test_pipe_raises_the_first_error(files):
    files.pipe("many/b", b"old")
    with pytest.raises(FileExistsError):
        files.pipe({"many/a": b"1", "many/b": b"2"}, mode="create")
    assert files.cat("many/b") == b"old"
    with pytest.raises(exceptions.ConfigError, match="path as <class 'list'>"):
        files.pipe(["many/a"], b"")


def test_find_with_folders_is_one_listing(filled, monkeypatch):
    filled.pipe({"many/d/deep/er/y": b"", "many/d//unnamed": b""})
    torchobj.Store("memory://many").put("marked/", b"")
    filled.makedirs("many/made", exist_ok=True)
    listings, listed = [], torchobj.Store.list
    monkeypatch.setattr(torchobj.Store, "list", lambda *given: listings.append(given) or listed(*given))
    found = filled.find("many", withdirs=True, detail=True)
    folders = {name for name, entry in found.items() if entry["type"] == "directory"}
    assert folders == {"many", "many/d", "many/d/deep", "many/d/deep/er", "many/made", "many/marked"}
    assert set(found) - folders == {
        *(f"many/d/{number}" for number in range(5)),
        "many/d/deep/x",
        "many/d/deep/er/y",
        "many/d//unnamed",
        "many/e",
    }
    assert len(listings) == 1


def test_find_to_a_depth_lists_each_folder_once(filled, monkeypatch):
    filled.pipe("many/d/deep/er/y", b"")
    listings, listed = [], torchobj.Store.list
    monkeypatch.setattr(torchobj.Store, "list", lambda *given: listings.append(given[1:]) or listed(*given))
    assert filled.find("many", maxdepth=1) == ["many/e"]
    assert filled.find("many", maxdepth=3, withdirs=True) == [
        "many", "many/d", *(f"many/d/{number}" for number in range(5)), "many/d/deep", "many/d/deep/er", "many/d/deep/x",
        "many/e",
    ]  # fmt: skip
    assert listings == [("", "/"), ("", "/"), ("d/", "/"), ("d/deep/", "/")]
    assert filled.find("many/e", maxdepth=1) == ["many/e"]
    assert filled.find("many/no", maxdepth=1) == []


def test_the_size_of_a_folder_takes_one_listing(filled, monkeypatch):
    monkeypatch.setattr(torchobj.Store, "head", None)
    assert filled.du("many") == 18
    assert filled.du("many/d", total=False)["many/d/deep/x"] == 3


class Branches(Callback):
    """Counts files, and the bytes of each."""

    def __init__(self):
        super().__init__()
        self.children = {}

    def branched(self, path_1, path_2, **_):
        child = self.children[path_1] = Callback()
        return child


def test_a_tree_is_downloaded_and_uploaded_with_callbacks(filled, tmp_path):
    told = Branches()
    filled.get("many/d", str(tmp_path / "down"), recursive=True, callback=told)
    # The folders are counted, as by fsspec.
    assert (told.size, told.value) == (8, 8)
    assert told.children["many/d/1"].value == told.children["many/d/1"].size == 3
    assert (tmp_path / "down/deep/x").read_bytes() == b"xyz"
    told = Branches()
    filled.put(f"{tmp_path}/down/", "many/up/", recursive=True, callback=told)
    assert told.value == told.size
    assert filled.cat("many/up", recursive=True) == {
        name.replace("/d/", "/up/", 1): content for name, content in filled.cat("many/d", recursive=True).items()
    }


def test_transfers_run_concurrently(filled, tmp_path, monkeypatch):
    together = threading.Barrier(5)
    for name, real in (
        ("download_file", torchobj.files.transfers.download_file),
        ("upload_file", torchobj.files.transfers.upload_file),
    ):

        def waiting(*arguments, real=real, **settings):
            together.wait(timeout=150)
            return real(*arguments, **settings)

        monkeypatch.setattr(torchobj.files.transfers, name, waiting)
    filled.get("many/d/*", f"{tmp_path}/down/")
    assert len(list((tmp_path / "down").iterdir())) == 5
    filled.put(f"{tmp_path}/down/*", "many/up/")
    assert len(filled.find("many/up")) == 5


@pytest.mark.parametrize("key", ["../escaped", "a/../../escaped"])
def test_a_key_is_not_written_outside_of_the_target(files, tmp_path, key):
    torchobj.Store("memory://many").put(f"t/{key}", b"x")
    (tmp_path / "target").mkdir()
    with pytest.raises((ValueError, exceptions.InvalidKeyError)):
        files.get("many/t", f"{tmp_path}/target/", recursive=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["target"]


def test_a_download_of_a_folder_skips_keys_of_temporary_files_with_a_warning(filled, tmp_path, caplog):
    filled.pipe_file("many/d/.torchobj-doctor-1", b"1")
    filled.get("many/d/", str(tmp_path / "out"), recursive=True)
    assert "many/d/.torchobj-doctor-1 has the name of a temporary file: skipped" in caplog.text
    assert not any(path.name.startswith(".torchobj-") for path in (tmp_path / "out").rglob("*"))


def test_a_link_in_the_target_is_not_followed_out_of_it(filled, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "target/deep").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(exceptions.InvalidKeyError, match="outside of"):
        filled.get("many/d/", f"{tmp_path}/target", recursive=True)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_failed_download_leaves_the_old_file(filled, tmp_path):
    target = tmp_path / "k"
    target.write_bytes(b"old")
    with pytest.raises(FileNotFoundError):
        filled.get("many/no", str(target))
    assert [path.name for path in tmp_path.iterdir()] == ["k"]
    assert target.read_bytes() == b"old"
    filled.get("many/d", str(tmp_path / "none"))
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


def test_uploads_are_part_of_a_transaction(filled, tmp_path):
    (tmp_path / "k").write_bytes(b"new")
    with pytest.raises(ZeroDivisionError), filled.transaction:
        filled.put(str(tmp_path / "k"), "many/d/1")
        _ = 1 / 0
    assert filled.cat("many/d/1") == b"111"
    with filled.transaction:
        filled.put(str(tmp_path / "k"), "many/d/1")
        assert filled.cat("many/d/1") == b"111"
    assert filled.cat("many/d/1") == b"new"


def test_uploads_can_refuse_to_replace_objects(filled, tmp_path):
    (tmp_path / "k").write_bytes(b"new")
    with pytest.raises(FileExistsError):
        filled.put(str(tmp_path / "k"), "many/d/1", mode="create")
    assert filled.cat("many/d/1") == b"111"


#: Arguments by the names of s3fs, or of gcsfs, and the attributes that they set.
NAMES = [
    (
        {
            "ContentType": "text/csv",
            "ContentEncoding": "gzip",
            "ContentDisposition": "inline",
            "ContentLanguage": "de",
            "CacheControl": "no-store",
            "Metadata": {"a": "b"},
            "acl": "private",
            "chunksize": 5 << 20,
            "max_concurrency": 2,
        },
        {
            "content_type": "text/csv",
            "content_encoding": "gzip",
            "content_disposition": "inline",
            "content_language": "de",
            "cache_control": "no-store",
            "metadata": {"a": "b"},
        },
    ),
    (
        {"content_type": "text/csv", "metadata": {"a": "b"}, "fixed_key_metadata": {"content_encoding": "gzip"}},
        {"content_type": "text/csv", "metadata": {"a": "b"}, "content_encoding": "gzip"},
    ),
]


def written_by(files, tmp_path):
    """Each way to write an object."""

    def opened(path, **given):
        with files.open(path, "wb", **given) as file:
            file.write(b"x")

    def opened_as_text(path, **given):
        with files.open(path, "w", **given) as file:
            file.write("x")

    (tmp_path / "file").write_bytes(b"x")
    yield opened
    yield opened_as_text
    yield lambda path, **given: files.pipe_file(path, b"x", **given)
    yield lambda path, **given: files.pipe({path: b"x"}, **given)
    yield lambda path, **given: files.put_file(tmp_path / "file", path, **given)
    yield lambda path, **given: files.put(str(tmp_path / "file"), path, **given)


@pytest.mark.parametrize(("given", "expected"), NAMES, ids=["s3fs", "gcsfs"])
@pytest.mark.providers("s3", "gs")
def test_attributes_are_set_by_the_names_of_other_file_systems(bucket, tmp_path, given, expected):
    store = torchobj.Store(bucket.url, config=bucket.config)
    for write in written_by(bucket.files, tmp_path):
        write(f"{bucket.url}/k", **given)
        info = store.head("k")
        found = {name: getattr(info, name) for name in expected}
        found["metadata"] = {name: value for name, value in info.metadata.items() if name != "mtime"}
        assert found == expected
        store.delete("k")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"acl": "public-read"}, "acl: torchobj sets no ACLs"),
        ({"ACL": "bucket-owner-full-control"}, "ACL: torchobj sets no ACLs"),
        ({"ServerSideEncryption": "aws:kms"}, r"S3Options\(encryption="),
        ({"SSEKMSKeyId": "key"}, r"S3Options\(kms_key_id="),
        ({"requester_pays": True}, "requester_pays=True"),
        ({"ContentType": "a", "content_type": "b"}, "pass only content_type"),
        ({"Tagging": "a=b"}, "Tagging: no such argument; those of a write are content_type, "),
    ],
)
def test_arguments_without_a_counterpart_are_refused_by_name(filled, tmp_path, given, message):
    for write in written_by(filled, tmp_path):
        with pytest.raises(exceptions.ConfigError, match=message):
            write("many/new", **given)
    assert not filled.exists("many/new")


@pytest.mark.parametrize("given", [{"ContentType": "a/b"}, {"metadata": {"a": "b"}}, {"ACL": "public-read"}])
def test_attributes_of_a_copy_are_refused(filled, given):
    for copy in (filled.cp_file, filled.copy, filled.mv):
        with pytest.raises(exceptions.ConfigError, match="attributes of its source|sets no ACLs"):
            copy("many/e", "many/new", **given)
    assert not filled.exists("many/new")
    filled.cp_file("many/e", "many/new", preserve_etag=True, acl="private")
    assert filled.exists("many/new")


@pytest.mark.parametrize("name", ["version_id", "generation"])
def test_a_version_that_cannot_be_read_is_refused(filled, tmp_path, name):
    for read in (
        filled.open,
        filled.cat_file,
        filled.cat,
        filled.info,
        lambda path, **given: filled.open(path, "r", **given),
        lambda path, **given: filled.cat_ranges([path], 0, 1, **given),
        lambda path, **given: filled.get_file(path, tmp_path / "k", **given),
    ):
        with pytest.raises(exceptions.ConfigError, match=f"{name}='1': file systems of torchobj read the current"):
            read("many/e", **{name: "1"})
        read("many/e", **{name: None})


# fsspec does not close the file in which `blockcache` keeps blocks.
@pytest.mark.filterwarnings("ignore:.*FileIO name=:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("caching", ["blockcache", "filecache", "simplecache"])
def test_caching_file_systems_read_and_write_through(filled, tmp_path, monkeypatch, caching):
    data = bytes(range(256)) * 100
    filled.pipe("many/k", data)
    read, ranges = [], type(filled).cat_ranges
    monkeypatch.setattr(
        type(filled), "cat_ranges", lambda *given, **named: read.append(given) or ranges(*given, **named)
    )
    for repeated in range(2):
        files = fsspec.filesystem(caching, fs=filled, cache_storage=str(tmp_path), skip_instance_cache=True)
        with files.open("many/k", "rb", block_size=1000) as file:
            assert (file.seek(5000), file.read(10)) == (5000, data[5000:5010])
            if caching == "blockcache" and not repeated:
                assert (file.blocksize, file.fs, file.path, file.size) == (1000, filled, "many/k", len(data))
                assert file.details["name"] == "many/k"
            assert (file.seek(0), file.read()) == (0, data)
        assert files.cat_file("many/k") == data
        count = len(read)
        with files.open("many/k", "r", encoding="latin-1", newline="", block_size=1000) as file:
            assert file.read() == data.decode("latin-1")
        assert len(read) == count
        with files.open("many/new", "wb") as file:
            file.write(b"written")
        assert filled.cat_file("many/new") == b"written"
        with pytest.raises(FileNotFoundError):
            files.open("many/never was", "rb").read()
