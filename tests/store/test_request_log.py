"""DEBUG logs one line for each request, without secrets."""

import logging
import re

import pytest

import torchobj
from tests.support.prefetching import eventually
from torchobj import exceptions

pytestmark = pytest.mark.providers("s3", "gs")

LINE = re.compile(
    r"(?P<operation>[a-z ]+) (?P<url>(s3|gs)://.+): (?P<status>\d+), (?P<sent>\d+) bytes sent, (?P<received>\d+) to "
    r"receive, [\d.]+ ms"
)


def lines(caplog):
    return [found for record in caplog.records if (found := LINE.fullmatch(record.getMessage()))]


@pytest.fixture
def logged(caplog, bucket):
    """A store whose requests are logged."""
    caplog.set_level(logging.DEBUG, "torchobj")
    store = torchobj.Store(bucket.url, config=bucket.config)

    def is_logged():
        store.put("first", b"x")
        return bool(lines(caplog))

    # The level is read once a second.
    assert eventually(is_logged)
    caplog.clear()
    return store


def test_each_request_is_one_line_with_its_status_and_bytes(logged, bucket, caplog):
    logged.put("a key", b"12345")
    assert bytes(logged.get("a key")) == b"12345"
    with pytest.raises(exceptions.ObjectNotFoundError):
        logged.get("missing?x=1#y")
    found = lines(caplog)
    assert [(line["operation"], line["url"]) for line in found] == [
        ("put", f"{logged.url}/a key"),
        ("get", f"{logged.url}/a key"),
        ("get", f"{logged.url}/missing?x=1#y"),
    ]
    # A request to Google Cloud Storage contains attributes too.
    assert [int(line["sent"]) >= size for line, size in zip(found, (5, 0, 0), strict=True)] == [True] * 3
    assert [line["sent"] for line in found[1:]] == ["0", "0"]
    assert [line["status"] for line in found] in (["200", "200", "404"], ["200", "206", "404"])
    assert found[1]["received"] == "5"


def test_each_attempt_is_a_line(logged, control, caplog):
    control.faults({"operation": "GetObject", "times": 2, "action": {"status": 503, "code": "SlowDown"}})
    logged.get("first")
    assert [line["status"] for line in lines(caplog)][:2] == ["503", "503"]
    assert len(lines(caplog)) == 3


def test_a_retry_is_logged_with_one_number_of_attempts(logged, control, caplog):
    control.faults({"operation": "GetObject", "times": 3, "action": {"status": 500}})
    logged.get("first")
    retries = [record.getMessage() for record in caplog.records if "retrying" in record.getMessage()]
    assert [re.findall("attempt", text) for text in retries] == [["attempt"]] * 3
    assert [re.search(r"after (\d) attempt", text)[1] for text in retries] == ["1", "2", "3"]


def test_a_listing_is_logged_without_its_query_and_credentials(logged, caplog):
    list(logged.list("prefix/"))
    assert [line["operation"] for line in lines(caplog)] == ["list"]
    told = caplog.text.lower()
    for secret in ("signature", "authorization", "bearer", "x-amz", "secret", "list-type", "pagetoken", "?"):
        assert secret not in told, caplog.text


def test_an_interrupt_while_an_event_is_delivered_ends_the_call(logged):
    class Interrupted(logging.Handler):
        def emit(self, record):
            raise KeyboardInterrupt

    handler = Interrupted()
    logging.getLogger("torchobj").addHandler(handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            logged.get("first")
    finally:
        logging.getLogger("torchobj").removeHandler(handler)


def test_an_interrupt_while_the_level_is_read_ends_the_call(logged, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    def is_raised():
        try:
            logged.get("first")
        except KeyboardInterrupt:
            return True
        return False

    with monkeypatch.context() as patched:
        patched.setattr(logging.getLogger("torchobj"), "getEffectiveLevel", interrupted)
        assert eventually(is_raised, 10)
    assert bytes(logged.get("first")) == b"x"


def test_nothing_is_logged_at_another_level(bucket, caplog):
    caplog.set_level(logging.INFO, "torchobj")
    store = torchobj.Store(bucket.url, config=bucket.config)

    def is_silent():
        caplog.clear()
        store.put("k", b"")
        return not lines(caplog)

    assert eventually(is_silent)
