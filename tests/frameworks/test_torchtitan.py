"""Checkpoints of torchtitan, which saves by torch.distributed.checkpoint to a URL of fsspec, in two ranks.

With torchtitan installed (tried with 0.3.0), its own `CheckpointManager` saves, finds, loads and deletes them; otherwise the
same calls of torch and fsspec are made here.
"""

import importlib.util
import re

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.ranks import run_ranks
from torchobj.fsspec import register

pytestmark = [
    pytest.mark.filterwarnings("ignore:fsync not supported for this stream"),
    pytest.mark.filterwarnings("ignore:`load_state_dict` is deprecated"),
]


class Values:
    """State that has the methods of a Stateful."""

    def __init__(self, **values):
        self.values = values

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state):
        self.values |= state


class SameCalls:
    """The calls of torchtitan's manager (0.3.0, `torchtitan/components/checkpointer/dcp.py`)."""

    def __init__(self, folder, keep, is_async, model, states):
        self._folder, self._keep, self._is_async, self._pending = folder, keep, is_async, None
        self._model, self._states = model, states
        self._files, self._path = fsspec.url_to_fs(folder)
        self._group = dist.new_group(backend="gloo")

    def _steps(self, is_complete):
        names = [path.rpartition("/")[2] for path in self._files.ls(self._path, detail=False)]
        found = [(int(match[1]), name) for name in names if (match := re.search(r"step-(\d+)", name))]
        return sorted(pair for pair in found if is_complete(f"{self._path}/{pair[1]}"))

    def _state(self):
        return self._states | self._model.state_dict()

    def save(self, step):
        self.maybe_wait_for_saving()
        url = f"{self._folder}/step-{step}"
        if self._is_async:
            self._pending = dcp.async_save(self._state(), checkpoint_id=url, process_group=self._group)
        else:
            dcp.save(self._state(), checkpoint_id=url)
        if dist.get_rank() == 0 and self._files.isdir(self._path):
            for _, name in self._steps(lambda _: True)[: -self._keep]:
                self._files.rm(f"{self._path}/{name}", recursive=True)

    def maybe_wait_for_saving(self):
        if self._pending is not None:
            self._pending.result()

    def load(self):
        if not self._files.exists(self._path):
            return False
        _, name = self._steps(lambda path: self._files.isfile(f"{path}/.metadata"))[-1]
        state = self._state()
        dcp.load(state, checkpoint_id=f"{self._folder}/{name}")
        self._model.load_state_dict(state, strict=False)
        return True

    def close(self):
        """Has no thread."""


def manager_of_torchtitan(folder, keep, is_async, model, states):
    from torchtitan.components.checkpointer import CheckpointManager

    config = CheckpointManager.Config(
        enable=True, folder=folder, interval=1, keep_latest_k=keep, async_mode="async" if is_async else "disabled"
    )
    given = {"optimizers": Values(lr=0.1), "lr_schedulers": Values(epoch=1), "dataloader": None}
    return CheckpointManager(config, model_parts=[model], states=states, sd_adapter=None, **given)


def model_of(value):
    model = torch.nn.Linear(4, 8)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.no_grad():
        for name, parameter in list(model.named_parameters()):
            sharded = distribute_tensor(torch.full_like(parameter, value), mesh, [Shard(0)])
            setattr(model, name, torch.nn.Parameter(sharded))
    return model


def trained(rank, kind, folder, config, is_async):
    """Saves three steps, of which two are kept, and resumes."""
    dist.init_process_group("gloo")
    register(config=config, schemes=())
    model, progress = model_of(0.0), Values(step=0)
    arguments = (folder, 2, is_async)
    manager = kind(*arguments, model, {"train_state": progress})
    assert manager.load() is False
    for step in (1, 2, 10):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(step))
        progress.values["step"] = step
        manager.save(step)
        manager.maybe_wait_for_saving()
        dist.barrier()
    manager.close()
    dist.barrier()
    if rank == 0:
        # A save that was killed has no metadata.
        files, path = fsspec.url_to_fs(f"{folder}/step-11/__0_0.distcp")
        files.pipe(path, b"half")
    dist.barrier()
    model, progress = model_of(0.0), Values(step=0)
    manager = kind(*arguments, model, {"train_state": progress})
    assert manager.load() is True
    manager.close()
    return progress.values["step"], [parameter.full_tensor().unique().tolist() for parameter in model.parameters()]


@pytest.mark.providers("s3", GCS_IN_MATRIX)
@pytest.mark.parametrize(
    "is_async", [pytest.param(False, marks=pytest.mark.matrix, id="save"), pytest.param(True, id="async_save")]
)
@pytest.mark.parametrize(
    "kind",
    [
        SameCalls,
        pytest.param(
            manager_of_torchtitan,
            marks=pytest.mark.skipif(not importlib.util.find_spec("torchtitan"), reason="torchtitan is not installed"),
        ),
    ],
)
def test_steps_are_saved_found_loaded_and_deleted_by_url(bucket, kind, is_async):
    folder = f"tobj+{bucket.url}/run/checkpoint"
    assert run_ranks(trained, kind, folder, bucket.config, is_async) == [(10, [[10.0], [10.0]])] * 2
    steps = {key.split("/")[2] for key in bucket.keys()}
    # While a save is in flight, torchtitan deletes what is too old if the folder of the new step exists already.
    assert steps - ({"step-1"} if is_async else set()) == {"step-2", "step-10", "step-11"}
    files = [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert [key for key in bucket.keys() if "/step-2/" in key] == [f"run/checkpoint/step-2/{name}" for name in files]
    assert bucket.uploads() == []
