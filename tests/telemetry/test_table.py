"""The table of metrics: what it says is counted, and what is made from it."""

import inspect
import re
import runpy
import sys
from pathlib import Path

import pytest

import torchobj
from torchobj import _torchobj
from torchobj.loader.measure.report import report
from torchobj.telemetry.table import OF_LOADER, OF_PROCESS, LoaderStats, of_source

DOCS = Path(__file__).parents[2] / "docs"


def test_the_tables_of_the_documentation_are_made_from_it():
    page = (DOCS / "metrics.md").read_text()
    assert runpy.run_path(str(DOCS / "metrics.py"))["with_tables"](page) == page, "run make metrics"


def test_names_and_keys_are_unique():
    for metrics in (OF_PROCESS, OF_LOADER):
        names = [metric.name for metric in metrics if metric.name]
        assert len(set(names)) == len(names)


def test_each_text_is_a_phrase():
    for metric in OF_LOADER + OF_PROCESS:
        assert re.match("[a-z0-9`]", metric.text)
        assert not metric.text.endswith(".")
        assert metric.sentence == "" or metric.sentence.endswith(".")


@pytest.mark.skipif(sys.platform != "linux", reason="the prefetcher")
def test_what_the_native_module_counts_has_a_row():
    torchobj.Store("memory://table-of-metrics").put("k", b"1")
    data = torchobj.ObjectMapDataset("memory://table-of-metrics/", transform=lambda reader: len(reader.read()))
    assert len(list(torchobj.DataLoader(data))) == 1
    found = set(_torchobj.prefetch_stats())
    assert {metric.key for metric in of_source("prefetcher")} <= found
    rows = {metric.key for metric in (*OF_LOADER, *OF_PROCESS)}
    # Counts for the tests of torchobj.
    assert found - rows == {"transferred", "copied"}


def test_help_describes_each_attribute():
    said = inspect.getdoc(LoaderStats).partition("Attributes:\n")[2]
    assert re.findall(r"^ +(\w+): [A-Z0-9`].*\.$", said, re.MULTILINE) == list(LoaderStats.__dataclass_fields__)


@pytest.mark.parametrize("number", [1, 2])
def test_a_report_has_the_sentence_of_each_counter(number):
    counted = [metric for metric in OF_LOADER if metric.sentence]
    said = report(LoaderStats(batches=1, **{metric.key: number for metric in counted}))
    assert not re.search(r"[\[\]{}|]", said)
    assert said.count(f"{number} ") >= len(counted) > 5
