"""A signal to any rank is a request to stop, of which all ranks learn in the same call."""

import os
import signal
import threading
import time
import types

import pytest

from tests.support.managers import of_ranks, outcome, tensor
from tests.support.ranks import run_ranks
from torchobj.checkpoint import CheckpointManager
from torchobj.checkpoint.steps import stop_requests
from torchobj.exceptions import ConfigError


@pytest.fixture
def checkpoints():
    with CheckpointManager("memory://stop-requests/run") as manager:
        yield manager


def ask(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def test_one_rank_learns_of_a_signal_in_the_next_call(checkpoints):
    checkpoints.on_signal()
    assert [checkpoints.stop_requested() for _ in range(5)] == [False] * 5
    ask()
    assert [checkpoints.stop_requested() for _ in range(2)] == [True, True]


def test_the_handlers_are_restored_at_the_end_of_the_block_or_by_close():
    with CheckpointManager("memory://stop-requests/run") as checkpoints:
        with checkpoints.on_signal(signal.SIGUSR1, signal.SIGUSR2):
            ask(signal.SIGUSR2)
            assert checkpoints.stop_requested()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        checkpoints.on_signal(signal.SIGTERM)
        assert not checkpoints.stop_requested()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_after_the_last_call_has_its_effect_at_the_end_of_the_block(checkpoints, caplog):
    pid = os.fork()
    if pid == 0:
        with checkpoints.on_signal():
            checkpoints.stop_requested()
            ask()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    calls = []
    signal.signal(signal.SIGUSR1, lambda *_: calls.append(1))
    with checkpoints.on_signal(signal.SIGUSR1):
        ask(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert calls == [1]


def test_meetings_are_few_calls_apart_however_fast_the_calls_are(checkpoints):
    stop = checkpoints.on_signal()
    assert max(stop._calls for _ in range(1000) if not checkpoints.stop_requested()) == stop_requests._MAX_CALLS


def test_two_managers_learn_of_the_same_signal(checkpoints):
    with CheckpointManager("memory://stop-requests/other") as other, checkpoints.on_signal(), other.on_signal():
        ask()
        assert (checkpoints.stop_requested(), other.stop_requested()) == (True, True)


def test_a_handler_that_is_installed_later_is_called_too(checkpoints, monkeypatch):
    # Not that of other threads.
    monkeypatch.setattr(stop_requests, "time", types.SimpleNamespace(monotonic=iter(range(1000)).__next__))
    calls = []
    with checkpoints.on_signal(check_every_s=1.0):
        checkpoints.stop_requested()
        signal.signal(signal.SIGTERM, lambda *_: calls.append(1))
        checkpoints.stop_requested()
        ask()
        assert (checkpoints.stop_requested(), calls) == (True, [1])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.matrix
@pytest.mark.parametrize("theirs_is_later", [False, True])
def test_the_handler_of_the_trainer_of_transformers_is_called_too(checkpoints, theirs_is_later):
    jit = pytest.importorskip("transformers.trainer_jit_checkpoint").CheckpointManager(None, kill_wait=0)
    called = threading.Event()
    jit._enable_checkpoint = called.set
    if not theirs_is_later:
        jit.setup_signal_handler()
    requests = checkpoints.on_signal(check_every_s=0.001)
    if theirs_is_later:
        jit.setup_signal_handler()
    checkpoints.stop_requested()
    ask()
    assert (checkpoints.stop_requested(), called.wait(30)) == (True, True)
    requests.end()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize(
    "settings",
    [{"deadline_s": 0}, {"deadline_s": None}, {"check_every_s": float("nan")}, {"timeout_s": True}, {"timeout_s": 1e9}],
    ids=lambda settings: "-".join(settings),
)
def test_a_time_must_be_a_number_of_seconds(checkpoints, settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        checkpoints.on_signal(**settings)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_is_called_out_of_order_is_refused(checkpoints):
    with pytest.raises(ConfigError, match="on_signal first"):
        checkpoints.stop_requested()
    with checkpoints.on_signal(), pytest.raises(ConfigError, match="handled already"):
        checkpoints.on_signal()


def test_a_save_after_a_request_has_the_rest_of_the_deadline(checkpoints):
    with checkpoints.on_signal(deadline_s=20):
        assert checkpoints._deadline(None) is None
        ask()
        assert checkpoints._deadline(None) is None
        assert checkpoints.stop_requested()
        left_s = checkpoints._deadline(None)._end_s - time.monotonic()
        assert 0 < left_s <= 20
        checkpoints.save(1, {"x": tensor(1)})
    assert checkpoints.steps() == [1]


def test_a_deadline_that_a_long_step_has_used_up_starts_again(checkpoints, monkeypatch, caplog):
    clock = Clock()
    monkeypatch.setattr(stop_requests, "time", clock)
    with checkpoints.on_signal(deadline_s=20) as requests:
        checkpoints.stop_requested()
        ask()
        clock.now_s = requests._signals.received_s + 60
        assert checkpoints.stop_requested()
        assert requests.end_s == clock.now_s + 20
    assert "came 60 s ago" in caplog.text


class Clock:
    """Time that passes by a number of seconds for each call of `stop_requested`."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s


def meetings_of(rank, step_s, signalled, calls):
    """The numbers of calls in which the ranks met, and those that returned True, if some ranks get a signal."""
    clock, met = Clock(), []
    stop_requests.time = clock
    manager = of_ranks("memory://stop-requests/ranks", None)
    requests = manager.on_signal(check_every_s=1.0, timeout_s=60)
    agreed = requests._agreed
    requests._agreed = lambda *values: met.append(call) or agreed(*values)
    answers = []
    for call in range(calls):
        # The clocks of the ranks differ.
        clock.now_s += step_s * (1 + rank)
        if signalled.get(rank) == call:
            ask()
        answers.append(manager.stop_requested())
    manager.close()
    return met, answers.index(True) if True in answers else None


def test_ranks_meet_in_the_calls_that_the_clock_of_the_first_decides():
    both = run_ranks(meetings_of, 0.25, {}, 40)
    assert both[0] == both[1]
    assert both[0] == ([0, 1, 3, *range(7, 40, 4)], None)


@pytest.mark.parametrize(
    ("signalled", "expected"),
    [({0: 10}, 11), ({1: 10}, 11), ({0: 12, 1: 10}, 11), ({0: 11}, 11), ({1: 0}, 0)],
    ids=["first rank", "other rank", "both", "in the call", "before the first call"],
)
def test_all_ranks_learn_of_the_signal_of_any_in_the_same_call(signalled, expected):
    found = run_ranks(meetings_of, 0.25, signalled, 40)
    assert [answer for _, answer in found] == [expected, expected]


def steps_that_are_long(rank):
    return meetings_of(rank, 3.0, {1: 5}, 8)


def test_ranks_meet_in_each_call_if_steps_are_longer_than_the_time_between_checks():
    assert run_ranks(steps_that_are_long) == [([0, 1, 2, 3, 4, 5], 5)] * 2


def called_on_one_rank(rank, first):
    manager = of_ranks("memory://stop-requests/one", None)
    manager.on_signal(timeout_s=1)
    if not first:
        manager.stop_requested()
    # The other rank does not end before this one.
    return outcome(manager.stop_requested) if rank == 0 else None


@pytest.mark.parametrize("first", [True, False], ids=["never", "less often"])
def test_a_rank_that_does_not_call_it_is_an_error_within_the_timeout(first):
    kind, message = run_ranks(called_on_one_rank, first)[0]
    assert kind == "RankGoneError"
    assert "equally often on all ranks" in message
