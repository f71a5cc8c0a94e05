"""Connections use only a share of a process's file descriptors."""

import subprocess
import sys
from pathlib import Path


def test_connections_use_a_share_of_the_open_file_limit(control, bucket):
    count = 200
    for index in range(count):
        bucket.write(f"k{index:03}", f"body {index}".encode())
    control.faults({"operation": "GetObject", "action": {"delay_first_byte_s": 0.1}})
    script = Path(__file__).with_name("few_descriptors.py")
    command = [sys.executable, str(script), bucket.server.endpoint, bucket.name, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    # Sixteen connections, plus the files that Python and the runtime have open.
    assert int(done.stdout) < 40, done.stdout
