"""The fsspec file system: fsspec's own conformance suite, and cases that the suite does not cover."""

import concurrent.futures
import pickle

import fsspec
import pytest
from fsspec.config import conf
from fsspec.implementations.local import make_path_posix
from fsspec.tests import abstract

import torchobj
import torchobj.fsspec
from tests.support.file_systems import InMemory
from torchobj import exceptions
from torchobj.fsspec import GCSFileSystem, ObjectFileSystem, file_system, instances, register

BUCKET = "files"


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self):
        return InMemory()

    @pytest.fixture
    def fs_path(self):
        return "conformance/folder"

    @pytest.fixture
    def fs_join(self):
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def local_path(self, tmp_path):
        return make_path_posix(str(tmp_path))


class TestCopying(Fixtures, abstract.AbstractCopyTests):
    pass


class TestGetting(Fixtures, abstract.AbstractGetTests):
    pass


class TestPutting(Fixtures, abstract.AbstractPutTests):
    pass


class TestPiping(Fixtures, abstract.AbstractPipeTests):
    pass


class TestOpening(Fixtures, abstract.AbstractOpenTests):
    pass


# Cases that the suite does not cover


def body(key):
    return bytes(torchobj.Store("memory://files").get(key))


def test_listings_distinguish_objects_from_folders_and_omit_markers(files):
    for name in ("a", "a/b", "a/c/d", "folder/", "ab", "a//unnamed"):
        torchobj.Store("memory://files").put(name, b"12")
    assert [(entry["name"], entry["type"]) for entry in files.ls("memory://files/")] == [
        ("files/a", "file"),
        ("files/a", "directory"),
        ("files/ab", "file"),
        ("files/folder", "directory"),
    ]
    assert files.ls("files/a", detail=False) == ["files/a/b", "files/a/c"]
    assert files.ls("files/folder") == []
    assert files.ls("files/ab", detail=False) == ["files/ab"]
    assert sorted(files.find("files")) == ["files/a", "files/a//unnamed", "files/a/b", "files/a/c/d", "files/ab"]
    info = files.info("files/ab")
    assert (info["size"], info["ETag"]) == (2, torchobj.Store("memory://files").head("ab").version)
    assert files.modified("files/ab") == torchobj.Store("memory://files").head("ab").last_modified
    with pytest.raises(FileNotFoundError):
        files.ls("files/b")
    assert (files.isdir(""), files.isfile(""), files.isfile("files")) == (True, False, False)
    with pytest.raises(exceptions.UnsupportedError):
        files.ls("")


#: Keys with empty components, and others beside them.
UNNAMED = ["d//dd", "d///ddd", "d//e/f", "d/e//g", "d/k", "/root", "d2//x"]


@pytest.fixture
def unnamed(files):
    files.pipe({f"files/{key}": key.encode() for key in UNNAMED})
    return files


def paths_in(folder):
    return sorted(f"files/{key}" for key in UNNAMED if key.startswith(folder))


def test_keys_with_empty_components_are_found_read_and_counted(unnamed):
    for folder in ("", "d/", "d/e/"):
        path = f"files/{folder}"
        assert unnamed.find(path) == unnamed.find(path, maxdepth=9) == paths_in(folder)
        assert unnamed.du(path) == sum(len(name.removeprefix("files/")) for name in paths_in(folder))
        found = unnamed.cat(path, recursive=True)
        assert found == {name: name.removeprefix("files/").encode() for name in paths_in(folder)}
        assert [name for name in unnamed.glob(f"files/{folder}**") if unnamed.isfile(name)] == paths_in(folder)
    assert unnamed.find("files/d", maxdepth=1) == ["files/d/k"]
    assert unnamed.find("files/d", maxdepth=2) == ["files/d//dd", "files/d/k"]
    folders = {"files/d", "files/d//e", "files/d/e"}
    assert set(unnamed.find("files/d", withdirs=True)) - set(paths_in("d/")) == folders
    assert set(unnamed.find("files/d", maxdepth=9, withdirs=True)) - set(paths_in("d/")) == folders
    assert [unnamed.info(name)["size"] for name in paths_in("")] == [len(name) - len("files/") for name in paths_in("")]


def test_a_level_has_no_folders_without_a_name_and_says_so(unnamed, caplog):
    assert unnamed.ls("files/d", detail=False) == ["files/d/e", "files/d/k"]
    assert "files/d/: ls omits a folder without a name" in caplog.text
    assert unnamed.ls("files", detail=False) == ["files/d", "files/d2"]


@pytest.mark.parametrize("path", ["files/d", ["files/d", "files/d/e", "files/d//e"], "files/d*"])
def test_a_folder_is_removed_with_all_its_keys(unnamed, path):
    store = torchobj.Store("memory://files")
    for key in ("d/", "d//", "d//marker/", "d-", "dx/k"):
        store.put(key, b"")
    unnamed.makedirs("files/d/made/below", exist_ok=True)
    unnamed.rm(path, recursive=True)
    kept = {"/root"} if path == "files/d*" else {"/root", "d-", "d2//x", "dx/k"}
    assert {info.key for info in store.list()} == kept
    assert not unnamed.exists("files/d/made/below")
    with pytest.raises(exceptions.ObjectNotFoundError, match="rm 'files/never was'"):
        unnamed.rm("files/never was", recursive=True)


def test_a_folder_with_keys_of_empty_components_is_copied_and_moved(unnamed):
    unnamed.copy("files/d", "files/copied", recursive=True)
    copied = sorted(name.replace("files/d/", "files/copied/") for name in paths_in("d/"))
    assert unnamed.find("files/copied") == copied
    unnamed.mv("files/d", "files/moved", recursive=True)
    assert unnamed.find("files/moved") == [name.replace("copied", "moved") for name in copied]
    assert not unnamed.exists("files/d")


def test_a_key_with_an_empty_component_is_downloaded_to_a_named_file_only(unnamed, tmp_path):
    for path, lpath in (("files/d", tmp_path / "out"), ("files/d", f"{tmp_path}/"), ("files", str(tmp_path / "out"))):
        with pytest.raises(exceptions.InvalidKeyError, match="because a component is empty"):
            unnamed.get(path, lpath, recursive=True)
        assert list(tmp_path.iterdir()) == []
    unnamed.get("files/d//dd", str(tmp_path / "one"))
    unnamed.get("files/d//e", str(tmp_path / "folder"), recursive=True)
    assert (tmp_path / "one").read_bytes() == b"d//dd"
    assert (tmp_path / "folder/f").read_bytes() == b"d//e/f"


def test_created_folders_exist_for_every_instance_until_removed(files):
    files.makedirs("files/x/y")
    other = InMemory(skip_instance_cache=True)
    assert other is not files
    assert other.isdir("files/x")
    assert other.ls("files/x", detail=False) == ["files/x/y"]
    assert other.ls("files/x/y") == []
    assert not InMemory(endpoint_url="http://elsewhere").exists("files/x")
    files.makedirs("files/x/y", exist_ok=True)
    with pytest.raises(FileExistsError):
        files.makedirs("files/x/y")
    with pytest.raises(OSError, match="not empty"):
        files.rmdir("files/x")
    files.rm("files/x", recursive=True)
    assert not files.exists("files/x")
    files.pipe("files/object", b"x")
    with pytest.raises(FileExistsError):
        files.mkdir("files/object")


def test_only_the_most_recently_created_folders_are_remembered(files, monkeypatch):
    monkeypatch.setattr(file_system, "_MAX_REMEMBERED", 2)
    for name in "abab":
        files.makedirs(f"files/{name}", exist_ok=True)
    files.makedirs("files/c")
    assert [files.isdir(f"files/{name}") for name in "abc"] == [False, True, True]


def test_appending_writes_after_the_end_and_creates_a_missing_object(files):
    for text in ("a\r\n", "é"):
        with files.open("files/k", "a", newline="", encoding="utf-8") as file:
            file.write(text)
    assert body("k") == "a\r\né".encode()
    with files.open("files/k", "r", newline="", encoding="utf-8") as file:
        assert file.readlines() == ["a\r\n", "é"]


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("present", [None, b"old"])
def test_an_append_to_an_object_that_changed_meanwhile_fails_and_keeps_it(files, present, compression):
    def changes():
        yield lambda: files.pipe("files/k", b"of another writer")
        if present is not None:
            yield lambda: files.rm_file("files/k")

    for change in changes():
        files.rm_file("files/k")
        if present is not None:
            files.pipe("files/k", present)
        first, second = (files.open("files/k", "a", compression=compression) for _ in range(2))
        first.write("1")
        second.write("2")
        second.close()
        kept = body("k")
        with pytest.raises(exceptions.PreconditionFailedError):
            first.close()
        assert body("k") == kept
        last = files.open("files/k", "ab")
        change()
        with pytest.raises(exceptions.StoreError):
            last.close()
        assert not files.exists("files/k") or body("k") == b"of another writer"


def test_the_condition_of_an_append_can_be_given(files):
    files.pipe("files/k", b"old")
    with files.open("files/k", "ab", if_version=files.info("files/k")["ETag"]) as file:
        file.write(b"1")
    with pytest.raises(exceptions.PreconditionFailedError), files.open("files/k", "ab", if_version="other") as file:
        file.write(b"2")
    file = files.open("files/k", "ab", if_version=None)
    files.pipe("files/k", b"of another writer")
    file.close()
    assert body("k") == b"old1"


def test_a_transaction_writes_all_files_at_its_end_or_none(files):
    files.pipe("files/k", b"old")
    with files.transaction:
        with files.open("files/k", "wb") as file:
            file.write(b"new")
        with files.open("files/other", "w") as file:
            file.write("text")
        assert body("k") == b"old"
    assert (body("k"), body("other")) == (b"new", b"text")
    with pytest.raises(ZeroDivisionError), files.transaction:
        with files.open("files/k", "wb") as file:
            file.write(b"newer")
        _ = 1 / 0
    assert body("k") == b"new"
    with files.transaction:
        with pytest.raises(ZeroDivisionError), fsspec.core.OpenFile(files, "files/k", "w") as file:
            file.write("half")
            _ = 1 / 0
        with fsspec.core.OpenFile(files, "files/other", "w") as file:
            file.write("more")
    assert (body("k"), body("other")) == (b"new", b"more")


def test_byte_ranges_follow_the_rules_of_slices(files):
    data = bytes(range(10))
    files.pipe("files/k", data)
    ends = [None, 0, 1, 5, 10, 20, -1, -5, -10, -20]
    for start in ends:
        for end in ends:
            assert files.cat_file("files/k", start, end) == data[start:end], (start, end)


def test_an_error_is_raised_and_not_reported_as_absence(files, monkeypatch):
    files.pipe("files/folder/k", b"x")

    def denied(*_):
        raise exceptions.AccessDeniedError("403")

    monkeypatch.setattr(torchobj.Store, "head", denied)
    for ask in (files.exists, files.isfile, files.info):
        with pytest.raises(PermissionError):
            ask("files/k")
    # A user who may only read below a folder gets 403 for the folder's own name.
    assert files.info("files/folder")["type"] == "directory"
    files.makedirs("files/new", exist_ok=True)
    assert files.isdir("files/new")
    monkeypatch.setattr(torchobj.Store, "list", denied)
    for ask in (files.isdir, files.ls):
        with pytest.raises(PermissionError):
            ask("files/folder")


def test_moving_and_removing_do_not_touch_objects_with_the_same_prefix(files):
    for name in ("run/a", "run/b/c", "run 2/a", "runs"):
        files.pipe(f"files/{name}", name.encode())
    files.mv("files/run", "files/moved", recursive=True)
    assert files.find("files") == ["files/moved/a", "files/moved/b/c", "files/run 2/a", "files/runs"]
    files.rm("files/moved", recursive=True)
    assert files.find("files") == ["files/run 2/a", "files/runs"]
    files.rm_file("files/never was")
    with pytest.raises(FileNotFoundError):
        files.mv("files/never was", "files/x")


def test_other_modes_and_options_are_refused(files):
    with pytest.raises(exceptions.ConfigError, match="r\\+b"):
        files.open("files/k", "r+b")
    with pytest.raises(TypeError, match="unknown options: anonymus"):
        InMemory(anonymus=True)
    with pytest.raises(FileNotFoundError), files.open("files/never was") as file:
        file.read()


def test_instances_are_pickled_with_their_configuration():
    files = InMemory(config=torchobj.StoreConfig(s3=torchobj.S3Options(endpoint_url="http://elsewhere", profile="x")))
    again = pickle.loads(pickle.dumps(files))
    assert again._config == files._config
    assert again == files


def no_credentials():
    raise AssertionError


def other_credentials():
    raise AssertionError


def test_configurations_that_differ_have_different_instances(tmp_path):
    def of(**options):
        return torchobj.StoreConfig(s3=torchobj.S3Options(**options))

    different = [
        of(),
        of(credential_provider=no_credentials),
        of(credential_provider=other_credentials),
        of(customer_key_file=tmp_path / "a"),
        of(customer_key_file=tmp_path / "b"),
        # Explicit, so that it overrides the configuration file.
        of(requester_pays=False),
        torchobj.StoreConfig(hedge=True),
    ]
    instances = [ObjectFileSystem(config=config) for config in different]
    assert len({id(files) for files in instances}) == len({files._fs_token for files in instances}) == len(different)
    for config, files in zip(different, instances, strict=True):
        assert files._config is config
        assert ObjectFileSystem(config=config) is files
        assert ObjectFileSystem(config)._config is config
        assert pickle.loads(pickle.dumps(files)) is files
    assert ObjectFileSystem(config=of(credential_provider=no_credentials)) is instances[1]
    assert str(tmp_path) not in str(instances[3].storage_options)


def of_gcs(**options):
    return torchobj.StoreConfig(gcs=torchobj.GCSOptions(**options))


def test_configurations_of_gcs_that_differ_have_different_instances():
    different = [
        of_gcs(),
        of_gcs(user_project="p"),
        of_gcs(credential_provider=no_credentials),
        of_gcs(anonymous=False),
    ]
    instances = [GCSFileSystem(config=config) for config in different]
    assert len({files._fs_token for files in instances}) == len(different)
    assert GCSFileSystem(config=of_gcs(credential_provider=no_credentials)) is instances[2]
    assert pickle.loads(pickle.dumps(instances[1])) is instances[1]
    assert type(ObjectFileSystem(config=different[0])) is ObjectFileSystem


def test_a_file_system_of_gcs_addresses_buckets_of_gcs(monkeypatch):
    monkeypatch.setattr(file_system, "Store", lambda url, config: url)
    files = GCSFileSystem(endpoint_url="http://gcs")
    assert (files._config.gcs.endpoint_url, files._config.s3.endpoint_url) == ("http://gcs", None)
    for path in ("bucket/some key", "gs://bucket/some key", "gcs://bucket/some key", "tobj+gs://bucket/some key"):
        assert files._locate(path) == ("gs://bucket", "some key")
        assert files.unstrip_protocol(path) == "gs://bucket/some key"
    with pytest.raises(exceptions.ConfigError, match="region='eu': must be None for a URL of gs://"):
        GCSFileSystem(region="eu")


def test_a_folder_of_one_scheme_does_not_exist_in_another():
    ObjectFileSystem().makedirs("created/folder", exist_ok=True)
    assert "created/folder" in ObjectFileSystem()._created_folders
    assert "created/folder" not in GCSFileSystem()._created_folders


def test_all_schemes_are_registered_unless_another_implementation_is_to_be_kept(fsspec_registry):
    registry = fsspec_registry
    registry["gcs"] = fsspec.AbstractFileSystem
    assert not register(replace=False, schemes=("gs",))
    assert "gs" not in registry
    for scheme, kind in (("s3", ObjectFileSystem), ("gs", GCSFileSystem)):
        files, path = fsspec.url_to_fs(f"tobj+{scheme}://bucket/some key")
        assert (type(files), path) == (kind, "bucket/some key")
    assert register()
    for scheme in ("gs", "gcs"):
        files, path = fsspec.url_to_fs(f"{scheme}://bucket/some key")
        assert (type(files), path) == (GCSFileSystem, "bucket/some key")
    assert type(fsspec.filesystem("s3")) is ObjectFileSystem


def test_one_scheme_can_be_registered_alone(fsspec_registry):
    registry = fsspec_registry
    registry["gs"] = registry["gcs"] = fsspec.AbstractFileSystem
    assert register(schemes=("s3",), config=of_gcs(user_project="p"))
    assert (registry["s3"], registry["gs"]) == (ObjectFileSystem, fsspec.AbstractFileSystem)
    assert ObjectFileSystem()._config.gcs.user_project == "p"
    # The configuration applies although one of the schemes stays with another implementation.
    assert not register(replace=False, config=of_gcs(user_project="q"))
    assert GCSFileSystem()._config.gcs.user_project == "q"


def test_a_registered_scheme_uses_the_given_configuration(fsspec_registry, monkeypatch):
    fsspec_registry["s3"] = fsspec.AbstractFileSystem
    monkeypatch.setitem(conf, "s3", {})
    before = ObjectFileSystem()
    config = torchobj.StoreConfig(s3=torchobj.S3Options(region="eu-west-1"))
    assert not register(replace=False, config=config)
    assert (fsspec_registry["s3"], conf["s3"]) == (fsspec.AbstractFileSystem, {})
    assert register(config=config)
    for _ in range(2):
        files, path = fsspec.url_to_fs("s3://bucket/some key")
        assert (type(files), files._config.s3.region, path) == (ObjectFileSystem, "eu-west-1", "bucket/some key")
        assert register(replace=False)
    assert fsspec.filesystem("s3", region="us-east-1")._config.s3.region == "us-east-1"
    # A file system created earlier is another instance; a pickled one keeps its configuration.
    assert (before._config.s3.region, ObjectFileSystem()._config.s3.region) == (None, "eu-west-1")
    travelling = pickle.dumps(ObjectFileSystem())
    monkeypatch.setattr(instances, "_default", None)
    assert pickle.loads(travelling)._config.s3.region == "eu-west-1"
    # s3fs receives all of fsspec's configuration for s3.
    assert conf["s3"] == {}


def test_threads_create_list_and_remove_folders(files, monkeypatch):
    monkeypatch.setattr(file_system, "_MAX_REMEMBERED", 50)

    def use(number):
        for name in range(100):
            files.makedirs(f"files/{number}-{name}", exist_ok=True)
            files.find("files", withdirs=True)
            files.ls("files")

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert len(files._created_folders) <= 50 + 8
