"""How arguments that are URLs, paths and globs are parsed."""

import pytest

from torchobj.cli.options import CommandError
from torchobj.cli.targets import parse_target


@pytest.mark.parametrize(
    ("text", "key", "glob"),
    [
        ("s3://b/x/img*.jpg", "x/img", "*.jpg"),
        ("s3://b/x/**/a", "x/", "**/a"),
        ("s3://b/x/img**", "x/", "img**"),
        ("s3://b/{a,b}/c", "", "{a,b}/c"),
        ("s3://b/x", "x", None),
    ],
)
def test_a_glob_begins_at_its_first_wildcard(text, key, glob):
    target = parse_target(text)
    assert (target.url.key, target.glob) == (key, glob)
    if glob is not None:
        folder, below = target.split_glob()
        assert (
            folder.url.key.endswith(("/", ""))
            and folder.url.key + below == key + glob
            and "/" not in folder.url.key[:-1]
        )


def test_a_local_path_is_absolute_and_keeps_its_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_target("x/../y/").url.key == f"{tmp_path}/y/".lstrip("/")
    assert parse_target("y").path == tmp_path / "y"
    (tmp_path / "a[1]").touch()
    assert parse_target("a[1]").glob is None


def test_an_empty_path_is_refused():
    with pytest.raises(CommandError, match="names nothing"):
        parse_target("")
