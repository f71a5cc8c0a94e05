"""The cost of importing torchobj at the end of a process."""

import subprocess
import sys

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
