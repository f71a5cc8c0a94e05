"""Ranks whose checkpoints have local disks: as ranks of one machine with one disk, or of a machine each."""

import logging
import shutil

from tests.support.managers import of_ranks
from torchobj.checkpoint import CheckpointManager
from torchobj.ranks import machine


class Tier:
    """A bucket, a local disk, and the managers of one rank that use both."""

    def __init__(self, url, disk):
        self.url, self.disk, self.opened = url, disk, []

    def open(self, **settings):
        """A manager, as of a job that starts after the last one has ended."""
        for manager in self.opened:
            manager.close()
        self.opened.append(CheckpointManager(self.url, **({"local": self.disk} | settings)))
        return self.opened[-1]

    @property
    def folder(self):
        [folder] = [path for path in self.disk.iterdir() if path.is_dir()]
        return folder

    def copies(self):
        """The steps that have a commit object on the disk."""
        return [int(path.stem) for path in sorted(self.folder.glob("commits/*"))]

    def files(self, step=None):
        """The files of data on the disk."""
        pattern = "steps/*/*" if step is None else f"steps/{step:012}-*/*"
        return sorted(path for path in self.folder.glob(pattern) if path.is_file())

    def in_bucket(self):
        return CheckpointManager(self.url).steps()


def on_disks(rank, root, *, machines, **settings):
    """The manager of a rank. The bucket is a folder too, which all ranks see."""
    host = rank if machines > 1 else 0
    machine._host_of = lambda: f"host {host}"
    return of_ranks(f"file://{root}/bucket", None, local=disk_of(root, host), **settings)


def disk_of(root, host):
    """The folder of a machine."""
    return root / f"disk {host}" / "copies"


def data_of(root, host, step):
    """A file with the data of a rank of the machine."""
    return next(disk_of(root, host).glob(f"*/steps/{step:012}-*/__{host}_*"))


def lose(root, host):
    """Replaces a machine by another one, with an empty disk."""
    shutil.rmtree(disk_of(root, host).parent, ignore_errors=True)


def warnings_of():
    """A list of the warnings that this process logs from now on."""

    class Listing(logging.Handler):
        def emit(self, record):
            logged.append(record.getMessage())

    logged = []
    logging.getLogger("torchobj").addHandler(Listing(logging.WARNING))
    return logged
