"""Retention counts committed steps only and never deletes the latest one, also in random histories: 200, and 1000 with
those of `make matrix`."""

import itertools
import logging
import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchobj
from tests.support.long_tables import often
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager, KeepBest
from torchobj.checkpoint.archive.save import SavedObject
from torchobj.checkpoint.steps import restore, state_content
from torchobj.checkpoint.steps.retention import Retention, expired

_names = itertools.count()


class Step(NamedTuple):
    step: int
    metrics: dict[str, float]
    time: int


RULES = st.just(Retention(None)) | st.builds(
    Retention,
    st.integers(1, 4),
    st.none() | st.integers(1, 5),
    st.none() | st.builds(KeepBest, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
)
METRICS = st.fixed_dictionaries({}, optional={"loss": st.floats(width=16)})
#: In commit order.
COMMITTED = st.dictionaries(st.integers(0, 30), METRICS, max_size=12)


def kept_by(rules, metrics):
    """A second implementation of the rules: the steps that a rule keeps. `metrics` is in commit order."""
    order = list(metrics)
    losses = {step: there["loss"] for step, there in metrics.items() if there.get("loss") == there.get("loss", 0.0)}

    def better(one, other):
        if losses[one] == losses[other]:
            return one > other
        return (losses[one] < losses[other]) == (rules.keep_best.mode == "min")

    def is_kept(step):
        if rules.keep_last is None or sum(other > step for other in metrics) < rules.keep_last:
            return True
        if step in order[-rules.keep_last :]:
            return True
        if rules.keep_every is not None and step % rules.keep_every == 0:
            return True
        if rules.keep_best is None or "loss" not in metrics[step] or step not in losses:
            return False
        return sum(better(other, step) for other in losses if "loss" in metrics[other]) < rules.keep_best.count

    return {step for step in metrics if is_kept(step)}


@given(COMMITTED, RULES, st.sets(st.integers(0, 30)))
def test_deleted_steps_are_those_that_no_rule_keeps_and_never_the_latest(metrics, rules, protected):
    committed = [Step(step, there, time) for time, (step, there) in enumerate(metrics.items())]
    going = expired(committed, rules, protected)
    assert going == sorted(metrics.keys() - kept_by(rules, metrics) - protected)
    assert not metrics or max(metrics) not in going


@pytest.mark.parametrize(
    "given",
    [
        {"keep_last": 0},
        {"keep_last": True},
        {"keep_last": 2.0},
        {"keep_every": -1},
        {"keep_best": "loss"},
        {"keep_best": ("loss", "least", 2)},
        {"keep_best": ("loss", "min", 0)},
        {"keep_best": ("loss",)},
        {"keep_last": None, "keep_every": 10},
        {"keep_last": None, "keep_best": ("loss", "min", 1)},
    ],
)
def test_an_invalid_rule_is_refused_by_name(given):
    name = next(iter(given))
    with pytest.raises(exceptions.ConfigError, match=name):
        CheckpointManager("memory://rules", **given)


class Killed(BaseException):
    """The process was killed."""


class Fault(NamedTuple):
    """The fault of `length` requests from a number on."""

    number: int
    length: int
    performed: bool
    kills: bool


class Requests:
    """Counts the requests of a manager, and fails some of them; after a kill there are no others."""

    def __init__(self, fault):
        self.fault, self.count, self.dead = fault, 0, False

    def make(self, perform):
        if self.dead:
            raise Killed
        self.count += 1
        if self.fault is None or not 0 <= self.count - self.fault.number < self.fault.length:
            return perform()
        self.dead = self.fault.kills
        if self.fault.performed:
            perform()
        raise Killed if self.fault.kills else exceptions.StoreConnectionError("the answer was lost")


class FaultyStore:
    """A store whose calls count as requests."""

    def __init__(self, store, requests):
        self._store, self._requests = store, requests

    def __getattr__(self, name):
        value = getattr(self._store, name)
        if not callable(value):
            return value
        return lambda *given, **named: self._requests.make(lambda: value(*given, **named))


class History:
    """Saves, failures and restarts of a job, and a model of the expected steps."""

    def __init__(self, seed, monkeypatch):
        self.random = random.Random(seed)
        self.url = f"memory://history-{next(_names)}/run"
        self.requests = Requests(None)
        #: By step: the values of attempts that may have been committed.
        self.attempted: dict[int, set[int]] = {}
        self.metrics: dict[int, dict[str, float]] = {}
        self.newest = -1
        self.numbers = itertools.count()
        raw = torchobj.Store(f"memory://{self.url.split('/')[2]}")
        self.key = lambda url: url.removeprefix(f"{raw.url}/")

        # torch's format is not tested here, and would take most of the time.
        def write(state, url, config, counted):
            body = b"%d" % state["value"]
            self.requests.make(lambda: raw.put(self.key(url), body))
            return SavedObject(url, len(body), ""), None

        monkeypatch.setattr(state_content, "save_counted", write)
        monkeypatch.setattr(
            restore, "load_counted", lambda url, *_, **__: {"value": int(bytes(raw.get(self.key(url))))}
        )
        self.restart()

    def restart(self):
        draw = self.random
        self.rules = Retention(
            draw.choice([1, 1, 2, 3]),
            draw.choice([None, None, 4]),
            draw.choice([None, KeepBest("loss", draw.choice(["min", "max"]), draw.choice([1, 2]))]),
        )
        rules = self.rules
        self.manager = CheckpointManager(self.url, rules.keep_last, rules.keep_every, rules.keep_best)
        self.true_store = self.manager._commits.store

    def steps(self):
        return set(CheckpointManager(self.url).steps())

    def fault(self):
        draw = self.random
        if draw.random() < 0.4:
            return None
        return Fault(
            draw.randrange(1, 14), draw.choice([1, 1, 2, 3]), performed=draw.random() < 0.5, kills=draw.random() < 0.5
        )

    def act(self, work):
        """Does some work, with a fault or without; returns whether it succeeded, and whether the fault occurred."""
        self.requests = Requests(self.fault())
        self.manager._commits.store = FaultyStore(self.true_store, self.requests)
        try:
            work()
            done = True
        except (Killed, exceptions.StoreError, exceptions.CheckpointError):
            done = False
        self.met = self.requests.fault
        met = self.met is not None and self.requests.count >= self.requests.fault.number
        if self.requests.dead:
            self.restart()
        self.requests = Requests(None)
        self.manager._commits.store = self.true_store
        return done, met

    def save(self):
        draw = self.random
        step = draw.randrange(max(0, self.newest - 3), self.newest + 4)
        value, rules, before = next(self.numbers), self.rules, self.steps()
        loss = {"loss": draw.choice([1.0, 2.0, 3.0, float("nan")])} if draw.random() < 0.9 else {}
        state = {"value": value}
        overwrite = draw.random() < 0.3
        self.attempted.setdefault(step, set()).add(value)
        done, met = self.act(lambda: self.manager.save(step, state, loss, overwrite=overwrite))
        after = self.steps()
        if step in after and CheckpointManager(self.url).restore(step)["value"] == value:
            # One lost response is not a failure.
            assert done or self.met.kills or self.met.length > 1
            self.metrics.pop(step, None)
            self.attempted[step], self.metrics[step] = {value}, loss
            self.newest = max(self.newest, step)
            committed = before | {step}
        else:
            self.attempted[step].discard(value)
            committed = before
            assert not done
        kept = kept_by(rules, {known: there for known, there in self.metrics.items() if known in committed})
        assert kept <= after, (kept, after)
        assert after <= committed
        if done and not met:
            assert after == kept | {step}

    def delete(self):
        going = self.random.choice(sorted(self.steps()) or [0])
        if going != self.newest:
            before = self.steps()
            self.act(lambda: self.manager.delete(going))
            assert before - {going} <= self.steps()

    def check(self):
        """The latest committed step exists, and each step loads as it was saved."""
        there = self.steps()
        assert self.newest == -1 or self.newest in there
        assert self.manager.latest() == (None if self.newest == -1 else self.newest)
        for step in there:
            assert self.manager.restore(step)["value"] in self.attempted[step]

    def sweep(self):
        """Deletes everything but committed steps."""
        self.act(lambda: self.manager.sweep(0))
        listed = {info.key for info in self.true_store.list("run/")}
        left = {f"run/{item.key}" for item in self.manager.leftovers()}
        assert {f"run/{item.key}" for item in self.manager.sweep(0)} == left
        assert {info.key for info in self.true_store.list("run/")} == listed - left
        assert self.manager.leftovers() == []
        folders = {key.split("/")[2] for key in listed - left if key.startswith("run/steps/")}
        assert len(folders) == len(self.steps())

    def run(self):
        for _ in range(self.random.randrange(4, 10)):
            self.random.choices([self.save, self.restart, self.delete, self.sweep], [12, 2, 1, 1])[0]()
            self.check()
        self.sweep()
        self.check()


@pytest.mark.parametrize("hundred", often(1, range(10)))
def test_no_history_loses_the_latest_step_or_one_that_a_rule_keeps(hundred, monkeypatch):
    logging.getLogger("torchobj").setLevel(logging.CRITICAL)
    try:
        for seed in range(100 * hundred, 100 * hundred + 100):
            with monkeypatch.context() as patch:
                history = History(seed, patch)
                try:
                    history.run()
                except AssertionError as error:
                    error.add_note(f"seed {seed}")
                    raise
    finally:
        logging.getLogger("torchobj").setLevel(logging.NOTSET)


def test_histories_cover_every_request_of_a_save_with_faults(monkeypatch):
    """The request numbers of `Fault` include the last request of the longest save."""
    requests = Requests(None)
    real_save = state_content.save_counted
    monkeypatch.setattr(
        state_content, "save_counted", lambda *given, **named: requests.make(lambda: real_save(*given, **named))
    )
    checkpoints = CheckpointManager("memory://count/run", keep_last=1)
    checkpoints._commits.store = FaultyStore(checkpoints._commits.store, requests)
    checkpoints.save(1, {})
    checkpoints.save(2, {})
    requests.count = 0
    checkpoints.save(2, {}, overwrite=True)
    assert 8 <= requests.count <= 13
