"""Exceptions are also the builtins that users catch, and survive pickling and DataLoader workers."""

import inspect
import pickle

import pytest
from torch._utils import ExceptionWrapper

import torchobj
from torchobj import exceptions

CLASSES = [value for _, value in inspect.getmembers(exceptions, inspect.isclass) if issubclass(value, Exception)]


def test_all_exceptions_are_exported_and_derive_from_torchobj_error():
    assert sorted(kind.__name__ for kind in CLASSES) == sorted(exceptions.__all__)
    assert all(issubclass(kind, exceptions.TorchobjError) for kind in CLASSES)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (exceptions.ObjectNotFoundError, FileNotFoundError),
        (exceptions.BucketNotFoundError, FileNotFoundError),
        (exceptions.AccessDeniedError, PermissionError),
        (exceptions.CredentialsError, PermissionError),
        (exceptions.PreconditionFailedError, FileExistsError),
        (exceptions.StoreTimeoutError, TimeoutError),
        (exceptions.StoreConnectionError, ConnectionError),
        (exceptions.ConfigError, ValueError),
        (exceptions.RangeError, ValueError),
        (exceptions.StoreError, OSError),
    ],
)
def test_each_is_also_the_builtin_that_users_catch(kind, builtin):
    assert issubclass(kind, builtin)


@pytest.mark.parametrize("kind", CLASSES)
def test_each_survives_pickling_and_a_worker(kind):
    error = kind("get s3://b/k: 503 SlowDown (request id R)")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    try:
        raise error
    except kind as raised:
        wrapper = ExceptionWrapper(exc_info=(kind, raised, raised.__traceback__), where="in a worker")
    with pytest.raises(kind) as caught:
        wrapper.reraise()
    assert "request id R" in str(caught.value)


def test_an_error_has_the_operation_the_object_and_the_attempts():
    store = torchobj.Store("memory://errors")
    with pytest.raises(FileNotFoundError) as caught:
        store.get("missing")
    error = caught.value
    assert (error.operation, error.url, error.attempts, error.status) == ("get", "memory://errors/missing", 1, None)
    assert str(error) == "get memory://errors/missing: no such object"
