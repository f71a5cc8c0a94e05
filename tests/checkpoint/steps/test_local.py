"""The copies of steps on a local disk: what is written there, which of it is restored, and who may use the folder."""

import pytest

from tests.support.managers import saved_value, tensor
from torchobj import Store
from torchobj.checkpoint import CheckpointManager
from torchobj.checkpoint.steps import local_copy
from torchobj.checkpoint.steps.commits import Commits

URL = "memory://local-copies/{}/run"


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


@pytest.fixture
def tier(tmp_path, request):
    tier = Tier(URL.format(request.node.name), tmp_path / "disk")
    yield tier
    for manager in tier.opened:
        manager.close()


@pytest.fixture
def interrupted(monkeypatch):
    """Interrupts uploads from the disk, as the death of the process does: the bucket gets no commit."""

    class Killed(Exception):
        pass

    def kill(*given, **named):
        raise Killed

    def interrupt(manager, step, value):
        with monkeypatch.context() as patch:
            patch.setattr(local_copy, "upload", kill)
            with pytest.raises(Killed):
                manager.save(step, {"x": tensor(value)})

    return interrupt


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_step_is_on_the_disk_as_in_the_bucket(tier, sharded):
    manager = tier.open(sharded=sharded, keep_local=2)
    for step in (1, 2, 3):
        handle = manager.save_async(step, {"x": tensor(step)}, {"loss": 1.0})
        handle.wait_local()
        handle.result()
    assert (manager.steps(), tier.copies()) == ([1, 2, 3], [2, 3])
    bucket, disk = Commits(tier.url, None), Commits(f"file://{tier.folder}", None)
    for step in (2, 3):
        far, near = bucket.read(step), disk.read(step)
        assert (near.attempt, near.kind, near.metrics) == (far.attempt, far.kind, far.metrics)
        assert {(item.key, item.size) for item in near.objects} == {(item.key, item.size) for item in far.objects}
        assert all(item.crc32 is not None for item in near.objects)
        for item in far.objects:
            assert bytes(Store(tier.url).get(item.key)[:]) == (tier.folder / item.key).read_bytes()
    assert len(tier.files()) == sum(len(disk.read(step).objects) for step in (2, 3))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_restore_reads_the_disk_and_not_the_bucket(tier, sharded):
    tier.open(sharded=sharded).save(1, {"x": tensor(1), "text": "a"})
    store = Store(tier.url)
    for item in Commits(tier.url, None).read(1).objects:
        store.put(item.key, b"\0" * item.size)
    into = {"x": tensor(0), "text": ""}
    tier.open(sharded=sharded).restore(into=into)
    assert (into["x"][0].item(), into["text"]) == (1.0, "a")


def test_a_step_whose_upload_was_interrupted_is_restored(tier, interrupted):
    manager = tier.open()
    manager.save(1, {"x": tensor(1)})
    interrupted(manager, 2, 2)
    assert (tier.in_bucket(), tier.copies()) == ([1], [1, 2])
    manager = tier.open()
    assert saved_value(manager) == 2.0
    # Killed again, before the bucket has the next step.
    interrupted(manager, 3, 3)
    assert (tier.in_bucket(), saved_value(tier.open())) == ([1], 3.0)
    manager = tier.open()
    assert saved_value(manager) == 3.0
    manager.save(4, {"x": tensor(4)})
    assert (tier.in_bucket(), tier.copies(), saved_value(tier.open())) == ([1, 4], [4], 4.0)
