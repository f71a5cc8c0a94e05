"""The state of an Accelerator in a bucket: what is saved and loaded, under which step, and by which ranks."""

import random

import pytest
import torch

from tests.support.ranks import on_one_machine, run_ranks
from torchobj import exceptions
from torchobj.checkpoint import FolderCheckpoints
from torchobj.exceptions import ConfigError

accelerate = pytest.importorskip("accelerate")

from torchobj.accelerate import load_state, save_state  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore:.*barrier.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.. before .optimizer.step"),
]


@pytest.fixture(autouse=True)
def separate_state():
    """An Accelerator has a state that all of a process share."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture
def url(bucket):
    return f"{bucket.url}/run"


class Counter:
    """What a program registers to be saved with its state."""

    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def prepared(**arguments):
    """An Accelerator, and its objects after two steps of training."""
    accelerator = accelerate.Accelerator(cpu=True, **arguments)
    torch.manual_seed(7)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, (model, optimizer, schedule, counter)


def train(accelerator, objects):
    model, optimizer, schedule, counter = objects
    optimizer.zero_grad()
    accelerator.backward(model(torch.rand(4, 2)).square().mean())
    optimizer.step()
    schedule.step()
    counter.value += 1


def state_of(objects):
    model, optimizer, schedule, counter = objects
    return {
        "weights": [each.tolist() for each in model.parameters()],
        "moments": [each["exp_avg"].tolist() for each in optimizer.state_dict()["state"].values()],
        "rate": schedule.get_last_lr(),
        "counter": counter.value,
    }


def test_everything_that_accelerate_saves_comes_back(bucket, url, tmp_path):
    accelerator, objects = prepared(project_dir=str(tmp_path))
    assert load_state(accelerator, url, config=bucket.config) is None
    train(accelerator, objects)
    assert save_state(accelerator, url, 100, config=bucket.config) == 100
    expected, draws = state_of(objects), (torch.rand(1).item(), random.random())
    train(accelerator, objects)
    assert state_of(objects) != expected
    assert load_state(accelerator, url, config=bucket.config) == 100
    assert (state_of(objects), (torch.rand(1).item(), random.random())) == (expected, draws)
    FolderCheckpoints(url, config=bucket.config).restore(100, tmp_path / "restored")
    names = sorted(path.name for path in (tmp_path / "restored").iterdir())
    assert names == [
        "custom_checkpoint_0.pkl", "model.safetensors", "optimizer.bin", "random_states_0.pkl", "scheduler.bin"
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["restored"]


def test_saves_are_counted_and_the_count_goes_on_after_a_load(bucket, url):
    accelerator, _ = prepared()
    assert [save_state(accelerator, url, keep_last=2, config=bucket.config) for _ in range(3)] == [0, 1, 2]
    assert FolderCheckpoints(url, config=bucket.config).steps() == [1, 2]
    accelerator.project_configuration.iteration = 0
    assert load_state(accelerator, url, config=bucket.config) == 2
    assert save_state(accelerator, url, config=bucket.config) == 3


def test_a_run_that_was_not_loaded_does_not_overwrite_steps(bucket, url, tmp_path):
    accelerator, _ = prepared(project_dir=str(tmp_path))
    save_state(accelerator, url, config=bucket.config)
    accelerator.project_configuration.iteration = 0
    with pytest.raises(exceptions.CheckpointError, match="step 0 is committed already"):
        save_state(accelerator, url, config=bucket.config)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_accelerate_names_stay(bucket, url, tmp_path):
    naming = accelerate.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator, objects = prepared(project_config=naming)
    train(accelerator, objects)
    assert [save_state(accelerator, url, config=bucket.config) for _ in range(2)] == [0, 1]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_0", "checkpoint_1"]
    expected = state_of(objects)
    train(accelerator, objects)
    assert load_state(accelerator, url, config=bucket.config) == 1
    assert state_of(objects) == expected


def of_two_ranks(rank, url, config, folder):
    on_one_machine(rank)
    accelerator, objects = prepared(project_dir=str(folder))
    torch.manual_seed(rank)
    before = load_state(accelerator, url, config=config)
    train(accelerator, objects)
    save_state(accelerator, url, config=config)
    expected = state_of(objects), torch.rand(1).item()
    train(accelerator, objects)
    loaded = load_state(accelerator, url, config=config)
    return before, loaded, (state_of(objects), torch.rand(1).item()) == expected, expected[1]


def without_a_folder(rank, url, config):
    on_one_machine(rank)
    accelerator, _ = prepared(project_dir="/proc/none")
    with pytest.raises(ConfigError, match="project_dir='/proc/none'"):
        save_state(accelerator, url, config=config)
    with pytest.raises(ConfigError, match="project_dir='/proc/none'"):
        load_state(accelerator, url, config=config)


def test_a_folder_that_cannot_be_created_is_an_error_on_all_ranks(bucket, url):
    run_ranks(without_a_folder, url, bucket.config)


def test_each_file_of_two_ranks_is_sent_once_and_each_rank_gets_its_generators(bucket, url, control, tmp_path):
    first, second = run_ranks(of_two_ranks, url, bucket.config, tmp_path)
    assert first[:3] == second[:3] == (None, 0, True)
    assert first[3] != second[3]
    sent = [each.key.rpartition("/")[2] for each in control.requests() if each.operation == "PutObject"]
    assert sorted(name for name in sent if name.endswith((".pkl", ".bin", ".safetensors"))) == [
        "custom_checkpoint_0.pkl", "model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl",
        "scheduler.bin",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []
