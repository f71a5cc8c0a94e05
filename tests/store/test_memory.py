"""Settings bound the memory, not the sizes of objects. Each case runs in its own process."""

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


def measure(bucket, work):
    script = f"{MEASURE}\n{work}"
    arguments = [bucket.url, pickle.dumps(bucket.config).hex()]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def gateway(versitygw_bucket):
    return versitygw_bucket


@pytest.mark.parametrize("mib", [320, pytest.param(1024, marks=pytest.mark.matrix)])
def test_writing_a_large_object_uses_the_write_buffer_and_little_more(gateway, mib):
    work = f"""
def write():
    block = bytes(16 << 20)
    with torchobj.open(url + "/big", "wb", config=config) as file:
        for _ in range({mib // 16}):
            file.write(block)
torchobj.Store(url, config=config).put("warm", b"x")
print(json.dumps(growth(write)[0]))
"""
    assert measure(gateway, work) <= 128 * MIB
    assert gateway.boto.head_object(Bucket=gateway.name, Key="big")["ContentLength"] == mib * MIB


@pytest.mark.parametrize("mib", [128, pytest.param(256, marks=pytest.mark.matrix)])
def test_reading_an_object_uses_its_size_and_little_more(gateway, mib):
    gateway.boto.put_object(Bucket=gateway.name, Key="big", Body=bytes(mib * MIB))
    work = """
store = torchobj.Store(url, config=config)
store.list()
grown, body = growth(lambda: store.get("big"))
print(json.dumps([grown, len(body)]))
"""
    grown, length = measure(gateway, work)
    assert length == mib * MIB
    assert grown <= length + 64 * MIB


def test_reading_four_bytes_of_a_large_object_uses_almost_no_memory(bucket, control):
    bucket.boto.put_object(Bucket=bucket.name, Key="big", Body=bytes(64 * MIB))
    work = f"""
from tests.strict.control import Control
control = Control("{bucket.server.control}")
reader = torchobj.open(url + "/big", config=config)
def four():
    data = reader.read(4)
    while control.connections().in_flight:
        pass
    return len(data)
print(json.dumps(growth(four)[0]))
"""
    assert measure(bucket, work) <= 16 * MIB
    assert sum(request.bytes_sent for request in control.requests("GetObject")) <= 16 * MIB


CHECKPOINT = """
import torch
mib = 1 << 20
torchobj.Store(url, config=config).put("warm", b"x")
torchobj.save({"w": torch.ones(10)}, url + "/warm.pt", config=config)
torchobj.load(url + "/warm.pt", config=config)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("layers", [6, 16])
def test_saving_uses_almost_no_memory(gateway, layers):
    work = f"""{CHECKPOINT}
state = {{f"layer.{{n}}": torch.full((8 * mib,), float(n)) for n in range({layers})}}
print(json.dumps(growth(lambda: torchobj.save(state, url + "/big.pt", config=config))[0]))
"""
    assert measure(gateway, work) <= 64 * MIB
    assert gateway.boto.head_object(Bucket=gateway.name, Key="big.pt")["ContentLength"] >= layers * 32 * MIB


@pytest.mark.matrix
@pytest.mark.parametrize("layers", [6, 12])
def test_saving_tensors_of_a_device_uses_little_memory(gateway, layers):
    work = f"""{CHECKPOINT}
import torchobj.checkpoint.archive.save as save
save.is_reachable, save.BLOCKS_BYTES = lambda device: False, 64 * mib
state = [torch.full((8 * mib,), float(n)) for n in range({layers})]
print(json.dumps(growth(lambda: torchobj.save(state, url + "/big.pt", config=config))[0]))
"""
    assert measure(gateway, work) <= 64 * MIB


@pytest.mark.parametrize("layers", [4, pytest.param(8, marks=pytest.mark.matrix)])
def test_loading_uses_the_size_of_the_state_and_little_more(gateway, layers):
    work = f"""{CHECKPOINT}
state = {{f"layer.{{n}}": torch.full((8 * mib,), float(n)) for n in range({layers})}}
torchobj.save(state, url + "/big.pt", config=config)
del state
grown, state = growth(lambda: torchobj.load(url + "/big.pt", config=config))
again, _ = growth(lambda: torchobj.load(url + "/big.pt", into=state, config=config))
some, _ = growth(lambda: torchobj.load(url + "/big.pt", keys=["layer.3"], config=config))
print(json.dumps([grown, again, some]))
"""
    grown, again, some = measure(gateway, work)
    assert grown <= 1.05 * layers * 32 * MIB + 16 * MIB
    assert again <= 32 * MIB
    assert some <= 32 * MIB + 32 * MIB
