"""How long do `make demo` and `make test` take on a fresh machine?

Runs them in a clean clone of HEAD with an empty cache: Python packages, Go programs and the crates that CARGO_HOME
lacks are downloaded, and everything is compiled. Prints the wall and CPU time of each; `make test` begins with what
`make demo` left. The machine should be quiet.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def main() -> None:
    """Runs the targets, and stops at the first that fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", default=["demo", "test"], help="targets of make (default: demo test)")
    targets = parser.parse_args().targets
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("CARGO_TARGET", "TORCHOBJ_"))
    }
    with tempfile.TemporaryDirectory(prefix="torchobj-cold-", ignore_cleanup_errors=True) as folder:
        subprocess.run(["git", "clone", "--quiet", REPOSITORY, f"{folder}/checkout"], check=True)
        for target in targets:
            began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
            command = ["make", f"CACHE={folder}/cache", f"CARGO_TARGET_DIR={folder}/cache/target", target]
            done = subprocess.run(command, cwd=f"{folder}/checkout", env=environment, check=False)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(f"make {target}: {time.monotonic() - began:.0f} s, {cpu_s:.0f} CPU-s", flush=True)
            if done.returncode != 0:
                sys.exit(f"make {target}: exit status {done.returncode}")


if __name__ == "__main__":
    main()
