"""Memory is bounded by settings, not by objects. Each case in a process of its own."""

import json
import pickle
import subprocess
import sys

import pytest

MIB = 1 << 20

MEASURE = """
import json, pickle, sys, torchobj
config = pickle.loads(bytes.fromhex(sys.argv[2]))
url = sys.argv[1]

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def growth(work):
    with open("/proc/self/clear_refs", "w") as out:
        out.write("5")
    before = status("VmRSS")
    result = work()
    return status("VmHWM") - before, result
"""


def measure(place, work):
    script = f"{MEASURE}\n{work}"
    arguments = [place.url, pickle.dumps(place.config).hex()]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def gateway(versitygw_server):
    from tests.conftest import _place

    return _place("versitygw", versitygw_server)


def test_writing_a_gibibyte_takes_the_write_buffer_and_little_more(gateway):
    work = """
def write():
    block = bytes(16 << 20)
    with torchobj.open(url + "/big", "wb", config=config) as file:
        for _ in range(64):
            file.write(block)
torchobj.Store(url, config=config).put("warm", b"x")
print(json.dumps(growth(write)[0]))
"""
    assert measure(gateway, work) <= 128 * MIB
    assert gateway.boto.head_object(Bucket=gateway.bucket, Key="big")["ContentLength"] == 1 << 30


def test_reading_an_object_takes_the_object_and_little_more(gateway):
    gateway.boto.put_object(Bucket=gateway.bucket, Key="big", Body=bytes(256 * MIB))
    work = """
store = torchobj.Store(url, config=config)
store.list()
grown, body = growth(lambda: store.get("big"))
print(json.dumps([grown, len(body)]))
"""
    grown, length = measure(gateway, work)
    assert length == 256 * MIB
    assert grown <= length + 64 * MIB


def test_four_bytes_of_a_large_object_take_next_to_nothing(gateway):
    gateway.boto.put_object(Bucket=gateway.bucket, Key="big", Body=bytes(256 * MIB))
    work = """
import time
reader = torchobj.open(url + "/big", config=config)
def four():
    data = reader.read(4)
    time.sleep(1)
    return len(data)
print(json.dumps(growth(four)[0]))
"""
    assert measure(gateway, work) <= 16 * MIB
