"""Checkpoints of the Trainer of transformers in a bucket: what is committed, when, and what comes back."""

import json
import signal
import threading

import pytest
import torch

from tests.support.folders import content
from tests.support.killing import HELD_S
from tests.support.ranks import on_one_machine, run_ranks
from tests.support.trained_models import Regression
from torchobj import exceptions
from torchobj.checkpoint import FolderCheckpoints
from torchobj.checkpoint.steps import folder_content

transformers = pytest.importorskip("transformers")

from torchobj.transformers import CheckpointCallback, latest_checkpoint  # noqa: E402

pytestmark = [pytest.mark.xdist_group("lightning"), pytest.mark.filterwarnings("ignore:.*barrier.*:UserWarning")]


SAMPLES = [{"x": torch.tensor([number, 1.0]), "labels": torch.tensor(0.0)} for number in range(8)]


def trainer_of(folder, *callbacks, evaluated=None, **arguments):
    settings = {
        "output_dir": str(folder), "report_to": [], "use_cpu": True, "max_steps": 4, "save_steps": 2, "logging_steps": 1,
        "disable_tqdm": True, "per_device_train_batch_size": 2, "log_level": "error",
    }  # fmt: skip
    arguments = transformers.TrainingArguments(**(settings | arguments))
    trainer = transformers.Trainer(
        Regression(), arguments, train_dataset=SAMPLES, eval_dataset=evaluated, callbacks=list(callbacks)
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


@pytest.fixture
def url(bucket):
    return f"{bucket.url}/run"


def test_each_checkpoint_of_the_trainer_is_committed_and_comes_back(bucket, url, tmp_path):
    callback = CheckpointCallback(url, keep_best=("eval_loss", "min", 1), config=bucket.config)
    trainer = trainer_of(tmp_path / "out", callback, evaluated=SAMPLES, eval_strategy="steps", eval_steps=2)
    trainer.train()
    checkpoints = FolderCheckpoints(url, config=bucket.config)
    assert checkpoints.steps() == [2, 4]
    logged = {record["step"]: record for record in trainer.state.log_history if "eval_loss" in record}
    for step in (2, 4):
        checkpoints.restore(step, tmp_path / "restored" / str(step))
        assert content(tmp_path / "restored" / str(step)) == content(tmp_path / "out" / f"checkpoint-{step}")
        metrics = checkpoints.metrics(step)
        assert {"loss", "learning_rate", "grad_norm", "epoch", "eval_loss"} <= metrics.keys()
        assert metrics["eval_loss"] == logged[step]["eval_loss"]
    found = latest_checkpoint(url, tmp_path / "elsewhere", config=bucket.config)
    assert found == str(tmp_path / "elsewhere" / "checkpoint-4")
    assert json.loads((tmp_path / "elsewhere" / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4


def test_the_trainer_may_delete_its_folders_while_they_are_uploaded(bucket, url, tmp_path, monkeypatch):
    uploads, is_deleted = folder_content.upload, threading.Event()

    def upload(folder, *given, **named):
        assert is_deleted.wait(60)
        return uploads(folder, *given, **named)

    class Deleted(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                for path in (tmp_path / "out" / "checkpoint-2").iterdir():
                    path.unlink()
                is_deleted.set()

    monkeypatch.setattr(folder_content, "upload", upload)
    trainer_of(tmp_path / "out", CheckpointCallback(url, config=bucket.config), Deleted()).train()
    checkpoints = FolderCheckpoints(url, config=bucket.config)
    assert checkpoints.restore(2, tmp_path / "restored") == 2
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= content(
        tmp_path / "restored"
    ).keys()


def test_a_second_trainer_of_the_same_url_loses(bucket, url, tmp_path):
    trainer_of(tmp_path / "first", CheckpointCallback(url, config=bucket.config)).train()
    callback = CheckpointCallback(url, config=bucket.config)
    with pytest.raises(exceptions.CheckpointError, match="step 2 is committed already"):
        trainer_of(tmp_path / "second", callback).train()
    assert FolderCheckpoints(url, config=bucket.config).steps() == [2, 4]


def test_an_error_of_a_save_ends_the_training(bucket, url, control, tmp_path):
    control.faults({"operation": "PutObject", "key": "steps/", "action": {"status": 403, "code": "AccessDenied"}})
    trainer = trainer_of(tmp_path / "out", CheckpointCallback(url, config=bucket.config), max_steps=2)
    with pytest.raises(exceptions.TransferError, match="AccessDenied"):
        trainer.train()
    control.clear_faults()
    assert FolderCheckpoints(url, config=bucket.config).steps() == []


def test_a_step_that_the_trainer_saves_twice_is_committed_once(bucket, url, tmp_path):
    class SavedAtLastStep(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_save = state.global_step == 4

    trainer = trainer_of(
        tmp_path / "out", CheckpointCallback(url, config=bucket.config), SavedAtLastStep(), save_strategy="epoch"
    )
    trainer.train()
    assert FolderCheckpoints(url, config=bucket.config).steps() == [4]


def test_no_committed_step_is_none_and_no_folder(bucket, url, tmp_path):
    assert latest_checkpoint(url, tmp_path / "out", config=bucket.config) is None
    assert list(tmp_path.iterdir()) == []


def found_by_each(rank, url, config, folder):
    torch.distributed.init_process_group("gloo")
    if rank:
        # The store lists an earlier state to it.
        FolderCheckpoints.latest = lambda self: None
    return latest_checkpoint(url, folder / str(rank), config=config)


def test_ranks_agree_on_the_newest_step(bucket, url, tmp_path):
    trainer_of(tmp_path / "out", CheckpointCallback(url, config=bucket.config), max_steps=2).train()
    found = run_ranks(found_by_each, url, bucket.config, tmp_path)
    assert found == [str(tmp_path / str(rank) / "checkpoint-2") for rank in range(2)]


def test_the_same_folder_is_not_downloaded_again_and_another_one_is_replaced(bucket, url, control, tmp_path):
    trainer_of(tmp_path / "out", CheckpointCallback(url, config=bucket.config)).train()
    expected = content(tmp_path / "out" / "checkpoint-4")
    control.clear_requests()
    found = latest_checkpoint(url, tmp_path / "out", config=bucket.config)
    assert not [each for each in control.requests() if each.operation == "GetObject" and "steps/" in each.target]
    # Begun to be deleted.
    (tmp_path / "out" / "checkpoint-4" / "optimizer.pt").unlink()
    assert latest_checkpoint(url, tmp_path / "out", config=bucket.config) == found
    assert content(tmp_path / "out" / "checkpoint-4") == expected
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-2", "checkpoint-4"]


def test_a_finished_training_resumes_without_another_save(bucket, url, tmp_path):
    for _ in range(2):
        resumed = latest_checkpoint(url, tmp_path / "out", config=bucket.config)
        trainer_of(tmp_path / "out", CheckpointCallback(url, config=bucket.config)).train(resumed)
    assert resumed.endswith("checkpoint-4")
    assert FolderCheckpoints(url, config=bucket.config).steps() == [2, 4]


def test_the_trials_of_a_search_are_refused(bucket, url, tmp_path):
    trainer = trainer_of(tmp_path / "out", callback := CheckpointCallback(url, config=bucket.config))
    trainer.state.is_hyper_param_search = True
    with pytest.raises(exceptions.ConfigError, match="the trials of a hyperparameter search have the same steps"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)


class SignalAt(transformers.TrainerCallback):
    """Sends a signal to this process at a step of the training, or in the evaluation after it."""

    def __init__(self, step, *, in_evaluation=False):
        self._step, self._in_evaluation = step, in_evaluation

    def on_step_begin(self, args, state, control, **_):
        if state.global_step + 1 == self._step and not self._in_evaluation:
            signal.raise_signal(signal.SIGTERM)

    def on_prediction_step(self, args, state, control, **_):
        if state.global_step == self._step and self._in_evaluation:
            self._in_evaluation = False
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_a_signal_stops_the_training_with_a_committed_step(bucket, url, tmp_path, in_evaluation):
    before = signal.getsignal(signal.SIGTERM)
    callback = CheckpointCallback(url, config=bucket.config)
    sender = SignalAt(3, in_evaluation=in_evaluation)
    arguments = {"max_steps": 100, "save_steps": 100, "eval_strategy": "steps", "eval_steps": 3}
    trainer = trainer_of(tmp_path / "out", callback, sender, evaluated=SAMPLES, **arguments)
    trainer.train()
    assert (trainer.state.global_step, callback.stopped) == (3, True)
    # The signal came before the evaluation, which is left out then.
    assert any("eval_loss" in record for record in trainer.state.log_history) == in_evaluation
    assert FolderCheckpoints(url, config=bucket.config).steps() == [3]
    assert signal.getsignal(signal.SIGTERM) == before
    trainer.args.max_steps = 5
    trainer.train(latest_checkpoint(url, tmp_path / "out", config=bucket.config))
    assert (trainer.state.global_step, callback.stopped) == (5, False)


def test_a_signal_during_the_last_upload_is_not_lost(bucket, url, tmp_path):
    class SignalAtEnd(transformers.TrainerCallback):
        def on_train_end(self, args, state, control, **_):
            signal.raise_signal(signal.SIGTERM)

    callback = CheckpointCallback(url, config=bucket.config)
    trainer_of(tmp_path / "out", SignalAtEnd(), callback).train()
    assert callback.stopped
    assert FolderCheckpoints(url, config=bucket.config).steps() == [2, 4]


def test_a_save_that_exceeds_the_deadline_of_a_signal_leaves_the_step_before(bucket, url, control, tmp_path):
    held = {"operation": "PutObject", "key": f"steps/{3:012}", "action": {"delay_first_byte_s": HELD_S}}
    control.faults(held)
    callback = CheckpointCallback(url, deadline_s=1.0, config=bucket.config)
    with pytest.raises(exceptions.CheckpointError, match="deadline"):
        trainer_of(tmp_path / "out", callback, SignalAt(3), max_steps=100).train()
    control.clear_faults()
    assert FolderCheckpoints(url, config=bucket.config).steps() == [2]


def test_the_handler_of_transformers_is_called_too(bucket, url, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    callback = CheckpointCallback(url, config=bucket.config)
    trainer = trainer_of(tmp_path / "out", callback, SignalAt(3), max_steps=100, enable_jit_checkpoint=True)
    [own] = [each for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager")]
    requested = threading.Event()
    own.jit_manager.kill_wait, own.jit_manager._enable_checkpoint = 0, requested.set
    trainer.train()
    assert requested.wait(60)
    assert (trainer.state.global_step, callback.stopped) == (3, True)
    assert FolderCheckpoints(url, config=bucket.config).steps() == [2, 3]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_trainer_on_another_thread_says_that_it_handles_no_signals(bucket, url, tmp_path, caplog):
    trainer = trainer_of(tmp_path / "out", CheckpointCallback(url, config=bucket.config))
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join(60)
    assert "the Trainer does not run on the main thread: signals are not handled" in caplog.text
    assert FolderCheckpoints(url, config=bucket.config).steps() == [2, 4]


def stopped_by_one_rank(rank, url, config, folder):
    on_one_machine(rank)
    callbacks = [CheckpointCallback(url, config=config), SignalAt(3 if rank else 1000)]
    trainer = trainer_of(folder, *callbacks, max_steps=2000, save_steps=2000)
    trainer.train()
    return trainer.state.global_step, callbacks[0].stopped, latest_checkpoint(url, folder.parent / "new", config=config)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(bucket, url, tmp_path):
    first, second = run_ranks(stopped_by_one_rank, url, bucket.config, tmp_path / "out")
    assert first == second
    step, stopped, found = first
    assert stopped and step < 2000
    checkpoints = FolderCheckpoints(url, config=bucket.config)
    assert checkpoints.steps() == [step]
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= content(
        tmp_path / "new" / f"checkpoint-{step}"
    ).keys()
    assert found == str(tmp_path / "new" / f"checkpoint-{step}")


def saved_by_two_ranks(rank, url, config, folder):
    on_one_machine(rank)
    trainer_of(folder / str(rank), CheckpointCallback(url, config=config)).train()
    return sorted(path.name for path in (folder / str(rank) / "checkpoint-2").iterdir())


def test_ranks_with_disks_of_their_own_save_one_checkpoint(bucket, url, control, tmp_path):
    first, second = run_ranks(saved_by_two_ranks, url, bucket.config, tmp_path)
    assert "rng_state_0.pth" in first and second == ["rng_state_1.pth"]
    sent = [
        each.key for each in control.requests() if each.operation == "PutObject" and f"steps/{2:012}" in each.target
    ]
    assert sorted(key.rpartition("/")[2] for key in sent) == sorted(first + second)


def without_the_callback(rank, url, config, folder):
    on_one_machine(rank)
    callback = CheckpointCallback(url, config=config)
    on_signal = callback._checkpoints.on_signal
    callback._checkpoints.on_signal = lambda *given, **named: on_signal(*given, **named, timeout_s=2.0)
    try:
        trainer_of(folder, *([] if rank else [callback])).train()
    except Exception as error:
        found = type(error).__name__, error.__notes__
    # As at the end of the process: the other rank waits in a collective of the Trainer.
    torch.distributed.destroy_process_group()
    return found


def test_a_rank_without_the_callback_is_an_error(bucket, url, tmp_path):
    (name, notes), _ = run_ranks(without_the_callback, url, bucket.config, tmp_path / "out")
    assert (name, notes) == ("RankGoneError", ["all ranks must have a CheckpointCallback"])


def test_the_callback_warns_of_an_output_folder_that_is_not_local(tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer_of("s3://bucket/run", CheckpointCallback("memory://warned/run"), save_strategy="no", max_steps=1).train()
    [message] = [each for each in caplog.messages if "writes local files only" in each]
    assert message.startswith("CheckpointCallback: output_dir='s3://bucket/run'")
    assert "the URL to torchobj.transformers.CheckpointCallback" in message
