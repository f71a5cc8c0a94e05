"""`credential_provider=`: invalid values, pickling and comparison, and what errors show of a provider's result."""

import copy
import dataclasses
import functools
import pickle
import threading
from datetime import UTC, datetime

import pytest

import torchobj
from tests.support.credential_providers import CANARY, fixed
from torchobj import GCSOptions, S3Options, StoreConfig
from torchobj.config.credentials import CredentialSource, source_of
from torchobj.exceptions import ConfigError


@pytest.mark.parametrize("kind", [S3Options, GCSOptions])
@pytest.mark.parametrize("value", ["module:function", {"access_key_id": CANARY}, 5])
def test_a_value_that_is_not_callable_is_refused_and_only_its_type_is_shown(kind, value):
    with pytest.raises(ConfigError, match=f"^credential_provider={type(value)}: must be a callable, or None$"):
        kind(credential_provider=value)


@pytest.mark.parametrize(
    ("kind", "other"),
    [(S3Options, {"profile": "p"}), (S3Options, {"anonymous": True}), (GCSOptions, {"anonymous": True})],
)
def test_two_sources_of_credentials_are_refused_with_both_names(kind, other):
    name = next(iter(other))
    with pytest.raises(ConfigError, match=f"^credential_provider: must be None if {name} is set$"):
        kind(credential_provider=fixed, **other)


def test_a_provider_is_pickled_with_the_configuration():
    config = StoreConfig(s3=S3Options(credential_provider=fixed), gcs=GCSOptions(credential_provider=fixed))
    again = pickle.loads(pickle.dumps(config))
    assert (again, hash(again)) == (config, hash(config))
    assert again.s3.credential_provider is again.gcs.credential_provider is fixed
    assert "fixed" not in repr(config)
    assert again.gcs._credential_source is source_of(fixed)
    assert GCSOptions()._credential_source is None


class Holder:
    """A provider that holds an object that cannot be pickled."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self):
        return fixed()


@pytest.mark.parametrize("provider", [lambda: fixed(), Holder()])
def test_pickling_a_provider_that_cannot_be_pickled_raises_an_error_with_the_alternative(provider):
    s3 = StoreConfig(s3=S3Options(credential_provider=provider))
    gcs = StoreConfig(gcs=GCSOptions(credential_provider=provider))
    for thing in (s3, gcs, torchobj.Store("s3://any", config=s3)):
        with pytest.raises(ConfigError, match="cannot be pickled .*: pass a function of a module, or an instance"):
            pickle.dumps(thing)
    for config, name in ((s3, "s3"), (gcs, "gcs")):
        for copied in (copy.copy(config), copy.deepcopy(config), dataclasses.replace(config, hedge=False)):
            assert getattr(copied, name).credential_provider is provider


class Unhashable:
    __hash__ = None

    def __call__(self):
        return fixed()


@dataclasses.dataclass(frozen=True)
class Role:
    name: str

    def __call__(self):
        return fixed()


def test_equal_providers_share_one_source_and_a_provider_without_a_hash_has_its_own():
    assert source_of(Role("a")) is source_of(Role("a"))
    assert source_of(Role("a")) is not source_of(Role("b"))
    one, other = Unhashable(), Unhashable()
    assert source_of(one) is source_of(one)
    assert source_of(one) is not source_of(other)
    assert isinstance(hash(StoreConfig(s3=S3Options(credential_provider=one))), int)


class Outcome:
    """Receives the outcome of a call, as the core does."""

    def __init__(self):
        self.taken, self.given = threading.Event(), None

    def credentials(self, *values):
        self.given = values
        self.taken.set()

    def error(self, message):
        self.given = message
        self.taken.set()


def outcome_of(provider):
    outcome = Outcome()
    CredentialSource(provider).start(outcome)
    assert outcome.taken.wait(10)
    return outcome.given


GOOD = {"access_key_id": "a", "secret_access_key": CANARY, "expires_at": None}


def test_the_credentials_of_a_provider_reach_the_core():
    assert outcome_of(lambda: GOOD) == ("a", CANARY, None, None)
    expires = datetime.fromtimestamp(2e9, UTC)
    assert outcome_of(lambda: GOOD | {"token": "t", "expires_at": expires}) == ("a", CANARY, "t", 2e9)
    assert outcome_of(lambda: {"token": "of GCS", "expires_at": expires}) == (None, None, "of GCS", 2e9)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (CANARY, "returned <class 'str'>: must be a dict"),
        (None, "returned <class 'NoneType'>: must be a dict"),
        (
            GOOD | {"secret_access_key": CANARY.encode()},
            "returned 'secret_access_key' as <class 'bytes'>: must be a str",
        ),
        (GOOD | {"token": {"t": CANARY}}, "returned 'token' as <class 'dict'>: must be a str"),
        ({"access_key_id": CANARY}, "returned no 'expires_at': must be a datetime, or None"),
        (GOOD | {"expires_at": "2030-01-01T00:00:00Z"}, "returned 'expires_at' as <class 'str'>: must be a datetime"),
        (GOOD | {"expires_at": datetime(2030, 1, 1)}, "returned 'expires_at' without a time zone"),  # noqa: DTZ001
    ],
)
def test_an_invalid_result_is_described_without_its_values(returned, message):
    told = outcome_of(lambda: returned)
    assert told.startswith(f"credential_provider {message}")
    assert CANARY not in told


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "message"),
    [(KeyError("x"), "KeyError: 'x'"), (SystemExit(3), "SystemExit: 3"), (Unprintable(), "Unprintable")],
)
def test_an_exception_of_a_provider_is_reported_with_type_and_message(error, message):
    def provider():
        raise error

    assert outcome_of(provider) == f"credential_provider raised {message}"


def test_the_provider_and_its_attributes_are_not_in_the_repr():
    options = S3Options(credential_provider=functools.partial(dict, secret_access_key=CANARY))
    assert CANARY not in repr(options) + repr(StoreConfig(s3=options))
