"""Whichever framework iterates over an iterable dataset, the ranks together yield each sample once."""

import contextlib
import functools
import importlib
import io
import os
import tarfile

import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torchobj
from tests.support.lightning_numbers import numbers_by_trainer
from tests.support.ranks import on_one_machine, run_ranks

COUNT = 24
KINDS = ["objects", "tar", "parquet", "mixture"]
WORKERS = [0, 2]

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.xdist_group("lightning"),
]


def write(folder):
    """Numbers 0..24 as objects, as samples of four shards, and as rows of four files."""
    for kind in KINDS[:3]:
        (folder / kind).mkdir()
    for number in range(COUNT):
        (folder / "objects" / f"{number:02}").write_bytes(b"%d" % number)
    for part, first in enumerate(range(0, COUNT, 6)):
        numbers = range(first, first + 6)
        table = pyarrow.table({"number": list(numbers)})
        pyarrow.parquet.write_table(table, folder / "parquet" / f"{part}.parquet")
        with tarfile.open(folder / "tar" / f"{part}.tar", "w") as shard:
            for number in numbers:
                member = tarfile.TarInfo(f"{number:02}.txt")
                member.size = len(str(number))
                shard.addfile(member, io.BytesIO(b"%d" % number))


def of_reader(reader):
    return torch.tensor(int(bytes(reader)))


def of_sample(sample):
    return torch.tensor(int(bytes(sample["txt"])))


def of_row(row):
    return torch.tensor(row["number"] + COUNT)


def dataset(kind, folder, **given):
    if kind == "objects":
        settings = {"shuffle": True, "enable_sharding": True}
        return torchobj.ObjectIterableDataset(f"file://{folder}/objects/", transform=of_reader, **settings | given)
    if kind == "tar":
        return torchobj.TarIterableDataset(f"file://{folder}/tar/", transform=of_sample, **given)
    if kind == "parquet":
        return torchobj.ParquetIterableDataset(f"file://{folder}/parquet/", transform=of_row, shuffle=True, **given)
    members = [dataset(each, folder) for each in ("tar", "parquet")]
    return torchobj.interleave(members, stopping_strategy="all_exhausted", **given)


def expected(kind):
    first, end = {"parquet": (COUNT, 2 * COUNT), "mixture": (0, 2 * COUNT)}.get(kind, (0, COUNT))
    return list(range(first, end))


# Each returns the numbers that a rank gets.


def by(loader_class, folder, kind, workers, **given):
    return loader_class(dataset(kind, folder, **given), batch_size=3, num_workers=workers)


def flat(batches):
    return [number for batch in batches for number in batch.tolist()]


def plain(name, folder, kind, workers):
    module, _, loader_class = name.rpartition(".")
    return flat(by(getattr(importlib.import_module(module), loader_class), folder, kind, workers))


def accelerator_of_rank(**settings):
    """An Accelerator for two ranks. A rank is forked from a process of tests, where others have set the state that its
    objects share.
    """
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, **settings)
    assert accelerator.num_processes == 2
    return accelerator


def prepared(settings, loader_class, folder, kind, workers):
    import accelerate

    accelerator = accelerator_of_rank(dataloader_config=accelerate.DataLoaderConfiguration(**settings))
    return flat(accelerator.prepare(by(loader_class, folder, kind, workers)))


def not_prepared(folder, kind, workers):
    """A loader that is not prepared, within the loop over one that is."""
    accelerator = accelerator_of_rank()
    next(iter(accelerator.prepare(by(torchobj.DataLoader, folder, "tar", 0))))
    return flat(by(torchobj.DataLoader, folder, kind, workers))


def by_trainer(folder, kind, workers):
    batches = by(torchobj.DataLoader, folder, kind, workers)
    trainer, numbers = numbers_by_trainer(batches, devices=2, strategy="ddp", max_epochs=1)
    assert trainer.world_size == 2
    return numbers


def by_fabric(folder, kind, workers):
    import lightning.fabric

    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return flat(fabric.setup_dataloaders(by(torchobj.DataLoader, folder, kind, workers)))


def by_transformers(folder, kind, workers):
    import transformers

    numbers = []

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, number):
            numbers.extend(number.tolist())
            return {"loss": self.layer(number.float()[:, None]).mean()}

    def collate(samples):
        return {"number": torch.stack(samples)}

    arguments = transformers.TrainingArguments(
        output_dir=f"{folder}/out",
        # Enough for one pass: the trainer does not know the length.
        max_steps=len(expected(kind)) // 6,
        per_device_train_batch_size=3,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=workers,
        dataloader_pin_memory=False,
    )
    transformers.Trainer(Model(), arguments, train_dataset=dataset(kind, folder), data_collator=collate).train()
    return numbers


def as_ray(folder, kind, workers):
    """As Ray Train starts a worker: it joins the group with the rank of its own, and leaves iterable datasets alone."""
    return flat(by(torch.utils.data.DataLoader, folder, kind, workers))


def in_mesh(shape, folder, kind, workers):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    return flat(by(torchobj.DataLoader, folder, kind, workers, mesh=mesh))


stock, ours = torch.utils.data.DataLoader, torchobj.DataLoader
FRAMEWORKS = {
    "torchobj": functools.partial(plain, "torchobj.DataLoader"),
    "torch": functools.partial(plain, "torch.utils.data.DataLoader"),
    "torchdata": functools.partial(plain, "torchdata.stateful_dataloader.StatefulDataLoader"),
    "accelerate": functools.partial(prepared, {}, ours),
    "accelerate of torch": functools.partial(prepared, {}, stock),
    "accelerate dispatches": functools.partial(prepared, {"dispatch_batches": True}, ours),
    "accelerate divides": functools.partial(prepared, {"dispatch_batches": False}, ours),
    "accelerate of torch divides": functools.partial(prepared, {"dispatch_batches": False}, stock),
    "accelerate stateful": functools.partial(prepared, {"use_stateful_dataloader": True}, stock),
    "accelerate not prepared": not_prepared,
    "transformers": by_transformers,
    "lightning": by_trainer,
    "fabric": by_fabric,
    "ray": as_ray,
    "mesh of two data-parallel ranks": functools.partial(in_mesh, (2, 1)),
    "mesh of two tensor-parallel ranks": functools.partial(in_mesh, (1, 2)),
}
SAME = "mesh of two tensor-parallel ranks"
MATRIX = {
    "accelerate of torch",
    "accelerate of torch divides",
    "accelerate dispatches",
    "accelerate divides",
    "accelerate stateful",
    "mesh of two data-parallel ranks",
    "transformers",
    "torchdata",
    "fabric",
    "ray",
}
IMPORTED = {
    "accelerate": "accelerate",
    "transformers": "transformers",
    "lightning": "lightning.pytorch",
    "fabric": "lightning.fabric",
}


def run(rank, name, folder):
    with contextlib.redirect_stdout(io.StringIO()):
        if name in ("lightning", "fabric"):
            # Without these variables Lightning would start the second rank itself.
            on_one_machine(rank)
            os.environ |= {"TORCHELASTIC_RUN_ID": "job", "GROUP_RANK": "0"}
        else:
            # Accelerate warns if it is not set.
            os.environ["OMP_NUM_THREADS"] = "1"
            dist.init_process_group("gloo")
        return {(kind, workers): FRAMEWORKS[name](folder, kind, workers) for kind in KINDS for workers in WORKERS}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """What each of two ranks of a framework got, by kind of dataset and number of workers; the ranks run once."""
    folder = tmp_path_factory.mktemp("who-divides")
    write(folder)

    @functools.cache
    def found(name):
        if (module := IMPORTED.get(name.split()[0])) is not None:
            # Imported once, and inherited by the ranks.
            pytest.importorskip(module)
        return run_ranks(run, name, folder)

    return found


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix) if name in MATRIX else name for name in FRAMEWORKS]
)
def test_the_ranks_together_have_each_sample_once(numbers, name, kind, workers):
    one, two = numbers(name)
    assert isinstance(one, dict), one
    assert isinstance(two, dict), two
    one, two = one[kind, workers], two[kind, workers]
    if name == SAME:
        assert sorted(one) == expected(kind)
        assert one == two
    else:
        assert sorted(one + two) == expected(kind)
        assert len(one) == len(two)
