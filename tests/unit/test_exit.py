"""What the end of a process costs that imported torchobj."""

import subprocess
import sys

#: Handlers run in the reverse of the order in which they are registered: this one after torchobj's own.
SCRIPT = """
import atexit, os
atexit.register(lambda: print(len(os.listdir("/proc/self/task"))))
import torchobj
{use}
"""


def threads_at_the_end(use=""):
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(use=use)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_a_process_that_used_no_store_gets_no_runtime_by_its_end():
    assert threads_at_the_end() == 1


def test_a_process_that_used_a_store_has_one():
    assert threads_at_the_end("torchobj.Store('memory://exit').put('x', b'x')") > 1
