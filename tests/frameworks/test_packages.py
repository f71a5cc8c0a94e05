"""The released training packages: samples are complete and correct, and were announced."""

import contextlib
import importlib
import json
import mmap
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler, SequentialSampler

import torchobj
from tests.support import warm_python
from tests.support.prefetching import Taken
from tests.support.ranks import environment_of, job_store
from torchobj.datasets.samples import MapStyleDataset
from torchobj.reading import lookahead_warning
from torchobj.warn_once import FORKED, PROCESS

COUNT = 48

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    # torchdata 0.11 calls a function that torch 2.15 deprecates: fixed on its main branch (pytorch/data#1537).
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    # Lightning 2.6 uses a deprecated function of torch's pytree module.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    # Lightning warns on a machine with many cores.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


def sample(reader):
    body = bytes(reader)
    return {"key": int(reader.key[-2:]), "size": len(body), "right": body == content(int(reader.key[-2:]))}


def content(number):
    return f"body {number}".encode() * (1 + 20 * number)


@pytest.fixture
def data(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"k{number:02}").write_bytes(content(number))
    return torchobj.ObjectMapDataset(f"file://{tmp_path}/", transform=sample)


def keys(batches):
    batches = list(batches)
    assert all(batch["right"].all() for batch in batches)
    return [key for batch in batches for key in batch["key"].tolist()]


# Lightning


def lightning_module():
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.trained, self.validated = torch.nn.Linear(1, 1), [], []

        def training_step(self, batch, _index):
            assert batch["right"].all()
            self.trained += batch["key"].tolist()
            return self.layer(batch["size"].float()[:, None]).mean()

        def validation_step(self, batch, _index):
            assert batch["right"].all()
            self.validated += batch["key"].tolist()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    return lightning, Module()


def lightning_trainer(lightning, **settings):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(accelerator="cpu", num_sanity_val_steps=0, **quiet, **settings)


@pytest.mark.parametrize("make", ["torchobj.DataLoader", "attach"])
def test_lightning_trains_and_validates(data, make):
    lightning, module = lightning_module()

    def loader(**settings):
        if make == "attach":
            return torchobj.attach(torch.utils.data.DataLoader(data, batch_size=5, num_workers=1, **settings))
        return torchobj.DataLoader(data, batch_size=5, num_workers=1, **settings)

    with Taken() as taken:
        lightning_trainer(lightning, max_epochs=2).fit(module, loader(shuffle=True), loader())
    assert sorted(module.trained) == sorted([*range(COUNT), *range(COUNT)])
    assert module.trained != module.validated == [*range(COUNT), *range(COUNT)]
    assert (taken.announced, taken.misses) == (4 * COUNT, 0)


UPDATES = ["lightning.pytorch.utilities.data", "lightning.fabric.utilities.data"]


def announcing_batches(data):
    return torch.utils.data.DataLoader(
        data, batch_sampler=torchobj.LookaheadBatchSampler(SequentialSampler(data), 5, drop_last=True), num_workers=1
    )


LOADERS = {
    "ours": lambda data: torchobj.DataLoader(data, batch_size=5, drop_last=True, num_workers=1, lookahead=3),
    "attached": lambda data: torchobj.attach(
        torch.utils.data.DataLoader(data, batch_size=5, drop_last=True, num_workers=1)
    ),
    "batch sampler": announcing_batches,
}


@pytest.mark.parametrize("module", UPDATES)
@pytest.mark.parametrize("kind", LOADERS)
def test_lightning_recreates_a_loader_with_a_distributed_sampler(data, module, kind):
    pytest.importorskip("lightning.pytorch")
    loader = LOADERS[kind](data)
    for rank in range(2):
        sampler = DistributedSampler(data, 2, rank, shuffle=False)
        again = importlib.import_module(module)._update_dataloader(loader, sampler)
        assert type(again) is type(loader)
        assert type(again.batch_sampler) is type(loader.batch_sampler)
        assert getattr(again, "lookahead", None) == getattr(loader, "lookahead", None)
        with Taken() as taken:
            assert keys(again) == [*range(rank, COUNT, 2)][:20]
        assert (taken.announced, taken.misses) == (20, 0)


# Accelerate


@pytest.fixture
def accelerator():
    accelerate = pytest.importorskip("accelerate")
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stateful", [False, True])
def test_accelerate_prepares_and_attach_announces(data, accelerator, workers, stateful):
    accelerator.dataloader_config.use_stateful_dataloader = stateful
    stock = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True, num_workers=workers)
    prepared = accelerator.prepare(stock)
    assert torchobj.attach(prepared) is prepared
    for epoch in range(2):
        with Taken() as taken:
            assert sorted(keys(prepared)) == list(range(COUNT))
        # A StatefulDataLoader starts its first pass when Accelerate reads its state in prepare().
        if epoch == 1 or not stateful:
            assert (taken.announced, taken.misses) == (COUNT, 0)


@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, torchobj.DataLoader])
def test_a_prepared_loader_in_a_state_has_a_state_or_says_how_to_have_one(data, accelerator, kind, tmp_path):
    manager = torchobj.CheckpointManager(tmp_path.as_uri())
    prepared = accelerator.prepare(kind(data, batch_size=5))
    for loader in (prepared, torchobj.attach(prepared)):
        with pytest.raises(
            torchobj.TorchobjError, match=r"^train.loader: .* Accelerate .*use_stateful_dataloader=True"
        ):
            manager.save(1, {"train": {"loader": loader}})
    accelerator.dataloader_config.use_stateful_dataloader = True
    manager.save(1, {"loader": accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=5))})


def test_a_loader_that_prepare_replaced_is_told_to_attach_the_prepared_one(data, accelerator, caplog, monkeypatch):
    monkeypatch.setattr(lookahead_warning, "_disabled", False)
    monkeypatch.setattr(lookahead_warning, "_batches", 0)
    monkeypatch.setattr(FORKED, "_flags", mmap.mmap(-1, 1 << 16))
    assert sorted(keys(accelerator.prepare(torchobj.DataLoader(data, batch_size=2)))) == list(range(COUNT))
    assert "call torchobj.attach(accelerator.prepare(loader)), because prepare returns another loader" in caplog.text


@pytest.mark.parametrize("batches", [torch.utils.data.BatchSampler, torchobj.LookaheadBatchSampler])
@pytest.mark.parametrize("workers", [0, 1])
def test_each_rank_of_accelerate_announces_its_own_batches_only(data, accelerator, batches, workers):
    from accelerate.data_loader import prepare_data_loader

    seen = []
    for rank in range(2):
        stock = torch.utils.data.DataLoader(
            data, batch_sampler=batches(SequentialSampler(data), 4, False), num_workers=workers
        )
        prepared = torchobj.attach(prepare_data_loader(stock, num_processes=2, process_index=rank))
        with Taken() as taken:
            mine = keys(prepared)
        assert len(mine) == COUNT // 2
        assert (taken.announced, taken.misses, taken.objects) == (COUNT // 2, 0, COUNT // 2)
        seen += mine
    assert sorted(seen) == list(range(COUNT))


def test_attach_warns_once_that_accelerate_writes_local_files_only(data, accelerator, caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PROCESS, "_once", {})
    torchobj.attach(torch.utils.data.DataLoader(data))
    assert caplog.messages == []
    for _ in range(2):
        torchobj.attach(accelerator.prepare(torch.utils.data.DataLoader(data)))
    [message] = [each for each in caplog.messages if each.startswith("attach: ")]
    assert "makes a folder s3: on this machine; save to a local folder and call torchobj.files.upload" in message
    accelerator.save_state("s3://bucket/run")
    assert (tmp_path / "s3:" / "bucket" / "run").is_dir()


# transformers


class Model(torch.nn.Module):
    """Records its samples, and the mode of each call."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), {True: [], False: []}

    def forward(self, key, size, right):
        assert right.all()
        self.seen[self.training] += key.tolist()
        output = self.layer(size.float()[:, None])
        return {"loss": output.mean(), "logits": output}


@pytest.mark.parametrize("workers", [0, 1])
def test_the_trainer_of_transformers_with_the_callback(data, tmp_path_factory, workers):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path_factory.mktemp("out")),
        max_steps=24,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=12,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        prediction_loss_only=True,
        dataloader_num_workers=workers,
        dataloader_pin_memory=False,
    )
    model = Model()
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, callbacks=[torchobj.transformers.LookaheadCallback()]
    )
    with Taken() as taken:
        trainer.train()
    assert sorted(model.seen[True]) == sorted([*range(COUNT), *range(COUNT)])
    assert model.seen[False] == [*range(COUNT), *range(COUNT)]
    # The evaluation loader is first seen when its first batches have been drawn: their objects are not announced.
    begun = 4 * (2 + 2 * workers)
    assert (taken.announced, taken.misses) == (4 * COUNT - 2 * begun, 2 * begun if workers else taken.misses)
    assert taken.objects <= 4 * COUNT


def test_the_callback_ignores_other_datasets_and_warns_about_a_training_dataset(caplog, tmp_path):
    pytest.importorskip("transformers")
    callback = torchobj.transformers.LookaheadCallback()
    callback.on_train_begin(None, None, None, train_dataloader=torch.utils.data.DataLoader(range(3)))
    callback.on_prediction_step(None, None, None, eval_dataloader=torch.utils.data.DataLoader(range(3)))
    [record] = caplog.records
    assert "LookaheadCallback: attach: torchobj does not know" in record.getMessage()


@pytest.mark.parametrize("late", [False, True], ids=["argument", "add_callback"])
@pytest.mark.parametrize("folder", ["s3://bucket/run", "out"])
def test_the_callback_warns_once_of_an_output_folder_that_is_not_local(
    data, caplog, tmp_path, monkeypatch, late, folder
):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    arguments = transformers.TrainingArguments(
        output_dir=folder, report_to=[], use_cpu=True, max_steps=1, save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False, dataloader_pin_memory=False,
    )  # fmt: skip
    callback = torchobj.transformers.LookaheadCallback()
    trainer = transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[] if late else [callback])
    if late:
        trainer.add_callback(callback)
    for _ in range(2):
        trainer.train()
    found = [each for each in caplog.messages if "writes local files only" in each or each.startswith("attach: ")]
    assert len(found) == (folder != "out")
    if found:
        assert "output_dir='s3://bucket/run'" in found[0] and "to the folder s3:/bucket/run; pass a local" in found[0]


# torchdata


def stateful(data, attached, workers, **settings):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    torch.manual_seed(5)
    loader = torchdata.StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=workers, **settings)
    return torchobj.attach(loader) if attached else loader


@pytest.mark.parametrize("workers", [0, 1])
def test_torchdatas_loader_keeps_its_order_and_announces(data, workers):
    stock, ours = stateful(data, False, workers), stateful(data, True, workers)
    with Taken() as taken:
        found = [keys(ours) for _ in range(2)]
    assert (taken.announced, taken.misses) == (2 * COUNT, 0)
    assert found == [keys(stock) for _ in range(2)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batches", [None, torchobj.LookaheadBatchSampler])
def test_torchdatas_loader_resumes_at_its_position_and_announces_the_rest_only(data, workers, batches):
    def make():
        loader = stateful(data, True, workers)
        if batches is None:
            return loader
        sampler = torch.utils.data.SubsetRandomSampler(range(COUNT), generator=torch.Generator().manual_seed(2))
        return type(loader)(data, batch_sampler=batches(sampler, 4, dataset=data), num_workers=workers)

    loader = make()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    rest = keys(iterator)
    del iterator
    again = make()
    again.load_state_dict(state)
    with Taken() as taken:
        assert keys(again) == rest
    assert (taken.announced, taken.misses, taken.objects) == (COUNT - 12, 0, COUNT - 12)


def test_the_last_batches_of_a_resumed_loader_are_announced_until_a_worker_requests_them(data, monkeypatch):
    """torchdata drops a resumed order when all of it was sent to the workers."""
    begin, read = multiprocessing.get_context("fork").Event(), MapStyleDataset.__getitems__

    def read_the_last_later(self, indices):
        if sorted(indices) == last:
            begin.wait(30)
        return read(self, indices)

    def make():
        sampler = torchobj.LookaheadBatchSampler(range(COUNT), 4, dataset=data)
        return torchobj.attach(torchdata.StatefulDataLoader(data, batch_sampler=sampler, num_workers=1))

    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    last = [*range(COUNT - 4, COUNT)]
    monkeypatch.setattr(MapStyleDataset, "__getitems__", read_the_last_later)
    loader = make()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    begin.set()
    expected = keys(iterator)
    begin.clear()
    again = make()
    again.load_state_dict(state)
    with Taken() as taken:
        rest = iter(again)
        found = [next(rest) for _ in range(COUNT // 4 - 2)]
        begin.set()
        assert keys([*found, *rest]) == expected
    assert (taken.announced, taken.misses, taken.objects) == (COUNT - 4, 0, COUNT - 4)


# torchrun


def found_by_ranks(out):
    """What each of two ranks wrote."""
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def as_torchrun(script, folder, out):
    """Runs a script as two ranks without torchrun, with its variables. Returns what each wrote."""
    store, arguments = job_store(), [Path(__file__).with_name(script), folder, out]
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(warm_python.Process(arguments, env=os.environ | environment_of(store.port, rank)))
            for rank in range(2)
        ]
        for rank in ranks:
            assert rank.wait(110) == 0, rank.errors()
    return found_by_ranks(out)


def under_torchrun(script, folder, out):
    """Returns what each of two ranks wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*command, Path(__file__).with_name(script), folder, out], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return found_by_ranks(out)


def assert_announced(stats, count):
    assert stats["hits"] + stats["late"] + stats["queued"] == count
    assert (stats["misses"], stats["objects"]) == (0, count)


@pytest.mark.parametrize("start", [as_torchrun, pytest.param(under_torchrun, marks=pytest.mark.matrix)])
def test_under_torchrun_each_rank_has_its_share_and_its_own_prefetcher(data, tmp_path, tmp_path_factory, start):
    ranks = start("ranks_under_torchrun.py", tmp_path, tmp_path_factory.mktemp("out"))
    for epoch in range(2):
        both = [tuple(sample) for rank in ranks for sample in rank["epochs"][epoch]]
        assert sorted(both) == [(number, len(content(number))) for number in range(COUNT)]
    for rank in ranks:
        assert_announced(rank["stats"], COUNT)


@pytest.mark.matrix
def test_lightning_divides_the_samples_between_two_ranks(data, tmp_path, tmp_path_factory):
    pytest.importorskip("lightning.pytorch")
    ranks = under_torchrun("lightning_under_torchrun.py", tmp_path, tmp_path_factory.mktemp("out"))
    assert sorted(key for rank in ranks for key in rank["keys"]) == sorted([*range(COUNT), *range(COUNT)])
    for rank in ranks:
        assert rank["sampler"] == "DistributedSampler"
        assert_announced(rank["stats"], COUNT)
