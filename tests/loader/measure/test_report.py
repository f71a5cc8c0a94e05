"""A loader's report, computed from its statistics."""

import dataclasses

import pytest

from torchobj.loader.measure.exposed import SlowestRank, Totals
from torchobj.loader.measure.report import report
from torchobj.telemetry.table import LoaderStats

CALM = LoaderStats(
    batches=10,
    samples=640,
    elapsed_s=2.0,
    startup_s=0.0,
    imports_s=0.0,
    waited_s=0.04,
    samples_per_s=320.0,
    bytes_per_s=35e6,
    waited_share=0.02,
    workers=2,
    exposed_share=0.02,
    waited_for_store_s=0.0,
    waited_for_budget_s=0.0,
    waited_for_decode_s=0.04,
    waited_for_collate_s=0.0,
    reading_share=0.0,
    failed_samples=0,
    hits=640,
    late=0,
    queued=0,
    misses=0,
    failed=0,
    evicted=0,
    first_byte_p50_s=0.02,
    first_byte_p99_s=0.3,
    body_p50_s=0.001,
    body_p99_s=0.002,
    retries=0,
    throttled=0,
    hedges=0,
    hedges_won=0,
    connect_failures=0,
    in_flight=0,
    in_flight_limit=64,
    budget_bytes=64 << 20,
    used_bytes=0,
    granted_bytes=0,
    ahead_bytes=0,
    over_budget=0,
    block_bytes=0,
    blocks_refused=0,
    memory_limited_share=0.0,
    request_limited_share=0.0,
)
WAITS = dataclasses.replace(CALM, waited_s=1.0, waited_share=0.5, waited_for_decode_s=1.0)
READS = dataclasses.replace(
    WAITS, hits=600, late=40, reading_share=0.4, waited_for_store_s=0.8, waited_for_decode_s=0.2
)
SHORT = dataclasses.replace(READS, waited_for_store_s=0.0, waited_for_budget_s=0.8)
COLLATES = dataclasses.replace(WAITS, waited_for_decode_s=0.3, waited_for_collate_s=0.7)
STARTS = dataclasses.replace(CALM, elapsed_s=39.8, startup_s=29.6, waited_s=0.4, waited_share=0.01)
#: The workers read for themselves.
UNSEEN = dataclasses.replace(WAITS, hits=0, bytes_per_s=0.0)
UNREAD = "lookahead=0 is set"

#: Statistics, arguments, text that the report contains, text that it does not contain.
CASES = {
    "a busy trainer": (CALM, {}, ["The training step is the bottleneck"], ["Decoding is", "persistent_workers"]),
    "a short wait": (
        dataclasses.replace(WAITS, waited_share=0.07),
        {},
        ["The loop waited 7%", "the bottleneck, not the input pipeline"],
        ["Decoding", "cheaper transform"],
    ),
    "workers that start slowly": (
        STARTS,
        {},
        [
            "Starting and stopping workers took 29.6 of the 39.8 s.",
            "persistent_workers=True",
            "Apart from that",
        ],
        ["Decoding is", "cheaper transform", "Nothing needs to change"],
    ),
    "decoders that are imported slowly": (
        dataclasses.replace(STARTS, imports_s=28.0),
        {},
        ["Importing decoders took 28.0 of the 39.8 s, once.", "Apart from that"],
        ["workers", "Decoding is"],
    ),
    "decoders that are imported slowly and decode slowly": (
        dataclasses.replace(
            STARTS,
            elapsed_s=37.0,
            startup_s=32.0,
            imports_s=32.0,
            waited_s=4.1,
            waited_share=4.1 / 37,
            waited_for_decode_s=4.0,
            waited_for_store_s=0.1,
        ),
        {},
        [
            "The loop waited 82% of the 5.0 s without startup: 2% for the network or the store, 80% for decoding.",
            "Importing decoders took 32.0 of the 37.0 s, once.",
            "Decoding is the limit",
        ],
        ["11%", "not the bottleneck", "Starting"],
    ),
    "transforms of workers that import": (
        dataclasses.replace(STARTS, startup_s=29.6, transform_imports_s=29.0),
        {},
        [
            "Imports in transforms took 29.0 of the 39.8 s.",
            "Import these modules before the loop, so that workers inherit them.",
            "Apart from that",
        ],
        ["Decoding is", "Starting", "once"],
    ),
    "transforms of spawned workers that import": (
        dataclasses.replace(STARTS, startup_s=29.6, transform_imports_s=29.0),
        {"start_method": "spawn"},
        ["persistent_workers=True does so once for all epochs."],
        ["before the loop"],
    ),
    "a transform that imports, without workers": (
        dataclasses.replace(STARTS, startup_s=29.6, transform_imports_s=29.6, workers=0),
        {},
        ["Imports in transforms took 29.6 of the 39.8 s, once."],
        ["Decoding is", "workers"],
    ),
    "a run of which nothing but startup was measured": (
        dataclasses.replace(CALM, elapsed_s=3.0, startup_s=3.0, waited_s=0.0, waited_share=0.0),
        {},
        ["The loop waited 0% of the 0.0 s without startup", "0.0 s without startup are too short"],
        [],
    ),
    "workers that start slowly and decode slowly": (
        dataclasses.replace(STARTS, waited_s=8.0, waited_share=0.2, waited_for_decode_s=8.0),
        {},
        ["took 29.6 of the 39.8 s.", "Decoding is the limit", "2 workers cannot decode fast enough"],
        ["not the bottleneck"],
    ),
    "decoding in workers": (WAITS, {}, ["Decoding is the limit", "use more workers"], ["process of the loop"]),
    "decoding without workers": (
        dataclasses.replace(WAITS, workers=0),
        {},
        ["The transform runs in the process of the loop: set num_workers"],
        ["workers cannot decode"],
    ),
    "a slow collate function in workers": (
        COLLATES,
        {},
        ["Collation is the limit", "2 workers cannot collate fast enough", "35% for collation"],
        ["Decoding is", "process of the loop"],
    ),
    "a slow collate function without workers": (
        dataclasses.replace(COLLATES, workers=0),
        {"unread": UNREAD},
        ["Collation is the limit", "The collate function runs in the process of the loop: set num_workers"],
        ["Decoding is", "workers cannot"],
    ),
    "a slow rank": (
        CALM,
        {"slowest": SlowestRank(rank=3, ranks=8, share=0.4, cause="decode")},
        ["The training step is the bottleneck", "Of 8 ranks, rank 3 waited longest: 40% of its time, mostly for decod"],
        ["Decoding is"],
    ),
    "workers that read for themselves": (
        UNSEEN,
        {},
        ["cannot measure whether reading or decoding is the limit", "has one as an attribute"],
        ["MB/s", "Decoding is", "dataset.manifest"],
    ),
    "nothing read ahead": (
        dataclasses.replace(UNSEEN, workers=0),
        {"unread": UNREAD},
        [f"Nothing was read ahead, because {UNREAD}."],
        ["MB/s", "Decoding is"],
    ),
    "a slow network, with max_in_flight='auto'": (
        dataclasses.replace(READS, request_limited_share=0.9),
        {},
        ["The network or the store is the limit", "same region"],
        ["max_in_flight"],
    ),
    "a slow disk": (
        dataclasses.replace(READS, cache_hits=640, request_limited_share=0.9),
        {"max_in_flight": 8},
        ["from the disk cache.", "40% for the disk cache,", "The disk cache is the limit", "A faster disk"],
        ["network", "the store", "first byte", "max_in_flight"],
    ),
    "a first epoch, and one from the disk cache": (
        dataclasses.replace(READS, cache_hits=320, billed_gets=320),
        {},
        ["from the disk cache and the store.", "The network, the store or the disk cache is the limit", "same region"],
        [],
    ),
    "a slow network, with few requests": (
        dataclasses.replace(READS, request_limited_share=0.9, in_flight_limit=8),
        {"max_in_flight": 8},
        ["max_in_flight=8 in StoreConfig was reached: a higher number"],
        ["same region"],
    ),
    "a store that throttles": (
        dataclasses.replace(READS, throttled=40),
        {},
        ["The store is the limit"],
        ["Decoding is"],
    ),
    "persistent workers that start slowly by fork": (
        STARTS,
        {"start_method": "fork", "persistent_workers": True},
        ["Starting and stopping workers took 29.6 of the 39.8 s, once for all epochs."],
        ["persistent_workers=True", "'spawn'"],
    ),
    "workers that start slowly by spawn": (
        STARTS,
        {"start_method": "spawn"},
        ["persistent_workers=True", "'forkserver' starts faster than 'spawn'"],
        [],
    ),
    "workers that start slowly by fork": (STARTS, {"start_method": "fork"}, ["persistent_workers=True"], ["'spawn'"]),
    "a short pass": (
        dataclasses.replace(WAITS, elapsed_s=3.0, startup_s=1.5),
        {},
        ["1.5 s without startup are too short to tell what limits the loader: 2 s are needed."],
        ["Decoding is", "network is", "bottleneck"],
    ),
    "a short pass without look-ahead": (
        dataclasses.replace(UNSEEN, elapsed_s=0.5),
        {"unread": UNREAD},
        [f"Nothing was read ahead, because {UNREAD}."],
        ["too short"],
    ),
    "a small budget": (
        dataclasses.replace(SHORT, memory_limited_share=0.8),
        {},
        ["The memory budget of 64 MiB is the limit", "torchobj.set_memory_budget"],
        ["max_in_flight"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_only_the_limiting_stage_is_named(case):
    stats, settings, words, others = CASES[case]
    said = report(stats, **settings)
    assert [word for word in words if word not in said] == [], said
    assert [word for word in others if word in said] == [], said


@pytest.mark.parametrize(
    ("stats", "blamed", "advice"),
    [
        (CALM, "The training step is the bottleneck", "Nothing needs to change"),
        (WAITS, "2 workers cannot decode fast enough", "use more workers"),
        (dataclasses.replace(WAITS, workers=0), "The transform runs in the process", "set num_workers"),
        (dataclasses.replace(READS, throttled=40), "The store is the limit: it throttled 40 requests", "fewer ranks"),
        (
            dataclasses.replace(READS, hits=0, late=0, misses=640),
            "640 of 640 objects were not announced",
            "other samples than its sampler yields",
        ),
        (
            dataclasses.replace(SHORT, memory_limited_share=0.8),
            "budget of 64 MiB is the limit",
            "torchobj.set_memory_budget",
        ),
        (
            dataclasses.replace(SHORT, memory_limited_share=0.8, used_bytes=60 << 20, granted_bytes=60 << 20),
            "Workers hold most of it",
            "smaller prefetch_factor",
        ),
        (
            dataclasses.replace(SHORT, memory_limited_share=0.8, used_bytes=60 << 20, ahead_bytes=1 << 20),
            "This process keeps 59 MiB of batches",
            "release or copy them",
        ),
        (
            dataclasses.replace(READS, request_limited_share=0.9),
            "The median time to first byte is 20.0 ms, its 99th percentile 300.0 ms",
            "max_in_flight=64 in StoreConfig was reached",
        ),
        (READS, "The network or the store is the limit", "same region"),
    ],
)
def test_the_limit_is_named_with_the_next_step(stats, blamed, advice):
    said = report(stats, max_in_flight=64)
    first, second, *others = said.splitlines()
    assert first == "640 samples in 2.0 s: 320 per second, 35.0 MB/s from the store."
    assert second.startswith("The loop waited ")
    assert any(blamed in line for line in others), said
    assert any(advice in line for line in others), said
    assert all(line.endswith(".") and len(line) < 200 for line in said.splitlines()), said


def test_the_reason_why_nothing_is_read_ahead_is_named():
    said = report(dataclasses.replace(READS, misses=640), unread="lookahead=0 is set")
    assert "Nothing was read ahead, because lookahead=0 is set." in said


def test_failures_are_listed():
    trouble = {"failed_samples": 6, "failed": 2, "over_budget": 3, "retries": 4, "hedges": 5, "hedges_won": 1}
    said = report(dataclasses.replace(CALM, connect_failures=7, **trouble))
    assert "6 samples failed" in said
    assert "2 reads failed after all retries" in said
    assert "exceeded 3 times" in said
    assert "4 requests failed and were retried" in said
    assert "7 connections failed" in said
    assert "1 hedged request was answered before" in said


def test_a_single_failure_is_in_the_singular():
    names = ("samples", "failed_samples", "failed", "over_budget", "blocks_refused", "retries", "connect_failures")
    said = report(dataclasses.replace(WAITS, workers=1, **dict.fromkeys(names, 1)))
    for words in (
        "1 sample in", "1 worker cannot", "1 sample failed, and was", "1 read failed", "exceeded 1 time for",
        "1 batch exceeded", "1 request failed and was retried", "1 connection failed",
    ):  # fmt: skip
        assert words in said


def test_an_unused_loader_has_no_figures():
    assert report(dataclasses.replace(CALM, batches=0)) == "No batch was returned yet."


def test_waiting_is_divided_in_proportion_to_the_time_on_each_stage():
    spent = {"reading_s": 2.0, "decoding_s": 5.0, "collating_s": 1.0}
    # Workers were idle: the loop waited less than they worked.
    idle = Totals(elapsed_s=10.0, waited_s=1.0, startup_s=0.5, objects=10, **spent).exposed(2)
    assert idle == pytest.approx((0.25, 0.0, 0.625, 0.125, 0.5))
    # Time in a worker that is spent on none of the stages is that of a transform that sleeps.
    asleep = Totals(elapsed_s=10.0, waited_s=8.0, objects=10, **spent).exposed(2)
    assert asleep == pytest.approx((1.0, 0.0, 6.5, 0.5, 0.0))
    assert Totals().exposed(2) == (0.0,) * 5
    # Imports of workers are startup.
    imports = Totals(elapsed_s=10.0, waited_s=4.0, startup_s=1.0, importing_s=7.0, decoding_s=1.0).exposed(2)
    assert imports == pytest.approx((0.0, 0.0, 0.5, 0.0, 4.5))


def test_waiting_for_objects_is_that_for_the_budget_if_memory_limited_the_reads():
    reads = Totals(elapsed_s=10.0, waited_s=4.0, reading_s=4.0, objects=100)
    # An iterable dataset announced no more.
    assert reads._replace(unannounced=90).exposed(0).budget == pytest.approx(4.0)
    assert reads._replace(unannounced=90, request_limited=20).exposed(0).budget == pytest.approx(4.0)
    assert reads._replace(unannounced=90, request_limited=80).exposed(0).store == pytest.approx(4.0)
    assert reads._replace(unannounced=5).exposed(0).store == pytest.approx(4.0)
    assert reads._replace(memory_limited=50, request_limited=30).exposed(0).budget == pytest.approx(4.0)
    assert reads._replace(memory_limited=50, request_limited=60).exposed(0).store == pytest.approx(4.0)
    assert reads._replace(memory_limited=5).exposed(0).store == pytest.approx(4.0)
    assert reads._replace(over_budget=20).exposed(0).budget == pytest.approx(4.0)


def test_statistics_have_flat_names_with_units():
    found = dataclasses.replace(CALM, body_p99_s=None).as_dict()
    assert found["torchobj.loader.waited_seconds"] == 0.04
    assert found["torchobj.loader.samples_per_second"] == 320.0
    assert found["torchobj.loader.budget_bytes"] == 64 << 20
    assert "torchobj.loader.body_p99_seconds" not in found
    assert all(type(value) in (int, float) for value in found.values())
