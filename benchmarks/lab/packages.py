"""Packages of rivals that cannot be beside others in one environment: s3fs pins a botocore that boto3 has left behind.
They lie in a folder of the cache, which a rival's process puts before all others. Installed by pip where missing.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.servers.install import cache_directory

REQUIREMENTS = ("s3fs==2026.9.0", "multi-storage-client[boto3]==1.3.1")


def _folder() -> Path:
    versions = "-".join(requirement.rpartition("==")[2] for requirement in REQUIREMENTS)
    return cache_directory() / "lab" / f"packages-{versions}-{sys.version_info.major}.{sys.version_info.minor}"


def install() -> Path:
    """The folder, with the packages in it.

    Raises:
        subprocess.CalledProcessError: pip could not install them, and said why.
    """
    folder = _folder()
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(partial), *REQUIREMENTS]
        try:
            subprocess.run(command, check=True)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def enter() -> None:
    """Makes this process import the packages, and what they need, from the folder."""
    sys.path.insert(0, str(_folder()))


def versions() -> dict[str, str]:
    """Of the packages, and of what s3fs is built on."""
    names = {"s3fs", "aiobotocore", "multi-storage-client"}
    found = importlib.metadata.distributions(path=[str(_folder())])
    return {entry.name: entry.version for entry in found if entry.name in names}
