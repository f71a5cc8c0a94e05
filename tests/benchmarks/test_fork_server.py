"""The fork server of the benchmarks ends jobs that hang or die, with what they started."""

import os
import subprocess
import sys
import time
from functools import partial

import pytest

from benchmarks.harness import Clients, JobError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks are for Linux")


@pytest.fixture(scope="module")
def pool():
    with Clients("lab.objects", limit_s=60.0, lives=2) as found:
        yield found


def test_a_job_returns_its_result_or_raises_with_its_traceback(pool):
    assert pool.run("", partial(sum, [1, 2])) == 3
    with pytest.raises(JobError, match="ValueError: invalid literal") as raised:
        pool.run("", partial(int, "x"))
    assert raised.value.kind == "error"


def test_a_job_that_does_not_end_is_killed_and_the_next_one_runs(pool):
    began_s = time.monotonic()
    with pytest.raises(JobError, match="did not end within 0.5 s") as raised:
        pool.run("", partial(subprocess.run, ["sleep", "1000.25"]), 0.5)
    assert raised.value.kind == "late"
    assert time.monotonic() - began_s < 30.0
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "sleep 1000.25" not in found
    assert pool.run("", partial(sum, [1, 2])) == 3


def test_a_job_whose_process_dies_is_repeated(pool, capsys):
    with pytest.raises(JobError, match="died with 3"):
        pool.run("", partial(os._exit, 3))
    assert capsys.readouterr().err.count("died with 3") == 2
