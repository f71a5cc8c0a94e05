"""A loader on a server with random faults: every byte is correct, and nothing hangs."""

import concurrent.futures
import time

import pytest

import torchobj

#: The share of GetObject requests that each fault affects.
FAULTS = [
    (0.05, {"status": 503, "code": "SlowDown"}),
    (0.02, {"reset": "after_request"}),
    (0.01, {"cut_body": 0.5}),
    (0.01, {"delay_first_byte_s": 2.0}),
]


def body(number):
    return number.to_bytes(4, "big") * (500 + number % 500)


def number_and_bytes(reader):
    return int(reader.key), bytes(reader)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.matrix)])
def test_every_byte_is_correct_under_random_faults(bucket, control, count):
    store = torchobj.Store(bucket.url, config=bucket.config)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: store.put(f"{number:05}", body(number)), range(count)))
    data = torchobj.S3MapDataset(bucket.url, config=bucket.config, transform=number_and_bytes)

    def epoch():
        began, seen = time.monotonic(), set()
        for batch in torchobj.DataLoader(data, batch_size=32, shuffle=True, num_workers=2, collate_fn=list):
            for number, found in batch:
                assert found == body(number)
                seen.add(number)
        assert seen == set(range(count))
        return time.monotonic() - began

    clean_s = epoch()
    control.faults(
        *(
            {"operation": "GetObject", "probability": share, "seed": seed, "action": action}
            for seed, (share, action) in enumerate(FAULTS, start=1)
        )
    )
    faulty_s = epoch()
    fired = [rule["fired"] for rule in control.fault_report()]
    print(f"{count} objects: {clean_s:.1f} s without faults, {faulty_s:.1f} s with {fired}")
    assert all(fired)
