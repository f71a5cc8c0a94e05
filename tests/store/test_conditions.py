"""Conditions of a write have one form, and the error for a contradiction names both arguments."""

import pytest

import torchobj
from torchobj import exceptions


def test_each_form_is_the_condition_of_a_write():
    store = torchobj.Store("memory://forms")
    first = store.put("k", b"1", overwrite=False)
    with pytest.raises(exceptions.PreconditionFailedError):
        store.put("k", b"2", overwrite=False)
    assert store.put("k", b"2", if_version=first) != first
    with pytest.raises(exceptions.PreconditionFailedError):
        store.put("k", b"3", if_version=first)
    store.put("k", b"4")
    assert bytes(store.get("k")) == b"4"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"overwrite": False, "if_version": "v"}, ["overwrite=False", "if_version='v'"]),
        ({"overwrite": "no"}, ["overwrite='no'"]),
        ({"overwrite": None}, ["overwrite=None"]),
        ({"if_version": 3}, ["if_version=3"]),
        ({"if_version": True}, ["if_version=True"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_contradictions_and_wrong_types_are_named_in_the_error_and_nothing_is_written(given, names):
    store = torchobj.Store("memory://contradictions")
    with pytest.raises(exceptions.ConfigError) as caught:
        store.put("k", b"x", **given)
    assert all(name in str(caught.value) for name in names)
    assert isinstance(caught.value, ValueError)
    assert list(store.list()) == []


@pytest.mark.parametrize("mode", ["rb", "wb", "xb", "r", "w", "x"])
@pytest.mark.parametrize("given", [{"overwrite": "no"}, {"overwrite": 0}, {"overwrite": None}, {"if_version": 3}])
def test_a_condition_of_a_wrong_type_is_refused_by_open_in_each_mode(mode, given):
    store = torchobj.Store("memory://wrong-types")
    name, value = next(iter(given.items()))
    for opened in (torchobj.open, lambda url, *rest, **more: store.open(url.rpartition("/")[2], *rest, **more)):
        with pytest.raises(exceptions.ConfigError, match=f"{name}={value!r}"):
            opened("memory://wrong-types/k", mode, **given)
    assert list(store.list()) == []


@pytest.mark.parametrize(
    ("mode", "given"),
    [
        ("rb", {"overwrite": False}),
        ("rb", {"if_version": "v"}),
        ("xb", {"if_version": "v"}),
        ("wb", {"overwrite": False, "if_version": "v"}),
    ],
)
def test_a_condition_that_conflicts_with_the_mode_is_refused(mode, given):
    with pytest.raises(exceptions.ConfigError, match="exclude each other"):
        torchobj.open("memory://contradictions/k", mode, **given)


def test_a_version_deletes_one_key_only():
    store = torchobj.Store("memory://versions")
    with pytest.raises(exceptions.ConfigError, match=r"if_version='v': requires a single key, got 2"):
        store.delete(["a", "b"], if_version="v")
