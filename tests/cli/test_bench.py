"""`torchobj bench`."""

import pytest

import torchobj
from torchobj.cli.bench import Level, is_rising, knee, measure, suggestions
from torchobj.config import StoreConfig


@pytest.mark.providers("s3", "gs")
def test_bench_measures_each_number_of_requests_and_suggests_one(cli, bucket):
    for number in range(20):
        bucket.write(f"train/{number}", bytes(1000))
    listed, first, second, advice = cli.records(
        "bench", f"{bucket.url}/train/", "--seconds", "0.1", "--concurrency", "1,8"
    )
    assert listed["objects"] == 20 and listed["bytes"] == 20_000
    assert (first["concurrency"], second["concurrency"]) == (1, 8)
    assert first["objects_per_s"] > 0 and first["p50_s"] <= first["p99_s"] and second["errors"] == {}
    assert advice["suggested_max_in_flight"] in (1, 8)


def test_bench_sends_no_more_requests_at_a_time_than_it_says(cli, bucket, control):
    control.reset()
    bucket.boto.create_bucket(Bucket=bucket.name)
    for number in range(20):
        bucket.write(f"train/{number}", bytes(1000))
    control.faults({"operation": "GetObject", "action": {"delay_first_byte_s": 0.05}})
    cli.lines("bench", f"{bucket.url}/train/", "--seconds", "0.1", "--concurrency", "5")
    # And a hedged read.
    assert 2 <= control.connections().most_in_flight <= 5 + 1


def test_bench_counts_failed_reads_by_type(cli, bucket, control):
    bucket.write("k", b"1")
    control.faults({"operation": "GetObject", "action": {"status": 403, "code": "AccessDenied"}})
    records = cli.records("bench", bucket.url, "--seconds", "0.1", "--concurrency", "4")
    assert records[1]["errors"].keys() == {"AccessDeniedError"}
    assert "No object could be read" in records[-1]["suggestions"][0]


def test_a_level_of_bench_reads_objects_even_if_its_time_elapses_before_its_threads_start(tmp_path):
    (tmp_path / "k").write_bytes(b"123")
    level = measure(f"file://{tmp_path}", [torchobj.ObjectRef(f"file://{tmp_path}/k", size=3)], StoreConfig(), 4, 0.0)
    assert level.objects >= 2 and level.bytes == 3 * level.objects and level.latencies_s and level.errors == {}


def test_bench_refuses_other_numbers_of_requests(cli, bucket):
    assert cli.run("bench", bucket.url, "--concurrency", "0,1").exit_code == 2


def level(concurrency, objects, errors=None, cpu_s=0.1):
    return Level(concurrency, 1.0, objects, objects * 1000, cpu_s, [0.01] * 10, errors or {})


def test_the_knee_is_the_lowest_number_with_nearly_all_of_the_throughput():
    assert knee([level(1, 100), level(4, 380), level(16, 400), level(64, 390)]).concurrency == 4


def test_the_throughput_rises_if_the_last_number_gives_more_than_all_others():
    assert is_rising([level(1, 100), level(4, 380)]) and is_rising([level(4, 100), level(8, 90), level(16, 120)])
    assert not is_rising([level(1, 100)]) and not is_rising([level(1, 100), level(4, 108)])
    assert not is_rising([level(1, 0), level(4, 0)])


@pytest.mark.parametrize(("limit", "last"), [(600, 2048), (10_000, 4096), (100, 256)])
def test_bench_doubles_the_number_until_the_throughput_no_longer_rises(cli, bucket, monkeypatch, limit, last):
    bucket.write("k", b"1")
    monkeypatch.setattr("torchobj.cli.bench.measure", lambda *call: level(call[3], min(call[3], limit)))
    *levels, advice = cli.records("bench", bucket.url)[1:]
    assert [each["concurrency"] for each in levels[:6]] == [1, 4, 16, 64, 128, 256]
    assert levels[-1]["concurrency"] == last
    assert ("still rises" in advice["suggestions"][0]) == (limit == 10_000)
    # Numbers that are given are the only ones.
    assert len(cli.records("bench", bucket.url, "--concurrency", "1,2")) == 1 + 2 + 1


def test_suggestions_name_the_limit():
    rising = suggestions([level(1, 100), level(256, 25_000)], 1000, 8)
    assert "still rises at 256 requests" in rising[0] and "--concurrency 256,512,1024" in rising[2]
    assert not any("--concurrency" in line for line in suggestions([level(1, 1), level(4096, 400)], 1000, 8))
    busy = suggestions([level(1, 100), level(64, 400, cpu_s=7.5), level(256, 400)], 1000, 8)
    assert any("The CPU is the limit: 7.5 of 8 cores" in line for line in busy)
    throttled = suggestions([level(1, 100), level(64, 90, {"ThrottledError": 3})], 1000, 8)
    assert any("The store throttled" in line for line in throttled)
    large = suggestions([level(64, 400)], 1 << 30, 8)
    assert any("torchobj.set_memory_budget(" in line for line in large)
