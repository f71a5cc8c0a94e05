"""Builds and runs the bare limit: the example `limit` of the crate torchobj-store, a tokio loop that signs requests,
parses heads and receives into one reused buffer, over plain HTTP. It omits the rest of torchobj on purpose.
"""

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.harness.measure import Timed, cpu_s
from benchmarks.lab.location import Location
from benchmarks.lab.objects import Family
from benchmarks.lab.progress import progress
from tests.servers.install import cache_directory

_REPOSITORY = Path(__file__).resolve().parents[2]

# torchobj's defaults: concurrent requests, and the maximum number of runtime threads.
_CONNECTIONS = 64
_MOST_THREADS = 8
_LIMIT_S = 300.0


@cache
def build() -> Path:
    """Returns the program; cargo builds it if its sources changed."""
    if shutil.which("cargo") is None:
        raise SystemExit("the bare limit is built with Rust: https://rustup.rs (or --without 'bare limit')")
    target = Path(os.environ.get("CARGO_TARGET_DIR") or cache_directory() / "target")
    environment = os.environ | {"CARGO_TARGET_DIR": str(target), "PYO3_BUILD_EXTENSION_MODULE": "1"}
    command = ["cargo", "build", "--quiet", "--release", "-p", "torchobj-store", "--example", "limit"]
    with progress("building the bare limit, if its sources changed"):
        subprocess.run(command, cwd=_REPOSITORY, env=environment, check=True)
    return target / "release" / "examples" / "limit"


def run(location: Location, family: Family, min_s: float) -> Timed:
    """Reads objects of `family` for about `min_s`; CPU is that of the whole process, including its start of 2 ms."""
    program = build()
    # A first run determines the number of objects.
    trial = _run(program, location, family, 4 * _CONNECTIONS)
    return _run(program, location, family, max(4 * _CONNECTIONS, int(trial.rate * min_s)))


def _run(program: Path, location: Location, family: Family, requests: int) -> Timed:
    assert location.endpoint_url, "the limit is measured in the lab only"
    path = f"/{location.bucket}/{location.key(family.name)}"
    threads = min(os.cpu_count() or 1, _MOST_THREADS)
    numbers = (family.count, requests, min(_CONNECTIONS, requests), threads)
    command = [str(program), urlsplit(location.endpoint_url).netloc, path, *map(str, numbers)]
    before_s = cpu_s()
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_LIMIT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}")
    found = json.loads(done.stdout)
    return Timed(found["wall_s"], cpu_s() - before_s, None, found["objects"])
