"""The Trainer of transformers, and a loop with Accelerate, killed at any moment: they resume from the newest committed
checkpoint, with the losses of a training that was not killed."""

import itertools
import random

import pytest
import torch

from tests.support.killed_trainings import Training
from torchobj.checkpoint import FolderCheckpoints

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

import torchobj.accelerate  # noqa: E402
import torchobj.transformers  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

STEPS, SAVE_STEPS = 12, 2


class Model(torch.nn.Module):
    """A model whose losses depend on the generator of random numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))

    def forward(self, x, labels):
        return {"loss": (self.layers(x)[:, 0] - labels).pow(2).mean()}


def samples():
    generator = torch.Generator().manual_seed(5)
    return [{"x": torch.rand(4, generator=generator), "labels": torch.tensor(float(n % 3))} for n in range(24)]


def train_with_transformers(rank, url, config, folder):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"), report_to=[], use_cpu=True, max_steps=STEPS, save_steps=SAVE_STEPS, seed=7,
        logging_steps=1, save_total_limit=2, disable_tqdm=True, per_device_train_batch_size=4, log_level="error",
    )  # fmt: skip
    callbacks, resumed = [], None
    if url is not None:
        callbacks = [torchobj.transformers.CheckpointCallback(url, keep_last=2, config=config)]
        resumed = torchobj.transformers.latest_checkpoint(url, arguments.output_dir, config=config)
    trainer = transformers.Trainer(Model(), arguments, train_dataset=samples(), callbacks=callbacks)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resumed)
    names = ("step", "epoch", "loss", "grad_norm", "learning_rate")
    losses = [[record[name] for name in names] for record in trainer.state.log_history if "loss" in record]
    return resumed and int(resumed.rpartition("-")[2]), losses


class Losses:
    """What a loop registers to be saved with its state."""

    def __init__(self):
        self.values = []

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def train_with_accelerate(rank, url, config, folder):
    # Without a seedable sampler, an epoch that is resumed has another order; without a generator of its own, the loader
    # draws from the global one at each start.
    loaders = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = accelerate.Accelerator(cpu=True, project_dir=str(folder), dataloader_config=loaders)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    loader = torch.utils.data.DataLoader(samples(), batch_size=4, shuffle=True, generator=torch.Generator())
    accelerate.utils.set_seed(7)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    losses = Losses()
    accelerator.register_for_checkpointing(losses)
    resumed = None if url is None else torchobj.accelerate.load_state(accelerator, url, config=config)
    step = resumed or 0
    while step < STEPS:
        epoch, begun = divmod(step, len(loader))
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, begun) if begun else loader:
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            step += 1
            losses.values.append([step, loss.item(), schedule.get_last_lr()[0]])
            if url is not None and step % SAVE_STEPS == 0:
                torchobj.accelerate.save_state(accelerator, url, step, keep_last=2, config=config)
            if step == STEPS:
                break
    return resumed, losses.values


TRAININGS = {"transformers": train_with_transformers, "accelerate": train_with_accelerate}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Trains in this process once: frameworks import most of their modules in their first training, which takes seconds."""
    for train in TRAININGS.values():
        train(0, None, None, tmp_path_factory.mktemp("imported"))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize(
    ("framework", "size", "count"),
    [
        ("transformers", 1, 2),
        ("accelerate", 2, 1),
        pytest.param("transformers", 1, 20, marks=pytest.mark.matrix),
        pytest.param("transformers", 2, 20, marks=pytest.mark.matrix),
        pytest.param("accelerate", 1, 10, marks=pytest.mark.matrix),
        pytest.param("accelerate", 2, 10, marks=pytest.mark.matrix),
    ],
)
def test_a_training_killed_at_any_moment_resumes_from_the_newest_committed_checkpoint(
    framework, size, count, bucket, control, tmp_path, imported
):
    moments = random.Random(31)

    def training_in(name):
        (tmp_path / name).mkdir()
        return Training(TRAININGS[framework], size, tmp_path / name)

    expected = training_in("without").run()["losses"]
    assert len(expected) == STEPS
    control.clear_requests()
    whole = training_in("uninterrupted").run(f"{bucket.url}/uninterrupted", bucket.config)
    assert (whole["resumed"], whole["losses"]) == (None, expected)
    requests = len(control.requests())
    resumed = []
    for number in itertools.count():
        each = training_in(str(number))
        url = f"{bucket.url}/run-{number}"
        if number % 2:
            request, is_answered = moments.randrange(requests), moments.random() < 0.5
            ended = each.run_until_request(control, request, url, bucket.config, is_answered=is_answered)
        else:
            ended = each.run(url, bucket.config, moments.randrange(whole["calls"]), moments.randrange(size))
        newest = FolderCheckpoints(url, config=bucket.config).latest()
        if moments.random() < 0.5:
            # The training continues on another machine.
            each = training_in(f"{number}-other")
        found = each.run(url, bucket.config)
        assert (found["resumed"], found["losses"]) == (newest, expected)
        # Its last moments may come in another run only.
        if ended is None:
            resumed.append(newest)
            if len(resumed) == count:
                break
    print(f"{framework}, {size} ranks: resumed from {resumed}")
