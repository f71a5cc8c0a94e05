"""Exceptions are what people already catch, and come back whole from a DataLoader worker and from a pickle."""

import inspect
import pickle

import pytest
from torch._utils import ExceptionWrapper

import torchobj
from torchobj import exceptions

CLASSES = [value for _, value in inspect.getmembers(exceptions, inspect.isclass) if issubclass(value, Exception)]


def test_all_are_listed_and_all_are_torchobj_errors():
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
def test_each_is_the_builtin_that_people_catch(kind, builtin):
    assert issubclass(kind, builtin)


@pytest.mark.parametrize("kind", CLASSES)
def test_each_survives_a_pickle_and_a_worker(kind):
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


def test_an_error_says_what_was_done_to_what_and_how_often():
    store = torchobj.Store("memory://errors")
    with pytest.raises(FileNotFoundError) as caught:
        store.get("missing")
    error = caught.value
    assert (error.operation, error.url, error.attempts, error.status) == ("get", "memory://errors/missing", 1, None)
    assert str(error) == "get memory://errors/missing: no such object"
