"""Builds and runs the bare limit: the example `limit` of the crate torchobj-store, a tokio loop that signs, parses the
head and receives into one reused buffer. Plain HTTP only. Leaves the rest of torchobj out, which is its point.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.lab.objects import Family
from benchmarks.lab.place import Place
from benchmarks.measure import Measured
from tests.servers.install import cache_directory

_REPOSITORY = Path(__file__).resolve().parents[2]

# As torchobj has by default: requests at a time, and threads of its runtime at most.
_CONNECTIONS = 64
_MOST_THREADS = 8


def build() -> Path:
    """The program, built by cargo where its sources changed."""
    if shutil.which("cargo") is None:
        raise SystemExit("the bare limit is built with Rust: https://rustup.rs (or leave it out: --without limit)")
    target = Path(os.environ.get("CARGO_TARGET_DIR") or cache_directory() / "target")
    environment = os.environ | {"CARGO_TARGET_DIR": str(target), "PYO3_BUILD_EXTENSION_MODULE": "1"}
    command = ["cargo", "build", "--quiet", "--release", "-p", "torchobj-store", "--example", "limit"]
    subprocess.run(command, cwd=_REPOSITORY, env=environment, check=True)
    return target / "release" / "examples" / "limit"


def run(program: Path, place: Place, family: Family, least_s: float) -> Measured:
    """Reads objects of `family` for about `least_s`; CPU is that of the whole process, its start of 2 ms included."""
    # A first run says how many objects that will be.
    trial = _run(program, place, family, 4 * _CONNECTIONS)
    return _run(program, place, family, max(4 * _CONNECTIONS, int(trial.objects_per_s * least_s)))


def _run(program: Path, place: Place, family: Family, requests: int) -> Measured:
    assert place.endpoint_url, "the limit is measured in the lab only"
    path = f"/{place.bucket}/{place.key(family.name)}"
    threads = min(os.cpu_count() or 1, _MOST_THREADS)
    numbers = (family.count, requests, min(_CONNECTIONS, requests), threads)
    command = [str(program), urlsplit(place.endpoint_url).netloc, path, *map(str, numbers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout, "stdout=PIPE was passed above"
    said = process.stdout.read()
    process.stdout.close()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {process.returncode}")
    found = json.loads(said)
    cpu_s = used.ru_utime + used.ru_stime
    return Measured(found["objects"], found["bytes"], found["wall_s"], cpu_s, [found["wall_s"]], [cpu_s])
