"""Patterns that exclude or include files: `fnmatch` in the program and the native module select the same."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchobj
from torchobj import exceptions
from torchobj.files.patterns import selects
from torchobj.files.transfers import download, upload

PATTERNS = st.text("ab/.*?[]!^-{}\\é", min_size=1, max_size=8)
NAMES = st.text("ab.!^-[]{}\\é", min_size=1, max_size=4).filter(lambda name: name.strip("."))


def test_the_last_pattern_that_matches_counts():
    names = ["a.txt", "a.jpg", "x/b.jpg", "x/tmp.jpg"]
    for patterns, selected in (
        ([], names),
        ([("exclude", "*")], []),
        ([("include", "*.jpg")], names),
        ([("exclude", "*"), ("include", "*.jpg")], names[1:]),
        ([("include", "*.jpg"), ("exclude", "*")], []),
        ([("exclude", "*"), ("include", "*.jpg"), ("exclude", "*tmp*")], names[1:3]),
        ([("exclude", "x/*")], names[:2]),
        ([("exclude", "x")], names),
    ):
        assert [name for name in names if selects(patterns, name)] == selected


@given(patterns=st.lists(PATTERNS, min_size=1, max_size=3), names=st.lists(NAMES, min_size=1, max_size=4, unique=True))
def test_an_upload_selects_what_fnmatch_matches(tmp_path_factory, patterns, names):
    folder = tmp_path_factory.mktemp("tree")
    for name in names:
        path = folder / name
        path.mkdir()
        (path / "f").write_bytes(b"1")
    rules = [("exclude", "*"), *(("include", pattern) for pattern in patterns)]
    store = torchobj.Store(f"memory://patterns/{folder.name}")
    upload(folder, store.url, patterns=rules)
    expected = {f"{name}/f" for name in names if any(fnmatchcase(f"{name}/f", pattern) for pattern in patterns)}
    assert {info.key for info in store.list()} == expected == {f"{n}/f" for n in names if selects(rules, f"{n}/f")}


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "*.txt",
        "a*",
        "?.txt",
        "[ab].txt",
        "[!a].txt",
        "[a-b].*",
        "x/*",
        "x*y*",
        "[",
        "a[",
        "{a,b}.txt",
        "**",
        "*é*",
    ],
)
def test_a_download_selects_what_fnmatch_matches(tmp_path, pattern):
    store = torchobj.Store(f"memory://downloads/{tmp_path.name}")
    names = ["a.txt", "b.txt", "c.txt", "ab", "x/y/a.txt", "x/b.jpg", "[", "a[", "é", "{a,b}.txt"]
    for name in names:
        store.put(name, b"1")
    download(store.url, tmp_path, patterns=[("exclude", pattern)])
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {name for name in names if not fnmatchcase(name, pattern)}


def test_patterns_and_a_glob_are_both_required(tmp_path):
    store = torchobj.Store(f"memory://both/{tmp_path.name}")
    for name in ("a.jpg", "b.jpg", "x/c.jpg", "d.txt"):
        store.put(name, b"1")
    download(store.url, tmp_path, glob="*.jpg", patterns=[("exclude", "b*")])
    assert [path.name for path in Path(tmp_path).iterdir()] == ["a.jpg"]


@pytest.mark.parametrize("pattern", ["*.jpg", ("skip", "*.jpg"), ("exclude",), ("exclude", 1), ["exclude", "*"]])
def test_what_is_no_pattern_is_refused(tmp_path, pattern):
    with pytest.raises(exceptions.ConfigError, match=r'must be a pair such as \("exclude"'):
        upload(tmp_path, "memory://refused", patterns=[pattern])
