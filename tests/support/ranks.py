"""Runs the ranks of a job as forked processes of the test, and starts jobs whose ranks are processes of another kind."""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import queue
import threading
import time
import traceback

import torch
import torch.distributed as dist

#: The time limit for two ranks.
LONGEST_S = 200

#: How long a rank that failed waits for the other, which may never arrive.
_PATIENCE_S = 20

_context = multiprocessing.get_context("fork")


@contextlib.contextmanager
def started(main, *arguments, size=2):
    """Starts processes that run `main(rank, *arguments)`, where `init_process_group` connects them."""
    store, all_started = job_store(), _context.Event()
    common = (size, main, arguments, all_started)
    ranks = [_context.Process(target=_joined, args=(store.port, rank, *common)) for rank in range(size)]
    with contextlib.ExitStack() as stack:
        for rank in ranks:
            rank.start()
            stack.callback(rank.join)
            stack.callback(rank.kill)
        all_started.set()
        yield ranks


def job_store():
    """The TCPStore of a job. The test hosts it, as torchrun's agent does: no other process can take its port, and it
    outlives the ranks."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def environment_of(port, rank, size=2):
    """The variables of torchrun with which a rank joins the job whose TCPStore has this port."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    return {**address, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_ATTEMPT": "0"}


def on_one_machine(rank, size=2):
    """Sets the variables of torchrun by which a rank finds the others of its machine."""
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}


def _joined(port, rank, size, main, arguments, all_started):
    # Dump the tracebacks before the test times out.
    faulthandler.dump_traceback_later(LONGEST_S - 15, exit=True)
    # The thread of the store, which answers ranks that connect, may hold a lock while the test forks: the forked rank would
    # wait for it.
    all_started.wait()
    # A forked process must not use the threads of its parent.
    torch.set_num_threads(1)
    os.environ |= environment_of(port, rank, size)
    main(rank, *arguments)


def run_ranks(work, *arguments, size=2):
    """Returns what each of the ranks returned, or its exception's name, text and traceback."""
    results, all_done, found = _context.Queue(), _context.Barrier(size), {}
    until_s = time.monotonic() + LONGEST_S
    with started(_run_and_send, work, arguments, results, all_done, size=size) as ranks:
        try:
            while len(found) < len(ranks):
                rank, result = results.get(timeout=max(until_s - time.monotonic(), 0.1))
                found[rank] = pickle.loads(result)
        except queue.Empty:
            raise AssertionError(f"a rank did not end; results so far: {found}") from None
        for rank in ranks:
            rank.join(10)
            assert rank.exitcode == 0
    return [found[rank] for rank in range(size)]


def _run_and_send(rank, work, arguments, results, all_done):
    patience_s = LONGEST_S
    try:
        results.put((rank, pickle.dumps(work(rank, *arguments))))
    except BaseException as error:
        results.put((rank, pickle.dumps((type(error).__name__, str(error), traceback.format_exc()))))
        patience_s = _PATIENCE_S
    # The other rank may still be opening its last connection to the group, which fails if this rank exits now.
    with contextlib.suppress(threading.BrokenBarrierError):
        all_done.wait(patience_s)
    if dist.is_initialized():
        dist.destroy_process_group()
