"""Rivals' packages that conflict with others in one environment: s3fs pins a botocore older than the one boto3 needs.
They are in a folder of the cache, which comes first in the import path of a rival's process. pip installs them.
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
    """Returns the folder with the packages in it.

    Raises:
        subprocess.CalledProcessError: pip could not install them, and printed the reason.
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
    """Makes this process import the packages and their dependencies from the folder."""
    sys.path.insert(0, str(_folder()))


def versions() -> dict[str, str]:
    """Returns the versions of the packages and of the dependencies of s3fs."""
    names = {"s3fs", "aiobotocore", "multi-storage-client"}
    found = importlib.metadata.distributions(path=[str(_folder())])
    return {entry.name: entry.version for entry in found if entry.name in names}
