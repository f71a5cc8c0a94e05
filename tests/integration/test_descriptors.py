"""Connections leave the file descriptors of a process to others."""

import subprocess
import sys
from pathlib import Path


def test_connections_take_a_share_of_the_open_files(control, place):
    count = 200
    for index in range(count):
        place.boto.put_object(Bucket=place.bucket, Key=f"k{index:03}", Body=f"body {index}".encode())
    control.faults({"operation": "GetObject", "action": {"delay_first_byte_s": 0.1}})
    script = Path(__file__).with_name("few_descriptors.py")
    command = [sys.executable, str(script), place.server.endpoint, place.bucket, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    # Sixteen connections, and what Python and the runtime have open.
    assert int(done.stdout) < 40, done.stdout
