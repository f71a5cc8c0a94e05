"""The metrics of a process: what is counted, and that the names are those of the documentation."""

import multiprocessing
import re
from pathlib import Path

import pytest

import torchobj
from torchobj.telemetry.epochs import EPOCHS
from torchobj.telemetry.table import CAUSES, OF_PROCESS, LoaderStats

TEXT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def documented(heading):
    """The names in the tables of a section, with their units."""
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(torchobj\.[^`]+)` \| ([^|]+) \|", section, re.MULTILINE))


def since(before):
    return {name: value - before.get(name, 0) for name, value in torchobj.metrics().items()}


def test_requests_bytes_and_times_are_counted():
    before = torchobj.metrics()
    store = torchobj.Store("memory://metrics-counted")
    store.put("k", b"12345")
    assert len(torchobj.get("memory://metrics-counted/k")) == 5
    with pytest.raises(torchobj.StoreError):
        torchobj.get("memory://metrics-counted/missing")
    assert len(list(store.list())) == 1
    store.delete("k")
    found = since(before)
    counted = {name: value for name, value in found.items() if name.startswith("torchobj.requests.") and value}
    assert counted == {
        "torchobj.requests.delete.ok": 1,
        "torchobj.requests.get.ok": 1,
        "torchobj.requests.get.refused": 1,
        "torchobj.requests.list.ok": 1,
        "torchobj.requests.put.ok": 1,
    }
    assert (found["torchobj.received_bytes"], found["torchobj.sent_bytes"]) == (5, 5)
    times = [found[f"torchobj.read.{name}.seconds"] for name in ("first_byte", "body", "duration")]
    assert [found[f"torchobj.read.{name}.count"] for name in ("first_byte", "body", "duration")] == [1, 1, 1]
    # Each is rounded down to a microsecond; the sums are floats.
    assert -1e-9 < times[2] - times[0] - times[1] < 2.5e-6
    assert found["torchobj.other_requests.count"] == 3
    assert torchobj.metrics()["torchobj.permits.limit"] >= 1


def test_retries_and_throttled_responses_are_counted(bucket, control):
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.put("k", bytes(1000))
    before = torchobj.metrics()
    control.faults({"operation": "GetObject", "action": {"status": 503, "code": "SlowDown"}, "times": 2})
    assert len(store.get("k")) == 1000
    found = since(before)
    assert found["torchobj.requests.get.throttled"] == found["torchobj.throttled"] == found["torchobj.retries"] == 2
    assert (found["torchobj.requests.get.ok"], found["torchobj.received_bytes"]) == (1, 1000)


def test_an_upload_in_parts_is_in_flight_until_it_ends(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    with store.open("parts", "wb") as file:
        file.write(bytes(20 << 20))
        assert torchobj.metrics()["torchobj.uploads.in_flight"] == 1
    in_flight = {name: value for name, value in torchobj.metrics().items() if ".uploads." in name}
    assert set(in_flight.values()) == {0} and len(in_flight) == 3


def test_epochs_of_all_loaders_are_summed_also_of_deleted_ones():
    before = torchobj.metrics()
    for workers in (0, 1):
        loader = torchobj.DataLoader([1, 2, 3], batch_size=2, num_workers=workers, lookahead=0)
        assert len(list(loader)) == 2
        elapsed_s = loader.stats().elapsed_s
        del loader
    found = since(before)
    assert (found["torchobj.epochs.batches"], found["torchobj.epochs.samples"]) == (4, 6)
    exposed = {cause: found[f"torchobj.exposed_seconds.{cause}"] for cause in CAUSES}
    assert min(exposed.values()) >= 0 < exposed["startup"]
    assert sum(exposed.values()) <= found["torchobj.epochs.elapsed_seconds"]
    assert elapsed_s < found["torchobj.epochs.elapsed_seconds"]


def test_a_loop_is_measured_while_it_runs():
    before = torchobj.metrics()
    loader = torchobj.DataLoader([1, 2, 3], lookahead=0)
    batches = iter(loader)
    for count in (1, 2, 3):
        next(batches)
        assert since(before)["torchobj.epochs.samples"] == count
    assert torchobj.metrics()["torchobj.epochs.elapsed_seconds"] - before["torchobj.epochs.elapsed_seconds"] == (
        pytest.approx(loader.stats().elapsed_s)
    )


def test_names_and_units_are_those_of_the_documentation():
    torchobj.Store("memory://metrics-names").put("k", b"1")
    assert len(torchobj.get("memory://metrics-names/k")) == 1
    names = documented("Of a process")
    assert names.pop("torchobj.requests.<operation>.<outcome>") == "requests"
    assert names.pop("torchobj.exposed_seconds.<cause>") == "s"
    by_attribute = ("torchobj.requests.", "torchobj.exposed_seconds.")
    found = {name for name in torchobj.metrics() if not name.startswith(by_attribute)}
    assert found == set(names)
    units = {"By": "B", "s": "s", "{batch}": "batches"}
    for metric in OF_PROCESS:
        if not metric.attributes:
            assert names[metric.name] == units.get(metric.unit, metric.unit.strip("{}") + "s")


def test_operations_and_outcomes_are_those_of_the_documentation():
    section = TEXT.partition("## Of a process\n")[2].partition("\n## ")[0]
    outcomes = re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)
    operations = re.findall(r"`([a-z_]+)`", section.partition("Operations are")[2].partition("Outcomes:")[0])
    found = {name for name in torchobj.metrics() if name.startswith("torchobj.requests.")}
    assert found == {f"torchobj.requests.{operation}.{outcome}" for operation in operations for outcome in outcomes}


def test_names_of_a_loader_are_those_of_the_documentation():
    measured = LoaderStats(first_byte_p50_s=0.1, first_byte_p99_s=0.1, body_p50_s=0.1, body_p99_s=0.1)
    assert list(documented("Of a loader")) == list(measured.as_dict())


def test_logged_names_are_those_of_the_documentation():
    loader = torchobj.DataLoader([1, 2, 3], lookahead=0)
    assert len(list(loader)) == 3
    assert list(documented("Log the exposed data time")) == list(loader.log(3, ranks=True))


def read_in_child(queue):
    queue.put(torchobj.metrics())


def test_a_forked_process_has_its_own_metrics():
    torchobj.Store("memory://metrics-forked").put("k", b"1")
    loader = torchobj.DataLoader([1, 2, 3], lookahead=0)
    assert len(list(loader)) == 3
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=read_in_child, args=(queue,))
    child.start()
    found = queue.get()
    child.join()
    assert found["torchobj.requests.put.ok"] == found["torchobj.epochs.samples"] == 0
    assert torchobj.metrics()["torchobj.requests.put.ok"] >= 1
    assert set(found) <= set(torchobj.metrics())


def loop_in_child(queue, loader):
    queue.put((sum(1 for _ in loader), torchobj.metrics()["torchobj.epochs.samples"]))


def test_a_forked_process_does_not_count_what_its_parent_measured():
    loader = torchobj.DataLoader([1, 2, 3], lookahead=0)
    assert next(iter(loader)) == 1
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=loop_in_child, args=(queue, loader))
    child.start()
    assert queue.get() == (3, 3)
    child.join()


def test_a_signal_handler_may_read_the_metrics_while_they_are_read():
    class Interrupted:
        calls = 0

        def measured(self):
            self.calls += 1
            if self.calls == 2:
                torchobj.metrics()
            return {}

    loader = Interrupted()
    EPOCHS.add(loader)
    torchobj.metrics()
    assert loader.calls == 3


def gets_in_worker(reader):
    reader.read()
    return torchobj.metrics()["torchobj.requests.get.ok"]


def test_a_worker_of_a_loader_reads_its_own_metrics(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}").write_bytes(b"1")
    data = torchobj.ObjectMapDataset(f"file://{tmp_path}/", transform=gets_in_worker)
    before = torchobj.metrics()
    # The process of the loop reads for its worker.
    assert [batch.item() for batch in torchobj.DataLoader(data, num_workers=1)] == [0] * 4
    assert since(before)["torchobj.requests.get.ok"] == 4
