"""`python -m benchmarks.harness MODULE CLIENT` is the fork server of a client."""

import sys

from benchmarks.harness.fork_server import serve

serve(*sys.argv[1:])
