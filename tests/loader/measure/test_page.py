"""The page of a run: its charts, and the file that is written."""

import os
import re
import resource
import stat
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import pytest

import torchobj


def test_the_charts_of_a_loader_begin_at_its_first_batch(loader):
    first, *others = loader._meter.timeline.samples
    assert first.samples == 8
    assert others


@pytest.fixture
def loader():
    store = torchobj.Store("memory://page")
    for number in range(64):
        store.put(f"{number:02}", bytes(1000))
    data = torchobj.ObjectMapDataset("memory://page/", transform=lambda reader: len(reader.read()))
    loader = torchobj.DataLoader(data, batch_size=8)
    assert len(list(loader)) == 8
    return loader


class Tags(HTMLParser):
    """Counts tags, and collects what they load."""

    def __init__(self):
        super().__init__()
        self.counts, self.loaded = {}, []

    def handle_starttag(self, tag, attributes):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.loaded += [value for name, value in attributes if name in ("src", "href")]


def test_the_page_has_the_report_and_charts_and_loads_nothing(loader, tmp_path):
    (tmp_path / "run.html").write_text("old")
    said = loader.report(tmp_path / "run.html")
    assert said == loader.report()
    text = (tmp_path / "run.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert (tags.counts["p"] >= len(said.splitlines()), tags.counts["section"], tags.loaded) == (True, 6, [])
    assert tags.counts["svg"] >= 5
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"https?://|nan|inf\b", text)
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]


def test_a_page_that_cannot_be_written_changes_nothing(loader, tmp_path):
    with pytest.raises(FileNotFoundError):
        loader.report(tmp_path / "missing" / "run.html")
    (tmp_path / "run.html").mkdir()
    with pytest.raises(OSError, match=r"run\.html"):
        loader.report(tmp_path / "run.html")
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]
    with pytest.raises(torchobj.TorchobjError, match=r"must end in \.html or \.png"):
        loader.report(tmp_path / "run.pdf")


@pytest.fixture
def read_only():
    """A folder in which this process may not write, also if root runs the test."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        own = os.geteuid()
        if own == 0:
            os.seteuid(65534)
        yield Path(folder)
        os.seteuid(own)


def test_a_read_only_folder_is_an_error_and_stays_empty(loader, read_only):
    with pytest.raises(PermissionError, match="run"):
        loader.report(read_only / "run.html")
    assert list(read_only.iterdir()) == []


def test_nothing_of_a_page_remains_when_it_cannot_be_written(loader, tmp_path):
    (tmp_path / "run.html").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            loader.report(tmp_path / "run.html")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("run.html", "old")]


def test_a_page_keeps_the_permissions_of_the_file_that_it_replaces(loader, tmp_path):
    for mode in (0o600, 0o640):
        (tmp_path / "run.html").write_text("old")
        (tmp_path / "run.html").chmod(mode)
        loader.report(tmp_path / "run.html")
        assert stat.S_IMODE((tmp_path / "run.html").stat().st_mode) == mode


def test_a_page_may_have_a_name_of_255_bytes(loader, tmp_path):
    path = tmp_path / ("n" * 250 + ".html")
    loader.report(path)
    assert path.read_text().endswith("</html>\n")


def test_a_page_is_written_into_a_fifo(loader, tmp_path):
    os.mkfifo(tmp_path / "run.html")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit((tmp_path / "run.html").read_text)
        loader.report(tmp_path / "run.html")
        assert read.result().endswith("</html>\n")
    assert (tmp_path / "run.html").is_fifo()


def test_loaders_report_to_one_file_at_once(loader, tmp_path):
    loaders = [loader, torchobj.DataLoader([1, 2], lookahead=0)] * 4
    assert len(list(loaders[1])) == 2
    ready = threading.Barrier(len(loaders))

    def write(each):
        ready.wait()
        for _ in range(20):
            each.report(tmp_path / "run.html")

    with ThreadPoolExecutor(len(loaders)) as pool:
        list(pool.map(write, loaders))
    (written,) = tmp_path.iterdir()
    assert written.name == "run.html"
    assert written.read_text().endswith("</html>\n")


def test_a_loader_without_batches_has_a_page(tmp_path):
    loader = torchobj.DataLoader([1], lookahead=0)
    assert loader.report(tmp_path / "run.html") == "No batch was returned yet."
    assert "Nothing was measured." in (tmp_path / "run.html").read_text()


def test_a_picture_without_matplotlib_names_the_package(loader, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(torchobj.TorchobjError, match="pip install matplotlib"):
        loader.report(tmp_path / "run.png")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_is_written_with_matplotlib(loader, tmp_path):
    pytest.importorskip("matplotlib")
    loader.report(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
