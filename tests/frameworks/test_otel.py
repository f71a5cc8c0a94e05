"""The instruments of OpenTelemetry, as an SDK reads them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import prometheus_client
import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Sum

import torchobj
import torchobj.otel
from torchobj.telemetry.table import CAUSES, EXPOSED, OF_PROCESS, REQUESTS, of_source


@pytest.fixture
def read():
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    torchobj.otel.install(provider)
    torchobj.Store("memory://otel").put("k", b"12345")
    assert len(torchobj.get("memory://otel/k")) == 5
    yield lambda: {
        metric.name: metric
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    provider.shutdown()


def test_an_sdk_reads_the_metrics_of_the_process_with_their_units(read):
    found = read()
    by_attribute = ("torchobj.requests.", "torchobj.exposed_seconds.")
    names = {name for name in torchobj.metrics() if not name.startswith(by_attribute)}
    assert set(found) == names | {"torchobj.requests", "torchobj.exposed_seconds"}
    for metric in OF_PROCESS:
        assert found[metric.name].unit == metric.unit
        assert isinstance(found[metric.name].data, Sum) == (metric.kind == "counter")


def test_requests_have_their_operation_and_outcome_as_attributes(read):
    points = read()["torchobj.requests"].data.data_points
    counts = {(point.attributes["operation"], point.attributes["outcome"]): point.value for point in points}
    expected = torchobj.metrics()
    assert counts["put", "ok"] == expected["torchobj.requests.put.ok"] >= 1
    assert counts["get", "ok"] == expected["torchobj.requests.get.ok"] >= 1
    assert len(counts) == sum(name.startswith("torchobj.requests.") for name in expected)


def test_exposed_data_time_has_its_cause_as_attribute(read):
    points = read()["torchobj.exposed_seconds"].data.data_points
    assert {point.attributes["cause"] for point in points} == set(CAUSES)


def test_the_dashboard_queries_metrics_that_prometheus_reads():
    registry = prometheus_client.CollectorRegistry()
    provider = MeterProvider(metric_readers=[PrometheusMetricReader(registry=registry)])
    torchobj.otel.install(provider)
    torchobj.Store("memory://dashboard").put("k", b"1")
    assert len(torchobj.get("memory://dashboard/k")) == 1
    served = {sample.name for family in registry.collect() for sample in family.samples}
    provider.shutdown()
    of_counters = [metric.name for metric in (EXPOSED, REQUESTS, *of_source("requests")) if metric.kind == "counter"]
    assert {f"{name.replace('.', '_')}_total" for name in of_counters} < served
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "_static" / "grafana.json").read_text())
    queries = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    queried = set(re.findall(r"\btorchobj_\w+", queries))
    assert len(queried) > 30 and queried <= served


def test_without_an_sdk_no_metric_is_read(monkeypatch):
    monkeypatch.setattr(torchobj.otel, "metrics", None)
    torchobj.otel.install()


def test_an_sdk_without_a_reader_collects_nothing(monkeypatch):
    monkeypatch.setattr(torchobj.otel, "metrics", None)
    provider = MeterProvider()
    torchobj.otel.install(provider)
    assert provider.force_flush()
    provider.shutdown()


def test_only_the_api_is_needed():
    code = "import sys; sys.modules['opentelemetry.sdk'] = None; import torchobj.otel; torchobj.otel.install(); print('ok')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("ok\n", "")


def test_without_the_api_the_error_names_the_extra():
    code = "import sys; sys.modules['opentelemetry'] = None; import torchobj; torchobj.otel"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'torchobj[otel]'" in done.stderr
