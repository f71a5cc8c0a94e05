"""The ranks of a host divide its memory and its connections."""

import os

from tests.support import warm_python

PROGRAM = """
import sys
import torchobj
data = torchobj.ObjectMapDataset("file://" + sys.argv[1] + "/")
loader = torchobj.DataLoader(data, batch_size=None)
assert len(list(loader)) == 1
stats = loader.stats()
print(stats.in_flight_limit, stats.budget_bytes)
"""


def limits(folder, ranks, fixed=False):
    """Returns max_in_flight and the prefetcher's memory budget in one of `ranks` processes of a host."""
    program = PROGRAM.replace('+ "/")', '+ "/", config=torchobj.StoreConfig(max_in_flight=32))') if fixed else PROGRAM
    environment = {name: value for name, value in os.environ.items() if name != "TORCHOBJ_BUDGET_BYTES"}
    environment["LOCAL_WORLD_SIZE"] = str(ranks)
    done = warm_python.run(["-c", program, str(folder)], env=environment, check=True)
    return [int(number) for number in done.stdout.split()]


def test_auto_limits_are_divided_by_the_ranks_of_the_host(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    (alone, memory), (shared, share) = limits(tmp_path, 1), limits(tmp_path, 8)
    # Of 64 permits 4 are reserved for demanded reads, of 8 a quarter.
    assert (alone, shared) == (60, 6)
    assert share <= memory


def test_a_fixed_limit_applies_to_each_process(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    assert [limits(tmp_path, ranks, fixed=True)[0] for ranks in (1, 8)] == [28, 28]
