"""Signals that ask to stop are noted, those that were handled before still are, and workers outlive them."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import torch

import torchobj
from tests.support.forking import in_child
from torchobj.exceptions import ConfigError
from torchobj.workers import stop_signals
from torchobj.workers.stop_signals import StopSignals

NUMBER = signal.SIGUSR2
#: Longer than a test.
DEADLINE_S = 600.0


@pytest.fixture(autouse=True)
def _restored():
    before = signal.getsignal(NUMBER)
    yield
    stop_signals._active.clear()
    signal.signal(NUMBER, before)


class Handler:
    """A handler of a program, with the one that it calls."""

    def __init__(self, previous=None):
        self.calls, self.previous = 0, previous

    def __call__(self, number, frame):
        self.calls += 1
        if self.previous is not None:
            self.previous(number, frame)


def raised():
    signal.raise_signal(NUMBER)


def raised_late(monkeypatch):
    """Raises a signal, and another one when the deadline has passed. Returns whether signals are handled then."""
    now_s = [0.0]
    monkeypatch.setattr(stop_signals, "time", types.SimpleNamespace(monotonic=lambda: now_s[0]))
    stop = StopSignals([NUMBER], 25.0)
    raised()
    now_s[0] = 25.0
    raised()
    assert stop.is_active
    now_s[0] = 25.5
    raised()
    return stop.is_active


def test_a_signal_after_the_deadline_has_its_usual_effect(monkeypatch):
    earlier = Handler()
    signal.signal(NUMBER, earlier)
    assert not raised_late(monkeypatch)
    assert (signal.getsignal(NUMBER), earlier.calls) == (earlier, 3)
    pid = os.fork()
    if pid == 0:
        signal.signal(NUMBER, signal.SIG_DFL)
        raised_late(monkeypatch)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -NUMBER


def test_a_signal_is_noted_once_and_the_earlier_handler_is_called():
    earlier = Handler()
    signal.signal(NUMBER, earlier)
    stop = StopSignals([NUMBER, NUMBER], DEADLINE_S)
    assert stop.received_s is None
    raised()
    first_s = stop.received_s
    raised()
    assert (stop.received_s, earlier.calls) == (first_s, 2)
    assert first_s <= time.monotonic()
    stop.end()
    assert signal.getsignal(NUMBER) is earlier


@pytest.mark.parametrize("default", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "ignored"])
def test_the_default_action_is_not_taken_and_is_restored(default):
    signal.signal(NUMBER, default)
    stop = StopSignals([NUMBER], DEADLINE_S)
    raised()
    assert stop.received_s is not None
    stop.end()
    assert signal.getsignal(NUMBER) is default


def test_ctrl_c_does_not_interrupt_while_it_is_handled():
    stop = StopSignals([signal.SIGINT], DEADLINE_S)
    signal.raise_signal(signal.SIGINT)
    assert stop.received_s is not None
    stop.end()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_several_note_the_same_signal_and_end_in_any_order(first_to_end):
    signal.signal(NUMBER, signal.SIG_DFL)
    both = [StopSignals([NUMBER], DEADLINE_S), StopSignals([NUMBER], DEADLINE_S)]
    ended, other = both[first_to_end], both[1 - first_to_end]
    ended.end()
    raised()
    assert (ended.received_s, other.received_s is None) == (None, False)
    other.end()
    assert signal.getsignal(NUMBER) is signal.SIG_DFL


def test_a_handler_that_was_installed_later_and_calls_ours_stays():
    earlier = Handler()
    signal.signal(NUMBER, earlier)
    stop = StopSignals([NUMBER], DEADLINE_S)
    later = Handler(signal.getsignal(NUMBER))
    signal.signal(NUMBER, later)
    raised()
    assert (earlier.calls, later.calls, stop.received_s is None) == (1, 1, False)
    stop.end()
    assert signal.getsignal(NUMBER) is later
    raised()
    assert (earlier.calls, later.calls) == (2, 2)


def test_a_handler_that_replaced_ours_is_called_besides_it():
    earlier = Handler()
    signal.signal(NUMBER, earlier)
    stop, later = StopSignals([NUMBER], DEADLINE_S), Handler()
    signal.signal(NUMBER, later)
    stop.keep()
    stop.keep()
    raised()
    assert (later.calls, earlier.calls, stop.received_s is None) == (1, 0, False)
    stop.end()
    assert signal.getsignal(NUMBER) is later


def test_a_framework_that_restores_ours_after_it_was_replaced_leaves_nothing_behind():
    signal.signal(NUMBER, signal.SIG_DFL)
    stop = StopSignals([NUMBER], DEADLINE_S)
    replaced = signal.getsignal(NUMBER)
    signal.signal(NUMBER, Handler())
    stop.keep()
    signal.signal(NUMBER, replaced)
    stop.keep()
    raised()
    assert stop.received_s is not None
    stop.end()
    assert signal.getsignal(NUMBER) is signal.SIG_DFL


def ended_under_a_later_handler():
    signal.signal(NUMBER, signal.SIG_DFL)
    stop = StopSignals([NUMBER], DEADLINE_S)
    signal.signal(NUMBER, Handler(signal.getsignal(NUMBER)))
    stop.end()
    pid = os.fork()
    if pid == 0:
        raised()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def test_after_the_end_a_later_handler_still_gets_the_default_action():
    assert in_child(ended_under_a_later_handler) == repr(int(NUMBER))


@pytest.mark.parametrize(
    "numbers", [[], [signal.SIGKILL], [signal.SIGCHLD], [signal.SIGSEGV], [0], [1000], ["SIGTERM"], [True]], ids=str
)
def test_what_is_no_request_to_stop_is_refused(numbers):
    with pytest.raises(ConfigError, match="on_signal"):
        StopSignals(numbers, DEADLINE_S)
    assert stop_signals._active == []


def test_another_thread_is_refused():
    errors = []

    def handle():
        try:
            StopSignals([NUMBER], DEADLINE_S)
        except ConfigError as error:
            errors.append(str(error))

    thread = threading.Thread(target=handle)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


def test_a_forked_child_has_the_earlier_handlers_and_mask():
    earlier = Handler()
    signal.signal(NUMBER, earlier)
    StopSignals([NUMBER], DEADLINE_S)
    child = in_child(lambda: (signal.getsignal(NUMBER) is earlier, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    assert child == "(True, set())"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


class Slow(torch.utils.data.Dataset):
    """Samples that are the pid of the worker; and those of a worker that waits for a program which it terminates."""

    def __init__(self, terminates=False):
        self.terminates = terminates

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.terminates:
            process = subprocess.Popen(["sleep", "60"])
            process.terminate()
            assert process.wait() == -signal.SIGTERM
        return os.getpid()


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, torchobj.DataLoader], ids=["torch", "torchobj"])
def test_forked_workers_outlive_the_signals_of_others(kind):
    stop = StopSignals([signal.SIGTERM], DEADLINE_S)
    batches = iter(kind(Slow(), num_workers=1, multiprocessing_context="fork"))
    worker = int(next(batches)[0])
    # Not from the parent, which may end its workers.
    subprocess.run(["kill", "-TERM", str(worker)], check=True)
    assert [int(batch[0]) for batch in batches] == [worker] * 7
    stop.end()


def load_all(workers, samples):
    """A trainer that tells the pid of its worker, and the samples."""
    stop = StopSignals([signal.SIGTERM], DEADLINE_S)
    batches = iter(torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"))
    workers.put(int(next(batches)[0]))
    samples.put(len(list(batches)))
    stop.end()


def test_workers_outlive_the_signals_of_the_launcher_of_their_trainer():
    context = multiprocessing.get_context("fork")
    workers, samples = context.SimpleQueue(), context.SimpleQueue()
    trainer = context.Process(target=load_all, args=(workers, samples))
    trainer.start()
    os.kill(workers.get(), signal.SIGTERM)
    assert samples.get() == 7
    trainer.join()


def test_a_worker_ends_by_the_signal_of_its_trainer():
    stop = StopSignals([signal.SIGTERM], DEADLINE_S)
    batches = iter(torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"))
    next(batches)
    [worker] = batches._workers
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == 0
    stop.end()


def test_the_programs_of_a_worker_can_be_terminated():
    stop = StopSignals([signal.SIGTERM], DEADLINE_S)
    loader = torch.utils.data.DataLoader(Slow(terminates=True), num_workers=1, multiprocessing_context="fork")
    assert len(list(loader)) == 8
    stop.end()


def test_other_children_can_be_terminated():
    stop = StopSignals([signal.SIGTERM], DEADLINE_S)
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(30)
        assert child.exitcode == -signal.SIGTERM
    stop.end()


_STARTED = """
import multiprocessing, signal, subprocess, sys, time
from multiprocessing import forkserver
import torchobj
from tests.workers.test_stop_signals import Slow
from torchobj.workers.stop_signals import StopSignals

def end(*pids):
    subprocess.run(["kill", "-TERM", *map(str, pids)], check=True)

if __name__ == "__main__":
    method = sys.argv[1]
    stop = StopSignals([signal.SIGTERM], DEADLINE_S)
    batches = iter(torchobj.DataLoader(Slow(), num_workers=1, multiprocessing_context=method, lookahead=0))
    [worker] = batches._workers
    if method == "spawn":
        end(worker.pid)
    next(batches)
    end(worker.pid)
    if method == "forkserver":
        end(forkserver._forkserver._forkserver_pid)
    other = multiprocessing.get_context(method).Process(target=time.sleep, args=(60,))
    other.start()
    other.terminate()
    other.join(30)
    print(sum(int(batch[0]) == worker.pid for batch in batches), other.exitcode)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_outlive_the_signals_of_others(method, tmp_path):
    script = tmp_path / "started.py"
    script.write_text(_STARTED)
    done = subprocess.run([sys.executable, str(script), method], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"7 {-signal.SIGTERM}\n", done.stderr
