"""No framework ends an epoch of an iterable dataset before its last sample: what it takes for the length is right, or it
takes none.
"""

import collections
import functools

import pyarrow
import pyarrow.parquet
import pytest
import torch

import torchobj
from tests.support.lightning_numbers import numbers_by_trainer
from tests.support.long_tables import often

#: Rows of the files, which workers divide: their smaller last batches are more than those of all rows together.
SIZES = (9, 6, 3, 5)
COUNT = sum(SIZES)
BATCH = 4

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes"),
    pytest.mark.xdist_group("lightning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, first = tmp_path_factory.mktemp("whole-epochs"), 0
    for part, size in enumerate(SIZES):
        rows = pyarrow.table({"number": range(first, first + size)})
        pyarrow.parquet.write_table(rows, path / f"{part}.parquet")
        first += size
    return path


def number_of(row):
    return row["number"]


def dataset(folder, **options):
    return torchobj.ParquetIterableDataset(f"file://{folder}/", transform=number_of, **options)


def loader(loader_class, folder, workers, **options):
    return loader_class(dataset(folder, **options), batch_size=BATCH, num_workers=workers)


# Each returns the numbers of the samples of two epochs.


def by_loop(loader_class, folder, workers):
    batches = loader(loader_class, folder, workers)
    return [number for _ in range(2) for batch in batches for number in batch.tolist()]


def by_accelerate(loader_class, folder, workers):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    batches = accelerator.prepare(loader(loader_class, folder, workers))
    return [number for _ in range(2) for batch in batches for number in accelerator.gather_for_metrics(batch).tolist()]


def by_lightning(loader_class, folder, workers, **options):
    return numbers_by_trainer(loader(loader_class, folder, workers, **options), max_epochs=2)[1]


def by_transformers(_, folder, workers):
    """The Trainer creates the loader. It is told the number of batches, as of any iterable dataset."""
    transformers = pytest.importorskip("transformers")
    numbers = []

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, number):
            numbers.extend(number.tolist())
            output = self.layer(number.float()[:, None])
            return {"loss": output.mean(), "logits": output}

    def collate(samples):
        return {"number": torch.tensor(samples)}

    arguments = transformers.TrainingArguments(
        output_dir=f"{folder}/out",
        max_steps=2 * len(loader(torchobj.DataLoader, folder, workers)),
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=workers,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(Model(), arguments, train_dataset=dataset(folder), data_collator=collate)
    trainer.train()
    trained = [*numbers]
    _, logits = trainer.predict(dataset(folder)).predictions
    assert len(logits) == COUNT
    return trained


torchs, ours = torch.utils.data.DataLoader, torchobj.DataLoader
LOOPS = {
    "torch": functools.partial(by_loop, torchs),
    "torchobj": functools.partial(by_loop, ours),
    "accelerate of torch": functools.partial(by_accelerate, torchs),
    "accelerate": functools.partial(by_accelerate, ours),
    "lightning of torch": functools.partial(by_lightning, torchs),
    "transformers": functools.partial(by_transformers, None),
}
TABLE = [(name, 4) for name in LOOPS] + [(name, workers) for name in LOOPS for workers in (0, 1)]


@pytest.mark.parametrize(("name", "workers"), often(len(LOOPS), TABLE))
def test_two_epochs_have_each_sample_twice_and_nothing_warns(folder, name, workers):
    assert collections.Counter(LOOPS[name](folder, workers)) == dict.fromkeys(range(COUNT), 2)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize(
    ("workers", "options"),
    often(2, [(4, {}), (3, {"shuffle": True, "seed": 5}), (3, {"shuffle": True, "uneven": "pad"}), (0, {})]),
)
def test_a_trainer_of_lightning_that_knows_the_length_reads_as_far(folder, workers, options):
    numbers = by_lightning(ours, folder, workers, **options)
    assert collections.Counter(numbers) == dict.fromkeys(range(COUNT), 2)
