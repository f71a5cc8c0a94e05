"""`torchobj --versions`: what a bug report needs, without secrets and paths, also without click."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import torchobj
from torchobj.cli import machine

ROOT = Path(__file__).parents[2]


def versions(script="import torchobj.cli; torchobj.cli.main()", **variables):
    command = [sys.executable, "-c", f"import sys; sys.argv = ['torchobj', '--versions']\n{script}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_versions_have_the_packages_and_the_limits_of_the_machine_and_no_secret():
    done = versions(AWS_SECRET_ACCESS_KEY="topsecret", AWS_PROFILE="payroll", TORCHOBJ_CONFIG="/topsecret/missing.toml")
    assert (done.returncode, done.stderr) == (0, "")
    found = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert found["torchobj"] == torchobj.__version__
    assert {
        "Python",
        "torch",
        "numpy",
        "pyarrow",
        "fsspec",
        "system",
        "processors",
        "memory",
        "/dev/shm",
    } <= found.keys()
    for text in ("topsecret", "payroll", str(ROOT), str(Path.home()), sys.prefix):
        assert text not in done.stdout


def test_versions_are_shown_without_click():
    assert "torch " in versions("sys.modules['click'] = None\nimport torchobj.cli; torchobj.cli.main()").stdout


def test_versions_import_no_torch():
    done = versions(
        "import torchobj.cli\n"
        "try: torchobj.cli.main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'pyarrow'} & set(sys.modules)"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_extras_are_those_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(machine.EXTRAS) == set(extras) - {"bench", "dev", "docs", "examples"}
