"""The Lightning plugin: checkpoints that a Trainer saves, resumes from, and keeps after a failure."""

import csv
import fractions
import importlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import types
from pathlib import Path

import fsspec
import pytest
import torch

import torchobj
import torchobj.fsspec
import torchobj.lightning
from tests.strict.control import FaultAction
from tests.support.long_tables import GCS_IN_MATRIX
from torchobj import exceptions
from torchobj.fsspec import instances
from torchobj.lightning import ObjectCheckpointIO
from torchobj.s3torchconnector.lightning import S3LightningCheckpoint

pytestmark = [
    pytest.mark.providers("s3", GCS_IN_MATRIX),
    # Lightning 2.6 uses a deprecated function of torch's trees.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # Lightning warns that the folder of an earlier fit exists, as expected.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    # Without tensorboard Lightning uses its CSV logger, as these tests expect.
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0, .tensorboardX. has been removed"),
    # The same for a resumed run: each has its own folder.
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
    # One process imports Lightning, which takes seconds.
    pytest.mark.xdist_group("lightning"),
]

EPOCHS, BATCHES = 4, 4


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request):
    """One of the two packages."""
    return pytest.importorskip(request.param)


@pytest.fixture(autouse=True)
def registration(fsspec_registry):
    """Registers torchobj for s3:// in fsspec."""
    torchobj.fsspec.register()


def module(pl, width=3):
    class Module(pl.LightningModule):
        def __init__(self, width):
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(width, 1)

        def training_step(self, batch, _index):
            loss = self.layer(batch[0]).pow(2).mean()
            self.log("loss", loss)
            # Later epochs are better: the best two are the last two.
            self.log("progress", float(self.global_step))
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.1)

    torch.manual_seed(7)
    return Module(width)


def batches():
    data = torch.utils.data.TensorDataset(torch.arange(6.0 * BATCHES).reshape(2 * BATCHES, 3) / 10)
    return torch.utils.data.DataLoader(data, batch_size=2)


def resumable_batches():
    return torchobj.DataLoader(batches().dataset, batch_size=2)


def trainer(pl, bucket, epochs, callbacks=(), **settings):
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        log_every_n_steps=1,
        plugins=[ObjectCheckpointIO(config=bucket.config)],
        callbacks=list(callbacks),
        **quiet,
        **settings,
    )


def best_two(pl, **settings):
    return pl.callbacks.ModelCheckpoint(monitor="progress", mode="max", save_top_k=2, **settings)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.providers("s3")
def test_a_root_in_the_bucket_has_the_best_two_checkpoints_and_the_logs(pl, bucket):
    model = module(pl)
    trainer(pl, bucket, 3, [best_two(pl)], default_root_dir=f"{bucket.url}/run 1").fit(model, batches())
    folder = "run 1/lightning_logs/version_0"
    assert bucket.keys() == [
        f"{folder}/checkpoints/epoch=1-step=8.ckpt",
        f"{folder}/checkpoints/epoch=2-step=12.ckpt",
        f"{folder}/hparams.yaml",
        f"{folder}/metrics.csv",
    ]
    assert bucket.uploads() == []
    saved = torch.load(io.BytesIO(bucket.body(f"{folder}/checkpoints/epoch=2-step=12.ckpt")), weights_only=True)
    assert equal(saved["state_dict"], weights(model))
    rows = list(csv.DictReader(bucket.body(f"{folder}/metrics.csv").decode().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(3 * BATCHES))
    # The next run has its own folder.
    trainer(pl, bucket, 1, [best_two(pl)], default_root_dir=f"{bucket.url}/run 1").fit(module(pl), batches())
    assert "run 1/lightning_logs/version_1/checkpoints/epoch=0-step=4.ckpt" in bucket.keys()


def preempted(pl, step):
    """A callback that sends the signal of a preemption in a step."""

    class Preempted(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == step:
                os.kill(os.getpid(), signal.SIGTERM)

    return Preempted()


@pytest.mark.providers("s3")
def test_model_checkpoint_saves_a_preempted_run_beside_its_other_checkpoint(pl, bucket):
    saved = pl.callbacks.ModelCheckpoint(dirpath=f"{bucket.url}/run", save_on_exception=True)
    with pytest.raises(SystemExit):
        trainer(pl, bucket, EPOCHS, [saved, preempted(pl, 5)], logger=False).fit(module(pl), batches())
    assert bucket.keys() == ["run/epoch=0-step=4.ckpt", "run/epoch=1-step=6.ckpt"]
    newest = ObjectCheckpointIO(config=bucket.config).newest(f"{bucket.url}/run")
    assert newest == f"{bucket.url}/run/epoch=1-step=6.ckpt"


@pytest.mark.providers("s3", "gs")
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(pl, bucket):
    unbroken, first, second = module(pl), module(pl), module(pl)
    trainer(pl, bucket, EPOCHS, [best_two(pl)], default_root_dir=f"{bucket.url}/unbroken").fit(unbroken, batches())
    trainer(pl, bucket, 2, [best_two(pl)], default_root_dir=f"{bucket.url}/broken").fit(first, batches())
    newest = ObjectCheckpointIO(config=bucket.config).newest(f"{bucket.url}/broken")
    assert newest == f"{bucket.url}/broken/lightning_logs/version_0/checkpoints/epoch=1-step=8.ckpt"
    trainer(pl, bucket, EPOCHS, [best_two(pl)], default_root_dir=f"{bucket.url}/broken").fit(
        second, batches(), ckpt_path=newest
    )
    assert not equal(weights(first), weights(unbroken))
    assert equal(weights(second), weights(unbroken))


def last_of(bucket, folder):
    return torchobj.lightning.LastCheckpoint(ObjectCheckpointIO(config=bucket.config), f"{bucket.url}/{folder}")


def of_lightning(test):
    """A callback is of one of the packages."""
    test = pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")(test)
    return pytest.mark.parametrize("pl", ["lightning.pytorch"], indirect=True)(test)


@of_lightning
def test_last_is_the_newest_checkpoint_below_a_folder_in_the_bucket(pl, bucket):
    unbroken, first, second = module(pl), module(pl), module(pl)
    trainer(pl, bucket, EPOCHS, default_root_dir=f"{bucket.url}/unbroken").fit(unbroken, batches())
    for model, epochs in ((first, 2), (second, EPOCHS)):
        callbacks = [best_two(pl, save_last=True), last_of(bucket, "run")]
        run = trainer(pl, bucket, epochs, callbacks, default_root_dir=f"{bucket.url}/run")
        run.fit(model, batches(), ckpt_path="last")
    assert not equal(weights(first), weights(unbroken))
    assert equal(weights(second), weights(unbroken))
    # Without the callback, Lightning looks on the local disk, and begins again.
    run = trainer(pl, bucket, 1, [best_two(pl, save_last=True)], default_root_dir=f"{bucket.url}/run")
    run.fit(module(pl), batches(), ckpt_path="last")
    assert run.global_step == BATCHES
    assert not [key for key in bucket.keys() if "on_exception" in key]


@of_lightning
def test_last_checkpoint_resumes_a_preempted_run_at_the_next_batch_and_deletes_its_checkpoint(pl, bucket):
    unbroken, first, second = module(pl), module(pl), module(pl)
    trainer(pl, bucket, EPOCHS, default_root_dir=f"{bucket.url}/unbroken").fit(unbroken, resumable_batches())
    run = trainer(pl, bucket, EPOCHS, [last_of(bucket, "run"), preempted(pl, 6)], default_root_dir=f"{bucket.url}/run")
    with pytest.raises(SystemExit):
        run.fit(first, resumable_batches(), ckpt_path="last")
    saved = torch.load(io.BytesIO(bucket.body("run/on_exception.ckpt")), weights_only=True)
    assert saved["global_step"] == 7
    assert equal(saved["state_dict"], weights(first))
    run = trainer(pl, bucket, EPOCHS, [last_of(bucket, "run")], default_root_dir=f"{bucket.url}/run")
    run.fit(second, resumable_batches(), ckpt_path="last")
    assert equal(weights(second), weights(unbroken))
    # A run that ends normally has no use for it.
    assert "run/on_exception.ckpt" not in bucket.keys()


@of_lightning
def test_a_requeued_slurm_job_saves_and_finds_its_checkpoint_in_the_bucket(pl, bucket, monkeypatch):
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    for name in ("NTASKS", "NTASKS_PER_NODE", "JOB_ID", "JOB_NAME"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    for name in ("PROCID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    requeued = []
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.signal_connector.call", requeued.append)

    class Signal(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 6:
                signal.raise_signal(signal.SIGUSR1)

    resumed = []
    for callbacks in ([Signal()], []):
        run = trainer(pl, bucket, 2, callbacks, default_root_dir=f"{bucket.url}/run", enable_checkpointing=False)
        resumed.append(run)
        run.fit(module(pl), resumable_batches())
    assert requeued == [["scontrol", "requeue", "1"]]
    assert [key for key in bucket.keys() if "hpc" in key] == ["run/hpc_ckpt_1.ckpt"]
    assert [run.ckpt_path for run in resumed] == [None, f"{bucket.url}/run/hpc_ckpt_1.ckpt"]
    assert SLURMEnvironment.detect()


def test_a_folder_for_checkpoints_holds_the_best_two_and_the_last_one(pl, bucket, tmp_path):
    callback = best_two(pl, dirpath=f"{bucket.url}/a=b/c", save_last=True, filename="{epoch} of {progress:.1f}")
    trainer(pl, bucket, 3, [callback], default_root_dir=tmp_path, logger=False).fit(module(pl), batches())
    names = [f"a=b/c/epoch={epoch} of progress={4 * epoch + 3}.0.ckpt" for epoch in (1, 2)]
    assert bucket.keys() == [*names, "a=b/c/last.ckpt"]
    assert callback.best_model_path == f"{bucket.url}/{names[1]}"
    # As after a restart: the names exist already, and get version numbers.
    callback = best_two(pl, dirpath=f"{bucket.url}/a=b/c", filename="{epoch} of {progress:.1f}")
    trainer(pl, bucket, 2, [callback], default_root_dir=tmp_path, logger=False).fit(module(pl), batches())
    assert f"{names[0].removesuffix('.ckpt')}-v1.ckpt" in bucket.keys()


def test_modules_load_their_checkpoint_by_its_url(pl, bucket):
    model = module(pl)
    run = trainer(pl, bucket, 1, default_root_dir=f"{bucket.url}/run")
    run.fit(model, batches())
    run.save_checkpoint(f"{bucket.url}/by hand.ckpt")
    again = type(model).load_from_checkpoint(f"{bucket.url}/by hand.ckpt")
    assert equal(weights(again), weights(model))
    assert run.validate(module_with_validation(pl), batches(), ckpt_path=f"{bucket.url}/by hand.ckpt", verbose=False)


def module_with_validation(pl):
    model = module(pl)
    model.validation_step = types.MethodType(
        lambda self, batch, _index: self.log("val", self.layer(batch[0]).mean()), model
    )
    return model


FAULTS = [
    ("PutObject", {"status": 403, "code": "AccessDenied"}, exceptions.AccessDeniedError),
    ("PutObject", {"status": 400, "code": "InvalidRequest"}, exceptions.StoreError),
]


@pytest.mark.parametrize(("operation", "action", "kind"), FAULTS)
def test_a_failed_save_raises_in_fit_and_keeps_the_old_checkpoint(
    pl, bucket, control, operation, action: FaultAction, kind
):
    run = trainer(pl, bucket, 1, [best_two(pl)], default_root_dir=f"{bucket.url}/run", logger=False)
    model = module(pl)
    run.fit(model, batches())
    run.save_checkpoint(f"{bucket.url}/kept.ckpt")
    before, body = bucket.keys(), bucket.body("kept.ckpt")
    control.faults({"operation": operation, "action": action})
    with pytest.raises(kind):
        run.save_checkpoint(f"{bucket.url}/kept.ckpt")
    with pytest.raises(kind):
        trainer(pl, bucket, 1, [best_two(pl)], default_root_dir=f"{bucket.url}/run 2", logger=False).fit(
            model, batches()
        )
    control.clear_faults()
    assert bucket.keys() == before
    assert bucket.body("kept.ckpt") == body
    assert bucket.uploads() == []


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
def test_a_large_checkpoint_with_failed_parts_keeps_the_old_one_and_leaves_no_upload(bucket, control, operation):
    plugin = ObjectCheckpointIO(config=bucket.config)
    plugin.save_checkpoint({"weight": torch.ones(3)}, f"{bucket.url}/k.ckpt")
    control.faults({"operation": operation, "action": {"status": 403, "code": "AccessDenied"}})
    with pytest.raises(exceptions.AccessDeniedError):
        plugin.save_checkpoint({"weight": torch.zeros(6_000_000)}, f"{bucket.url}/k.ckpt")
    control.clear_faults()
    assert torch.equal(plugin.load_checkpoint(f"{bucket.url}/k.ckpt")["weight"], torch.ones(3))
    assert bucket.uploads() == []


def test_a_checkpoint_that_cannot_be_pickled_keeps_the_old_one(pl, bucket):
    plugin = ObjectCheckpointIO(config=bucket.config)
    plugin.save_checkpoint({"weight": torch.ones(3)}, f"{bucket.url}/k.ckpt")
    with pytest.raises((AttributeError, pickle.PicklingError)):
        plugin.save_checkpoint({"weight": torch.zeros(3), "bad": lambda: None}, f"{bucket.url}/k.ckpt")
    assert torch.equal(plugin.load_checkpoint(f"{bucket.url}/k.ckpt")["weight"], torch.ones(3))


def test_the_trainer_of_each_package_accepts_the_plugin(pl, bucket):
    for plugin in (ObjectCheckpointIO(config=bucket.config), S3LightningCheckpoint(s3client_config=bucket.config)):
        assert isinstance(plugin, pl.plugins.CheckpointIO)
        assert pl.Trainer(plugins=[plugin], logger=False).strategy.checkpoint_io is plugin


@pytest.mark.parametrize("wrapped", [False, True])
def test_fabric_and_the_asynchronous_plugin_save_and_load(pl, bucket, wrapped):
    plugin = ObjectCheckpointIO(config=bucket.config)
    if wrapped:
        plugin = pl.plugins.AsyncCheckpointIO(plugin)
    plugin.save_checkpoint({"weight": torch.ones(3)}, f"{bucket.url}/k.ckpt")
    plugin.teardown()
    assert torch.equal(plugin.load_checkpoint(f"{bucket.url}/k.ckpt")["weight"], torch.ones(3))
    fabric = importlib.import_module("lightning.fabric" if pl.__name__ == "lightning.pytorch" else "lightning_fabric")
    runner = fabric.Fabric(accelerator="cpu", plugins=[ObjectCheckpointIO(config=bucket.config)])
    runner.save(f"{bucket.url}/fabric.ckpt", {"weight": torch.full((3,), 2.0)})
    assert torch.equal(runner.load(f"{bucket.url}/fabric.ckpt")["weight"], torch.full((3,), 2.0))


@pytest.mark.providers("s3", "gs")
def test_remove_deletes_the_object_and_no_other_with_its_prefix(bucket):
    plugin = ObjectCheckpointIO(config=bucket.config)
    for key in ("a.ckpt", "a.ckpt.2", "a.ckpt/x", "folder 2/x"):
        bucket.write(key, b"x")
    plugin.remove_checkpoint(f"{bucket.url}/a.ckpt")
    plugin.remove_checkpoint(f"{bucket.url}/never was.ckpt")
    assert bucket.keys() == ["a.ckpt.2", "a.ckpt/x", "folder 2/x"]
    for whole in (bucket.url, f"{bucket.url}/", f"{bucket.url}//"):
        with pytest.raises(exceptions.ConfigError, match="names no object"):
            plugin.remove_checkpoint(whole)
    assert bucket.keys() == ["a.ckpt.2", "a.ckpt/x", "folder 2/x"]


def test_paths_without_a_scheme_are_local_files(tmp_path, monkeypatch):
    plugin = ObjectCheckpointIO()
    monkeypatch.chdir(tmp_path)
    for path in ("x.ckpt", tmp_path / "deep" / "er" / "x.ckpt"):
        plugin.save_checkpoint({"weight": torch.ones(3)}, path)
        assert torch.equal(plugin.load_checkpoint(path)["weight"], torch.ones(3))
        assert torch.equal(torch.load(path)["weight"], torch.ones(3))
        plugin.remove_checkpoint(path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_path_with_merged_slashes_is_the_url(bucket, tmp_path):
    plugin = ObjectCheckpointIO(config=bucket.config)
    for path in (Path(f"{bucket.url}/a/k.ckpt"), Path(f"file://{tmp_path}/k.ckpt")):
        plugin.save_checkpoint({"weight": torch.ones(3)}, path)
        assert torch.equal(plugin.load_checkpoint(path)["weight"], torch.ones(3))
    assert bucket.keys() == ["a/k.ckpt"]
    assert (tmp_path / "k.ckpt").is_file()


@pytest.mark.providers("s3")
def test_bad_arguments_are_refused_by_name(bucket):
    plugin = ObjectCheckpointIO(config=bucket.config)
    for path, message in (
        (bucket.url, "names no object"),
        ("az://bucket/k.ckpt", "scheme 'az'"),
    ):
        with pytest.raises(exceptions.ConfigError, match=message):
            plugin.save_checkpoint({}, path)
    with pytest.raises(exceptions.ConfigError, match="storage_options"):
        plugin.save_checkpoint({}, f"{bucket.url}/k.ckpt", storage_options={"x": 1})
    S3LightningCheckpoint(s3client_config=bucket.config).save_checkpoint({}, f"{bucket.url}/k.ckpt", {"x": 1})
    assert plugin.load_checkpoint(f"{bucket.url}/k.ckpt") == {}
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(f"{bucket.url}/missing.ckpt")
    assert plugin.newest(f"{bucket.url}/nothing") is None


def test_the_newest_checkpoint_of_a_local_folder_is_a_path(tmp_path):
    plugin = ObjectCheckpointIO()
    assert plugin.newest(str(tmp_path)) is None
    plugin.save_checkpoint({"epoch": 1}, tmp_path / "run" / "epoch=1.ckpt")
    newest = plugin.newest(str(tmp_path))
    assert newest == str(tmp_path / "run" / "epoch=1.ckpt")
    assert plugin.load_checkpoint(newest) == {"epoch": 1}


def test_other_than_plain_data_is_loaded_if_lightning_or_the_user_allows_it(bucket, monkeypatch):
    plugin, url = ObjectCheckpointIO(config=bucket.config), f"{bucket.url}/k.ckpt"
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", raising=False)
    plugin.save_checkpoint({"half": fractions.Fraction(1, 2)}, url)
    for weights_only in (None, True):
        with pytest.raises(exceptions.CheckpointError, match=r"fractions.Fraction.* fit\(\.\.\., weights_only=False\)"):
            plugin.load_checkpoint(url, weights_only=weights_only)
    with monkeypatch.context() as patch:
        patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0")
        with pytest.raises(exceptions.CheckpointError, match="fractions.Fraction"):
            plugin.load_checkpoint(url)
    assert plugin.load_checkpoint(url, weights_only=False) == {"half": fractions.Fraction(1, 2)}
    with monkeypatch.context() as patch:
        patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        assert plugin.load_checkpoint(url)
    for name in ("lightning", "lightning_fabric"):
        if name in sys.modules:
            monkeypatch.setattr(sys.modules[name], "__version__", "2.5.6.post1")
    assert plugin.load_checkpoint(url)


def test_a_plugin_is_pickled_with_its_configuration(bucket):
    for plugin in (ObjectCheckpointIO(config=bucket.config), S3LightningCheckpoint("us-east-1", bucket.config)):
        instances._default = None
        again = pickle.loads(pickle.dumps(plugin))
        assert type(again) is type(plugin)
        assert vars(again) == vars(plugin)
        assert fsspec.filesystem("s3")._config == again._config


def alone(script, **environment):
    """The output of a new process."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PATH": "", **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.providers("s3")
def test_what_the_plugin_writes_and_removes_is_seen_by_s3fs_which_caches_listings(bucket, fsspec_registry):
    fsspec_registry["s3"] = pytest.importorskip("s3fs").S3FileSystem
    server = bucket.server
    options = {"key": server.access_key, "secret": server.secret_key, "endpoint_url": server.endpoint}
    caching = fsspec.filesystem("s3", **options)
    plugin, url = ObjectCheckpointIO(config=bucket.config), f"{bucket.url}/run/checkpoints"
    bucket.write("run/checkpoints/other.ckpt", b"1")

    def names():
        folders = (f"{bucket.name}/run", f"{bucket.name}/run/checkpoints")
        return [[path.rpartition("/")[2] for path in caching.ls(folder, detail=False)] for folder in folders]

    assert names() == [["checkpoints"], ["other.ckpt"]]
    plugin.save_checkpoint({"a": 1}, f"{url}/last.ckpt")
    assert caching.exists(f"{url}/last.ckpt")
    with fsspec.open(f"{url}/last.ckpt", **options) as file:
        assert torch.load(io.BytesIO(file.read())) == {"a": 1}
    assert names() == [["checkpoints"], ["last.ckpt", "other.ckpt"]]
    plugin.remove_checkpoint(f"{url}/last.ckpt")
    assert not caching.exists(f"{url}/last.ckpt")
    assert names() == [["checkpoints"], ["other.ckpt"]]
    plugin.save_checkpoint({"a": 2}, f"{bucket.url}/run/new/last.ckpt")
    assert caching.ls(f"{bucket.name}/run", detail=False) == [
        f"{bucket.name}/run/{name}" for name in ("checkpoints", "new")
    ]


@pytest.mark.parametrize("scheme", ["gs", "gcs"])
@pytest.mark.providers("gs")
def test_listings_of_each_file_system_for_the_scheme_are_forgotten(bucket, fsspec_registry, scheme):
    class Caching(fsspec.AbstractFileSystem):
        protocol = scheme
        forgotten = []

        def invalidate_cache(self, path=None):
            self.forgotten.append((self.storage_options["number"], path))

    fsspec_registry["s3"] = fsspec_registry[scheme] = Caching
    plugin, url = ObjectCheckpointIO(config=bucket.config), f"{bucket.url}/run/last.ckpt"
    for number in range(2):
        fsspec.filesystem(scheme, number=number)
    plugin.save_checkpoint({"a": 1}, url)
    plugin.remove_checkpoint(url.replace("gs://", "gcs://"))
    assert Caching.forgotten == [(0, url), (1, url)] * 2


@pytest.fixture(params=["base classes", pytest.param("packages", marks=pytest.mark.matrix)])
def packages(request, pytestconfig, tmp_path):
    """PYTHONPATH, and the modules of Lightning's base classes of plugins: those of the installed packages, whose import
    takes seconds, or the same modules without anything else."""
    path = f"{pytestconfig.rootpath}:{tmp_path}"
    if request.param == "base classes":
        for package in ("lightning/fabric", "lightning_fabric"):
            folder = tmp_path / package / "plugins" / "io"
            folder.mkdir(parents=True)
            for parent in (folder, *folder.parents[: len(folder.relative_to(tmp_path).parts) - 1]):
                (parent / "__init__.py").touch()
            (folder / "checkpoint_io.py").write_text("import abc\n\n\nclass CheckpointIO(abc.ABC):\n    pass\n")
        return path, "lightning.fabric.plugins.io.checkpoint_io", "lightning_fabric.plugins.io.checkpoint_io"
    pytest.importorskip("lightning.pytorch")
    pytest.importorskip("pytorch_lightning")
    return path, "lightning.pytorch.plugins", "pytorch_lightning.plugins"


def test_import_does_not_import_lightning_or_torch(packages):
    path, _, pytorch_lightning = packages
    script = (
        "import sys, torchobj.lightning; assert not {'torch', 'lightning', 'lightning_fabric'} & set(sys.modules);"
        f"import {pytorch_lightning} as theirs, torchobj.lightning as ours; plugin = ours.ObjectCheckpointIO();"
        "assert isinstance(plugin, theirs.CheckpointIO); assert 'lightning' not in sys.modules"
    )
    alone(script, PYTHONPATH=path)


def test_a_plugin_created_before_lightning_is_imported_works_with_both_packages(packages):
    path, lightning, pytorch_lightning = packages
    script = (
        "from torchobj.lightning import ObjectCheckpointIO; plugin = ObjectCheckpointIO();"
        f"import {lightning} as one, {pytorch_lightning} as other;"
        "assert isinstance(plugin, one.CheckpointIO);"
        "assert isinstance(plugin, other.CheckpointIO)"
    )
    alone(script, PYTHONPATH=path)


def test_an_installed_s3fs_is_kept_with_a_warning(packages, tmp_path):
    path, _, _ = packages
    (tmp_path / "s3fs.py").write_text(
        "import fsspec\n__version__ = '2026.1.0'\n\nclass S3FileSystem(fsspec.AbstractFileSystem):\n    pass\n"
    )
    script = (
        "import fsspec, logging, torchobj.fsspec; logging.basicConfig();"
        "from torchobj.lightning import ObjectCheckpointIO; ObjectCheckpointIO();"
        "config = torchobj.StoreConfig(s3=torchobj.S3Options(endpoint_url='http://localhost:1'));"
        "ObjectCheckpointIO(config=config);"
        "assert type(fsspec.filesystem('s3')).__module__ == 's3fs';"
        "assert torchobj.fsspec.register(config=config);"
        "assert type(fsspec.filesystem('s3')).__module__ == 'torchobj.fsspec.file_system'"
    )
    printed = alone(script, PYTHONPATH=path)
    assert "torchobj.fsspec.register(config=...)" in printed
    assert printed.count("WARNING") == 1


@pytest.mark.matrix
@pytest.mark.providers("s3")
def test_one_of_two_ranks_writes_and_both_resume(bucket, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    script = Path(__file__).with_name("lightning_checkpoints_under_torchrun.py")
    done = subprocess.run(
        [*command, script, bucket.url, pickle.dumps(bucket.config).hex(), tmp_path],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    assert ranks[0]["resumed"] == ranks[0]["unbroken"]
    # Eight samples per rank, two per batch, three epochs.
    assert ranks[0]["steps"] == 12
    assert [key.partition("/")[0] for key in bucket.keys()] == ["broken"] * 3 + ["unbroken"] * 3
    assert bucket.uploads() == []
