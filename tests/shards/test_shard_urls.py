import pytest

import torchobj
from torchobj.exceptions import ConfigError, ObjectNotFoundError
from torchobj.shards.shard_urls import expand_braces, find_shards, shard_manifest

BASE = "memory://shard-urls"


@pytest.fixture(scope="module", autouse=True)
def shards():
    store = torchobj.Store(BASE)
    for number in range(12):
        store.put(f"train/a-{number:03d}.tar", b"x" * number)
    for key in ("train/notes.txt", "train/b.tgz", "train/sub/c.tar.gz", "train/a-000.tar.index.parquet", "odd/{x}.tar"):
        store.put(key, key.encode())


def names(urls):
    manifest = shard_manifest(urls)
    return [manifest.url(index).removeprefix(f"{BASE}/") for index in range(len(manifest))]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a", ["a"]),
        ("a{1..3}", ["a1", "a2", "a3"]),
        ("a{08..10}", ["a08", "a09", "a10"]),
        ("{000..2}", ["000", "001", "002"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{0..6..3}", ["0", "3", "6"]),
        ("{a,b}-{0..1}", ["a-0", "a-1", "b-0", "b-1"]),
        ("{a,b{0..1}}", ["a", "b0", "b1"]),
        ("x{{a,b},{c}}y{", ["xay{", "xby{", "x{c}y{"]),
        ("{x}", ["{x}"]),
        ("{}{1,2}", ["{}1", "{}2"]),
        ("{,-}a", ["a", "-a"]),
    ],
)
def test_braces_are_expanded(pattern, expected):
    assert list(expand_braces(pattern)) == expected


def test_a_range_of_braces_that_is_too_long_is_refused_before_it_is_expanded():
    with pytest.raises(ConfigError, match="more than 10,000,000 names"):
        list(expand_braces("a{0..99999999999}"))


def test_the_names_of_a_pattern_are_limited_together(monkeypatch):
    monkeypatch.setattr("torchobj.shards.shard_urls._MAX_NAMES", 50)
    with pytest.raises(ConfigError, match="more than 50 names"):
        shard_manifest(f"{BASE}/{{0..9}}{{0..9}}.tar")
    assert list(expand_braces("{0..%s}" % ("9" * 5000))) == ["{0..%s}" % ("9" * 5000)]


def test_names_of_braces_are_in_their_order_with_size_and_version():
    manifest = shard_manifest(f"{BASE}/train/a-{{002..000}}.tar")
    assert [manifest.entry(index)[1:3] for index in range(3)] == [
        ("train/a-002.tar", 2),
        ("train/a-001.tar", 1),
        ("train/a-000.tar", 0),
    ]
    assert all(manifest.entry(index)[3] for index in range(3))


def test_a_glob_selects_in_key_order():
    assert names(f"{BASE}/train/a-00[1-3].tar") == ["train/a-001.tar", "train/a-002.tar", "train/a-003.tar"]
    assert names(f"{BASE}/train/**.tgz") == ["train/b.tgz"]


def test_a_prefix_selects_tar_files_by_their_suffix():
    found = names(f"{BASE}/train/")
    assert len(found) == 14
    assert found[-2:] == ["train/b.tgz", "train/sub/c.tar.gz"]


def test_a_list_mixes_names_and_patterns_in_its_order():
    urls = [f"{BASE}/train/b.tgz", f"{BASE}/train/a-00{{1,0}}.tar", f"{BASE}/train/sub/*", f"{BASE}/odd/{{x}}.tar"]
    assert names(urls) == [
        "train/b.tgz",
        "train/a-001.tar",
        "train/a-000.tar",
        "train/sub/c.tar.gz",
        "odd/{x}.tar",
    ]


@pytest.mark.parametrize(
    ("urls", "error", "match"),
    [
        (f"{BASE}/train/zz*.tar", ConfigError, "matches no object"),
        (f"{BASE}/none/", ConfigError, r"ends with \.tar"),
        (f"{BASE}/train/a-{{010..020}}.tar", ObjectNotFoundError, r"a-01[2-9]|a-020"),
        ([], ConfigError, "urls"),
        (7, ConfigError, "urls"),
        ([3], ConfigError, "urls"),
        (BASE, ConfigError, "names no object"),
    ],
)
def test_what_selects_nothing_is_an_error(urls, error, match):
    with pytest.raises(error, match=match):
        shard_manifest(urls)


@pytest.fixture(scope="module")
def mixed():
    store = torchobj.Store(f"{BASE}-mixed")
    for key in (
        "_root/a.tar", "_root/._a.tar", "_root/.b.tar", "_root/_temporary/0/c.tar", "_root/.tmp/d.tar", "_root/x_y/e.tar",
        "_root/x.y/f.tar", "_root/_day=1/g.tar", "_root/.day=1/h.tar", "_root/_day=1/_i.tar", "_root/__MACOSX/j.tar",
    ):  # fmt: skip
        store.put(key, key.encode())
    return f"{BASE}-mixed"


def test_names_below_a_prefix_that_begin_with_an_underscore_or_dot_are_skipped_with_one_warning(mixed, caplog):
    found = find_shards([f"{mixed}/_root/", f"{mixed}/_root/_day=1/"])
    urls = [found.manifest.url(index).removeprefix(f"{mixed}/_root/") for index in range(len(found.manifest))]
    assert urls == ["_day=1/g.tar", "a.tar", "x.y/f.tar", "x_y/e.tar", "_day=1/g.tar"]
    assert [found.manifest.entry(index)[2] for index in range(2)] == [len("_root/_day=1/g.tar"), len("_root/a.tar")]
    assert all(found.manifest.entry(index)[3] for index in range(5))
    assert (found.skipped, found.example) == (8, f"{mixed}/_root/._a.tar")
    [record] = caplog.records
    assert f"8 names that begin with '_' or '.' skipped, such as {mixed}/_root/._a.tar" in record.getMessage()


def test_globs_and_names_are_literal(mixed, caplog):
    for urls, count in (
        (f"{mixed}/_root/**/*.tar", 11),
        (f"{mixed}/_root/._a.tar", 1),
        (f"{mixed}/_root/_temporary/*/*", 1),
    ):
        assert len(find_shards(urls).manifest) == count
    assert len(find_shards(f"{mixed}/_root/_temporary/").manifest) == 1
    assert not caplog.records


def test_a_prefix_whose_names_are_all_skipped_is_an_error_that_counts_them():
    torchobj.Store(f"{BASE}-hidden").put("x/_temporary/a.tar", b"")
    with pytest.raises(ConfigError, match=r"ends with \.tar, .*, other than 1 whose names begin with '_' or '\.'"):
        find_shards(f"{BASE}-hidden/x/")


@pytest.mark.parametrize(("count", "told"), [(0, None), (1, "1 object"), (2, "2 objects")])
@pytest.mark.parametrize("others", [[], ["{base}/named.tar"]])
def test_a_prefix_without_its_slash_is_named_with_its_objects(count, told, others):
    base = f"memory://shard-urls-slash-{count}"
    store = torchobj.Store(base)
    store.put("named.tar", b"")
    for number in range(count):
        store.put(f"train/{number}.tar", b"")
    urls = [*(each.format(base=base) for each in others), f"{base}/train"]
    with pytest.raises(ObjectNotFoundError) as raised:
        shard_manifest(urls)
    notes = [note for note in raised.value.__notes__ if "end the prefix" in note]
    assert notes == ([] if told is None else [f"{base}/train/ has {told}: end the prefix with a slash"])


#: Datasets whose argument is a prefix, and the number of samples below one with two objects, with and without its slash.
OF_PREFIXES = {
    "shards of tar": (lambda url: torchobj.TarIterableDataset(url), None),
    "indexed shards of tar": (lambda url: torchobj.TarMapDataset(url), None),
    "Parquet": (lambda url: torchobj.ParquetIterableDataset(url), None),
    "objects": (lambda url: torchobj.ObjectMapDataset(url), 2),
    "objects in order": (lambda url: torchobj.ObjectIterableDataset(url), 2),
    "groups": (lambda url: torchobj.GroupDataset(url, {"a": ".a"}), 2),
    "classes": (lambda url: torchobj.ImageFolder(url, loader=str, extensions=".a"), 2),
}


@pytest.mark.parametrize(("make", "count"), OF_PREFIXES.values(), ids=OF_PREFIXES)
def test_a_prefix_without_its_slash_is_read_or_named_by_each_dataset(tmp_path, make, count):
    for name in ("train/c/1.a", "train/c/2.a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    url = f"{tmp_path.as_uri()}/train"
    if count is not None:
        assert len(list(make(url))) == len(list(make(f"{url}/"))) == count
        return
    with pytest.raises(ObjectNotFoundError) as raised:
        iter(make(url)) if not hasattr(make(url), "__len__") else len(make(url))
    assert f"{url}/ has 2 objects: end the prefix with a slash" in raised.value.__notes__


def test_a_url_that_is_no_pattern_is_refused_with_how_to_write_its_characters():
    torchobj.Store(BASE).put("run [9-1]/a.tar", b"x")
    for url in (f"{BASE}/run [9-1]/a.tar", f"{BASE}/run [9-1]/"):
        with pytest.raises(ConfigError, match=r"invalid range.*\[\[\] and \[\{\] stand for the characters"):
            find_shards(url)
    assert names(f"{BASE}/run [[]9-1]/a.tar") == ["run [9-1]/a.tar"]
