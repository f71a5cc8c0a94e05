"""Requests are counted as the provider bills them, and multiplied by the prices that are given."""

import pytest

import torchobj
from torchobj import PriceOptions
from torchobj.exceptions import ConfigError, ObjectNotFoundError
from torchobj.telemetry.billing import Billed, billed, shown_dollars


def now():
    found = torchobj.metrics()
    return Billed(*(found[f"torchobj.{name}"] for name in Billed._fields))


@pytest.mark.providers("s3", "gs")
def test_operations_are_counted_by_their_billing_class(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.exists("connected")
    before = now()
    store.put("k", bytes(1000))
    assert now().since(before) == Billed(billed_puts=1)
    assert len(store.get("k")) == 1000 and store.head("k").size == 1000
    assert len(list(store.list())) == 1
    assert now().since(before) == Billed(2, 1, 1, 1000)
    store.copy("k", "l")
    assert now().since(before).billed_puts == 2
    before = now()
    store.delete("k")
    assert now().since(before) == Billed()


def test_the_parts_of_an_upload_are_billed_and_its_abort_is_not(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.put("first", b"1")
    before = now()
    with store.open("parts", "wb") as file:
        file.write(bytes(20 << 20))
    # Begin, three parts, commit.
    assert now().since(before) == Billed(billed_puts=5)


def test_a_refused_request_is_billed_and_a_throttled_one_is_not(bucket, control):
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.put("k", b"1")
    before = now()
    with pytest.raises(ObjectNotFoundError):
        store.get("missing")
    assert now().since(before) == Billed(billed_gets=1)
    control.faults({"operation": "GetObject", "action": {"status": 503, "code": "SlowDown"}, "times": 2})
    assert len(store.get("k")) == 1
    assert now().since(before) == Billed(billed_gets=2, received_bytes=1)


def test_both_requests_of_a_hedged_read_are_billed():
    found = {"outcomes": ["ok"] * 5, "hedges": 3, "received_bytes": 7}
    operations = ["get", "head", "list", "list_uploads", "list_buckets", "put", "begin_upload", "put_part", "commit"]
    counts = {operation: [0] * 5 for operation in [*operations, "copy"]} | {"get": [4, 0, 0, 0, 0]}
    found |= {"outcomes": ["ok", "throttled", "refused", "server_error", "interrupted"], "requests": counts}
    assert billed(found) == Billed(billed_gets=7, received_bytes=7)


def test_dollars_are_products():
    prices = PriceOptions(get_per_1000=0.0004, list_per_1000=0.005, put_per_1000=0.006, egress_per_gib=0.09)
    assert Billed(2000, 1000, 500, 2 << 30).dollars(prices) == pytest.approx(0.0008 + 0.005 + 0.003 + 0.18)
    assert Billed(2000, 1000, 500, 2 << 30).dollars(PriceOptions()) == 0
    assert prices.are_given and not PriceOptions().are_given
    assert [shown_dollars(amount) for amount in (0, 4.8e-6, 0.00494, 0.5, 12.345)] == [
        "$0.00",
        "$0.0000048",
        "$0.0049",
        "$0.50",
        "$12.35",
    ]


def test_a_price_with_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(TypeError, match="PriceOptions has no field 'get': its fields are egress_per_gib, get_per_1000"):
        PriceOptions(get=1)
    with pytest.raises(ConfigError, match="get_per_1000: is in PriceOptions: StoreConfig"):
        torchobj.StoreConfig(get_per_1000=1)
