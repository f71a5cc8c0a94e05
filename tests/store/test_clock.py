"""Every operation of S3 works with a clock that differs from the server's, also as the first one of a process."""

import dataclasses
import uuid

import pytest

import torchobj

#: Seconds by which the server's clock is ahead; S3 refuses 15 minutes.
SKEWS_S = (1200, -1200)


@pytest.fixture(params=[SKEWS_S[0], pytest.param(SKEWS_S[1], marks=pytest.mark.matrix)])
def store(bucket, control, request):
    """A store with an identity of its own, so that nothing is known about the clock yet."""
    for key in ("k", "x/1", "x/2"):
        bucket.write(key, b"x")
    key, secret = uuid.uuid4().hex[:20], "S" * 20
    control.account(key, secret)
    s3 = dataclasses.replace(bucket.config.s3, profile=None, access_key_id=key, secret_access_key=secret)
    fresh = torchobj.Store(bucket.url, config=dataclasses.replace(bucket.config, s3=s3))
    control.clock(request.param)
    return fresh


def upload(store):
    with torchobj.open(f"{store.url}/large", "wb", config=store.config) as file:
        file.write(bytes(17 << 20))


def aborted(store):
    file = torchobj.open(f"{store.url}/large", "wb", config=store.config)
    file.write(bytes(17 << 20))
    file.abort()


OPERATIONS = {
    "get": lambda store: store.get("k"),
    "head": lambda store: store.head("k"),
    "list": lambda store: list(store.list("x/")),
    "put": lambda store: store.put("new", b"x"),
    "delete": lambda store: store.delete(["k"]),
    "delete many": lambda store: store.delete(["x/1", "x/2"]),
    "delete if": lambda store: store.delete("k", if_version='"9dd4e461268c8034f5c8564e155c67a6"'),
    "copy": lambda store: store.copy(f"{store.url}/k", "copied"),
    "upload": upload,
    "abort": aborted,
    "uploads": lambda store: list(store.unfinished_uploads()),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("delete", "copy", "uploads") else pytest.param(name, marks=pytest.mark.matrix)
        for name in OPERATIONS
    ],
)
def test_an_operation_uses_the_clock_of_the_server(store, name):
    OPERATIONS[name](store)


@pytest.mark.parametrize("name", ["delete many", pytest.param("upload", marks=pytest.mark.matrix)])
def test_an_operation_through_the_sdk_uses_the_clock_that_another_has_found(store, control, name):
    store.get("k")
    control.clear_requests()
    OPERATIONS[name](store)
    assert all(request.code != "RequestTimeTooSkewed" for request in control.requests())


@pytest.mark.matrix
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_with_force_sdk_uses_the_clock_of_the_server(store, name):
    s3 = dataclasses.replace(store.config.s3, force_sdk=True)
    OPERATIONS[name](torchobj.Store(store.url, config=dataclasses.replace(store.config, s3=s3)))
