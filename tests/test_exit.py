"""The end of a process: what it costs to have imported torchobj, and that uploads are aborted."""

import pickle
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.support.interrupting import HELD_BACK_S
from tests.support.prefetching import eventually

#: Handlers run in reverse order of registration: this one runs after torchobj's own.
SCRIPT = """
import atexit, os
atexit.register(lambda: print(len(os.listdir("/proc/self/task"))))
import torchobj
{use}
"""


def threads_at_exit(use=""):
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(use=use)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_a_process_that_used_no_store_starts_no_runtime_at_exit():
    assert threads_at_exit() == 1


def test_a_process_that_used_a_store_has_a_runtime():
    assert threads_at_exit("torchobj.Store('memory://exit').put('x', b'x')") > 1


#: What the scripts below begin with. Parts are stalled by the server.
BEGINNING = """
import gc, os, pickle, signal, sys, threading, time
import multiprocessing
import torchobj
url, config = sys.argv[1], pickle.loads(bytes.fromhex(sys.argv[2]))
store = torchobj.Store(url, config=config)
large = bytes(17 << 20)
"""

OPEN_WRITER = """
file = torchobj.open(f"{url}/k", "wb", config=config)
file.write(large)
# Never collected.
sys.kept = [file]
"""

STARTED_THREAD = """
thread = threading.Thread(target=lambda: store.put("k", large), daemon=True)
thread.start()
sys.stdin.readline()
"""

#: How a process ends that has begun an upload, and its exit code.
ENDS = {
    "an interrupted put": ("store.put('k', large)", signal.SIGINT, -signal.SIGINT),
    "an interrupted put that is caught": (
        "try:\n    store.put('k', large)\nexcept KeyboardInterrupt:\n    sys.exit(7)",
        signal.SIGINT,
        7,
    ),
    "interrupted puts of threads": (
        "torchobj.fsspec.ObjectFileSystem(config).pipe({f'{url}/{number}': large for number in range(3)})",
        signal.SIGINT,
        -signal.SIGINT,
    ),
    "an open writer": (f"{OPEN_WRITER}\nsys.exit(3)", None, 3),
    "an open writer and an exception": (f"{OPEN_WRITER}\n1 / 0", None, 1),
    "a daemon thread": (STARTED_THREAD, None, 0),
    "a daemon thread and an exception": (f"{STARTED_THREAD}\n1 / 0", None, 1),
    "a daemon thread that tries again": (
        """
def put():
    while True:
        try:
            store.put("k", large)
        except Exception:
            pass

threading.Thread(target=put, daemon=True).start()
sys.stdin.readline()
""",
        None,
        0,
    ),
    "a child of multiprocessing": (
        f"""
def child():
{textwrap.indent(OPEN_WRITER, "    ")}

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
sys.exit(process.exitcode)
""",
        None,
        0,
    ),
}

#: Those of `make test`.
QUICK = ("interrupted puts of threads", "a daemon thread and an exception", "an open writer")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in ENDS]
)
def test_the_end_of_a_process_aborts_what_it_has_begun(bucket, control, name):
    script, number, code = ENDS[name]
    control.faults({"operation": "UploadPart", "action": {"delay_first_byte_s": HELD_BACK_S}})
    with started(bucket, script) as process:
        assert eventually(lambda: control.requests("UploadPart") or process.poll() is not None)
        if number is not None:
            process.send_signal(number)
        process.stdin.close()
        assert process.wait(HELD_BACK_S / 2) == code
    assert control.requests("CreateMultipartUpload") and bucket.uploads() == [] and bucket.keys() == []


def test_a_second_interrupt_ends_a_process_at_once_which_names_its_uploads(bucket, control):
    stalled = {"delay_first_byte_s": HELD_BACK_S}
    control.faults(
        {"operation": "UploadPart", "action": stalled},
        {"operation": "AbortMultipartUpload", "action": {**stalled, "status": 500}},
    )
    with started(bucket, "store.put('k 1', large)") as process:
        assert eventually(lambda: control.requests("UploadPart") or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        assert eventually(lambda: control.fault_report()[1]["fired"] or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        assert process.wait(HELD_BACK_S / 2) == -signal.SIGINT
        assert f"`torchobj uploads list '{bucket.url}/k 1'` lists it" in process.stderr.read()


def test_a_forked_child_neither_waits_for_the_uploads_of_its_parent_nor_aborts_them(bucket, control):
    control.faults({"operation": "UploadPart", "action": {"delay_first_byte_s": 3}})
    script = f"""
{OPEN_WRITER}
began = time.monotonic()
if os.fork() == 0:
    del sys.kept, file
    gc.collect()
    sys.exit(0)
os.wait()
print(time.monotonic() - began < 3)
file.close()
"""
    with started(bucket, script) as process:
        assert process.wait(HELD_BACK_S / 2) == 0
        assert process.stdout.read() == "True\n"
    assert bucket.keys() == ["k"] and control.requests("AbortMultipartUpload") == []


#: Threads for which multiprocessing waits, after the function of the child has returned.
THREADS = {
    "a thread": "threading.Thread(target=put).start()",
    "an executor": "concurrent.futures.ThreadPoolExecutor(1).submit(put)",
}


@pytest.mark.parametrize("name", THREADS)
def test_a_child_of_multiprocessing_completes_the_writes_of_its_threads(bucket, name):
    script = f"""
import concurrent.futures
from multiprocessing import util

def put():
    ending.wait()
    store.put("k", b"x")

def child():
    util.Finalize(None, ending.set, exitpriority=-5)
    store.put("first", b"x")
    {THREADS[name]}

ending = threading.Event()

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
sys.exit(process.exitcode)
"""
    with started(bucket, script) as process:
        assert process.wait(HELD_BACK_S / 2) == 0, process.stderr.read()
    assert bucket.keys() == ["first", "k"]


@pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"])
def test_the_end_of_a_process_leaves_no_temporary_files(bucket, tmp_path, end):
    script = (
        f"url = 'file://{tmp_path}'\nconfig = None\n{OPEN_WRITER}\nassert len(os.listdir('{tmp_path}')) == 2\n{end}"
    )
    with started(bucket, script) as process:
        assert process.wait(HELD_BACK_S / 2) in (3, -signal.SIGINT), process.stderr.read()
    assert list(tmp_path.iterdir()) == []


def started(bucket, script):
    arguments = [sys.executable, "-c", BEGINNING + script, bucket.url, pickle.dumps(bucket.config).hex()]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(arguments, text=True, **pipes)
