"""The samples of a run, of any length, and the charts that they give."""

from torchobj.loader.measure.timeline import MAX_SAMPLES, Sample, Timeline, charts


def sample(at, **found):
    return Sample(elapsed_s=at, waited_s=at / 4, startup_s=0.0, samples=int(10 * at), found=found)


def test_a_run_of_any_length_has_a_few_hundred_samples():
    timeline = Timeline()
    for tenth in range(100_000):
        if tenth / 10 >= timeline.due_s:
            timeline.add(sample(tenth / 10))
    assert MAX_SAMPLES / 2 <= len(timeline.samples) <= MAX_SAMPLES
    times = [each.elapsed_s for each in timeline.samples]
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] > 9_900


def test_charts_have_rates_and_current_values():
    found = {
        chart.title: chart
        for chart in charts([sample(0.0, bytes=0), sample(2.0, bytes=4_000_000, in_flight=3, first_byte_p50_s=0.02)])
    }
    assert found["Exposed data time"].lines["waiting for data"] == [25.0]
    assert found["Samples"].lines["samples"] == [10.0]
    assert found["Read from the store"].lines["bytes"] == [2.0]
    assert found["Requests"].lines == {"in flight": [3], "limit": [None]}
    assert found["Time to first byte, since the start"].lines["median"] == [20.0]


def test_charts_begin_at_the_first_batch():
    timeline = Timeline()
    timeline.begin(Sample(elapsed_s=32.0, waited_s=0.0, startup_s=32.0, samples=8, found={}))
    assert timeline.due_s > 32.0
    timeline.add(Sample(elapsed_s=33.0, waited_s=0.25, startup_s=32.0, samples=24, found={}))
    waiting, samples, *_ = charts(timeline.samples)
    assert waiting.seconds == [1.0]
    assert waiting.lines == {"waiting for data": [25.0], "startup": [0.0]}
    assert samples.lines["samples"] == [16.0]
