"""Callbacks that log how long the loops of Trainers waited for data."""

import logging

import pytest
import torch

import torchobj
from tests.support.trained_models import Regression

pytestmark = pytest.mark.xdist_group("lightning")

COUNT = 32


@pytest.fixture
def data(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"{number:03}").write_bytes(bytes([number]))
    return torchobj.ObjectMapDataset(f"file://{tmp_path}/0", transform=values_of)


def values_of(reader):
    value = float(reader.read()[0])
    return {"x": torch.tensor([value, 1.0]), "labels": torch.tensor(value)}


def model_of(pl):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, _index):
            return self.layer(batch["x"]).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.001)

    return Module()


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("package", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.matrix)])
def test_lightning_logs_the_exposed_data_time(package, data, tmp_path, caplog):
    pl = pytest.importorskip(package)

    class Records(pl.loggers.CSVLogger):
        seen = []

        def log_metrics(self, metrics, step=None):
            self.seen.append((step, metrics))

    def trainer():
        return pl.Trainer(
            accelerator="cpu", max_epochs=1, log_every_n_steps=2, logger=Records(tmp_path), enable_checkpointing=False,
            callbacks=[torchobj.lightning.LoaderLogger(ranks=True)], enable_progress_bar=False,
            enable_model_summary=False, accumulate_grad_batches=2,
        )  # fmt: skip

    trainer().fit(model_of(pl), torchobj.DataLoader(data, batch_size=4))
    found = [(step, values) for step, values in Records.seen if "torchobj.exposed.share" in values]
    assert [step for step, _ in found] == [2, 4]
    assert all(0 < values["torchobj.exposed.share"] <= 1 for _, values in found)
    assert all(values["torchobj.exposed.slowest.rank"] == 0 for _, values in found)
    with caplog.at_level(logging.WARNING, "torchobj"):
        trainer().fit(model_of(pl), torch.utils.data.DataLoader([values_of(open_one(data))] * 8, batch_size=4))
    assert "no training loader is one of torchobj" in caplog.text


def open_one(data):
    return torchobj.open(data.manifest.url(0))


def test_the_trainer_of_transformers_logs_the_exposed_data_time(data, tmp_path):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True, num_train_epochs=1, save_strategy="no",
        disable_tqdm=True, remove_unused_columns=False, dataloader_pin_memory=False, logging_steps=4,
        per_device_train_batch_size=4,
    )  # fmt: skip
    attaching = torchobj.transformers.LookaheadCallback()
    trainer = transformers.Trainer(Regression(), arguments, train_dataset=data, callbacks=[attaching])
    trainer.add_callback(torchobj.transformers.LoaderLogCallback(trainer))
    trainer.train()
    found = [record for record in trainer.state.log_history if "torchobj.exposed.share" in record]
    assert [record["step"] for record in found] == [4, 8]
    assert all(0 < record["torchobj.exposed.share"] <= 1 for record in found)


@pytest.mark.parametrize("given", [(), (None,), (object(),)])
def test_a_callback_without_a_trainer_says_how_to_create_it(given):
    pytest.importorskip("transformers")
    with pytest.raises(TypeError, match=r"trainer\.add_callback\(LoaderLogCallback\(trainer\)\)"):
        torchobj.transformers.LoaderLogCallback(*given)
