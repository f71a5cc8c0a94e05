"""What a loader says of itself, from numbers."""

import dataclasses

import pytest

from torchobj.loader.report import report
from torchobj.loader.stats import LoaderStats

CALM = LoaderStats(
    batches=10,
    samples=640,
    elapsed_s=2.0,
    startup_s=0.0,
    waited_s=0.04,
    samples_per_s=320.0,
    bytes_per_s=35e6,
    waited_share=0.02,
    workers=2,
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
    overdrawn=0,
    starved_share=0.0,
    limited_share=0.0,
)
WAITS = dataclasses.replace(CALM, waited_s=1.0, waited_share=0.5)
READS = dataclasses.replace(WAITS, hits=600, late=40, reading_share=0.4)
STARTS = dataclasses.replace(CALM, elapsed_s=39.8, startup_s=29.6, waited_s=2.0, waited_share=0.05)
#: As where workers read for themselves.
UNSEEN = dataclasses.replace(WAITS, hits=0, bytes_per_s=0.0)
UNREAD = "lookahead=0 was said"

#: What is constructed; what its report says; what it does not say.
CASES = {
    "a trainer that is busy": (CALM, {}, ["The trainer sets the pace"], ["Decoding", "persistent_workers"]),
    "a little waiting": (
        dataclasses.replace(WAITS, waited_share=0.07),
        {},
        ["the loop waited 7%", "the input pipeline is not the bottleneck"],
        ["Decoding", "cheaper transform"],
    ),
    "workers that start for long": (
        STARTS,
        {},
        ["Starting and ending workers took another 29.6 s", "persistent_workers=True", "Apart from that"],
        ["Decoding", "cheaper transform", "nothing needs to change"],
    ),
    "workers that start for long, and decode slowly": (
        dataclasses.replace(STARTS, waited_s=8.0, waited_share=0.2),
        {},
        ["took another 29.6 s", "Decoding holds it back", "2 workers do not decode fast enough"],
        ["not the bottleneck"],
    ),
    "decoding in workers": (WAITS, {}, ["Decoding holds it back", "give it more"], ["loop's own process"]),
    "decoding without workers": (
        dataclasses.replace(WAITS, workers=0),
        {},
        ["the transform runs in the loop's own process: give the loader workers"],
        ["workers do not decode"],
    ),
    "workers that read for themselves": (
        UNSEEN,
        {},
        ["cannot tell reading from decoding", "dataset.manifest"],
        ["MB/s", "Decoding holds"],
    ),
    "nothing read ahead": (
        dataclasses.replace(UNSEEN, workers=0),
        {"unread": UNREAD},
        [f"Nothing was read ahead, since {UNREAD}."],
        ["MB/s", "Decoding"],
    ),
    "a network that is slow, with max_in_flight='auto'": (
        dataclasses.replace(READS, limited_share=0.9),
        {},
        ["The network, or the store, holds it back", "same region"],
        ["max_in_flight"],
    ),
    "a network that is slow, with few requests": (
        dataclasses.replace(READS, limited_share=0.9, in_flight_limit=8),
        {"max_in_flight": 8},
        ["max_in_flight=8 in StoreConfig was the limit: a higher one"],
        ["same region"],
    ),
    "a store that throttles": (dataclasses.replace(READS, throttled=40), {}, ["The store holds it back"], ["Decoding"]),
    "a budget that is small": (
        dataclasses.replace(READS, starved_share=0.8),
        {},
        ["The budget of 64 MiB holds it back", "torchobj.set_budget"],
        ["max_in_flight"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_part_that_holds_a_loader_back_is_blamed_and_no_other(case):
    stats, settings, words, others = CASES[case]
    said = report(stats, **settings)
    assert [word for word in words if word not in said] == [], said
    assert [word for word in others if word in said] == [], said


@pytest.mark.parametrize(
    ("stats", "blamed", "advice"),
    [
        (CALM, "The trainer sets the pace", "nothing needs to change"),
        (WAITS, "2 workers do not decode fast enough", "give it more"),
        (dataclasses.replace(WAITS, workers=0), "the loop's own process", "give the loader workers"),
        (dataclasses.replace(READS, throttled=40), "The store holds it back: 40 answers", "fewer ranks"),
        (
            dataclasses.replace(READS, hits=0, late=0, misses=640),
            "640 of 640 unannounced",
            "others than its sampler yields",
        ),
        (dataclasses.replace(READS, starved_share=0.8), "budget of 64 MiB holds it back", "torchobj.set_budget"),
        (
            dataclasses.replace(READS, starved_share=0.8, used_bytes=60 << 20, granted_bytes=60 << 20),
            "workers hold most of it",
            "smaller prefetch_factor",
        ),
        (
            dataclasses.replace(READS, starved_share=0.8, used_bytes=60 << 20, ahead_bytes=1 << 20),
            "this process keeps 59 MiB of batches",
            "let go of them",
        ),
        (
            dataclasses.replace(READS, limited_share=0.9),
            "half of the answers began within 20.0 ms, and all but one in a hundred within 300.0 ms",
            "max_in_flight=64 in StoreConfig was the limit",
        ),
        (READS, "The network, or the store, holds it back", "same region"),
    ],
)
def test_what_held_it_back_is_named_with_what_to_change(stats, blamed, advice):
    said = report(stats, max_in_flight=64)
    assert said.startswith("640 samples in 2.0 s: 320 a second, 35.0 MB/s from the store; the loop waited ")
    assert blamed in said
    assert advice in said
    assert "\n" not in said


def test_why_nothing_is_read_ahead_is_told():
    said = report(dataclasses.replace(READS, misses=640), unread="lookahead=0 was said")
    assert "Nothing was read ahead, since lookahead=0 was said." in said


def test_what_went_wrong_besides_is_told():
    trouble = {"failed_samples": 6, "failed": 2, "overdrawn": 3, "retries": 4, "hedges": 5, "hedges_won": 1}
    said = report(dataclasses.replace(CALM, connect_failures=7, **trouble))
    assert "6 samples could not be read or made" in said
    assert "2 reads failed for good" in said
    assert "exceeded 3 times" in said
    assert "4 requests failed, and were made again" in said
    assert "7 times no connection" in said
    assert "1 slow answers were overtaken" in said


def test_a_loader_that_was_not_used_says_so():
    assert report(dataclasses.replace(CALM, batches=0)) == "Nothing was handed out yet."
