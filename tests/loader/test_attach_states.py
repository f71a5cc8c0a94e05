"""States of loaders of other libraries that are attached when they are saved, when they are loaded, or both."""

import copy
import itertools

import pytest
import torch
import torchdata.stateful_dataloader.sampler as torchdata_sampler
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler
from torchdata.stateful_dataloader import Stateful, StatefulDataLoader

import torchobj
from tests.support.orders import Eager
from tests.support.orders import Stateful as GoesOn
from tests.support.prefetching import Taken
from tests.support.stateful import (
    BatchesWithIterators,
    BatchesWithState,
    Cursor,
    SamplerWithIterators,
    SamplerWithState,
    SteppedSampler,
    listed,
)
from torchobj.exceptions import ConfigError
from torchobj.loader.lookahead import Lookahead
from torchobj.stateful import is_stateful

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.timeout(120),
]

COUNT = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objects")
    for number in range(60):
        (folder / f"k{number:02}").write_bytes(bytes([number]))
    return folder


def number_of(reader):
    return reader.read()[0]


def records(folder, count=COUNT):
    data = torchobj.ObjectMapDataset(f"file://{folder}/", transform=number_of)
    return torch.utils.data.Subset(data, range(count))


def generator():
    return torch.Generator().manual_seed(7)


class BothWithState(SamplerWithState):
    """A sampler with a state, whose iterators have one too."""

    def __iter__(self):
        self.done, self.resumed = self.resumed or 0, None
        order = Cursor(self.order())
        order.done = self.done
        return order


class EndsWithReset(SamplerWithState):
    """Counts its passes, and moves to the start of the next one at the end of a pass."""

    passes = 0

    def __iter__(self):
        yield from (index + 0 * self.passes for index in super().__iter__())
        self.done, self.passes = 0, self.passes + 1

    def state_dict(self):
        return {"done": self.done, "passes": self.passes}


class RefilledBatches(SteppedSampler):
    """Refills one list."""

    def __iter__(self):
        batch = []
        for start in range(0, self.count, 2):
            batch[:] = self.order()[start : start + 2]
            yield batch

    def __len__(self):
        return (self.count + 1) // 2


def elastic(data):
    return torchobj.ElasticDistributedSampler(data, 2, 1, seed=5)


#: Settings of a loader by the dataset.
KINDS = {
    "in order": lambda _: {"batch_size": 2},
    "shuffled": lambda _: {"batch_size": 2, "shuffle": True},
    "shuffled with a generator": lambda _: {"batch_size": 2, "shuffle": True, "generator": generator()},
    "elastic": lambda data: {"batch_size": 2, "sampler": elastic(data)},
    "with a state": lambda _: {"batch_size": 2, "sampler": SamplerWithState(COUNT)},
    "batches without a state": lambda _: {"batch_sampler": BatchSampler(SteppedSampler(COUNT), 2, drop_last=False)},
    "RandomSampler": lambda data: {"batch_size": 2, "sampler": RandomSampler(data)},
    "RandomSampler with a generator": lambda data: {"batch_size": 2, "sampler": RandomSampler(data, generator=generator())},
    "SubsetRandomSampler": lambda _: {"batch_size": 2, "sampler": SubsetRandomSampler(range(1, 9))},
    "drop_last": lambda _: {"batch_size": 3, "drop_last": True},
    "distributed": lambda data: {"batch_size": 2, "sampler": DistributedSampler(data, 2, 1, seed=3)},
    "torchdata's random": lambda data: {"batch_size": 2, "sampler": torchdata_sampler.RandomSampler(data, generator=generator())},
    "torchdata's distributed": lambda data: {
        "batch_size": 2,
        "sampler": torchdata_sampler.StatefulDistributedSampler(data, 2, 0, seed=3),
    },
    "without a state": lambda _: {"batch_size": 2, "sampler": SteppedSampler(COUNT)},
    "iterators with a state": lambda _: {"batch_size": 2, "sampler": SamplerWithIterators(COUNT)},
    "both with a state": lambda _: {"batch_size": 2, "sampler": BothWithState(COUNT)},
    "a state that ends with a reset": lambda _: {"batch_size": 2, "sampler": EndsWithReset(COUNT)},
    "a state that goes on": lambda _: {"batch_size": 8, "sampler": GoesOn()},
    "drawn at once": lambda _: {"batch_size": 8, "sampler": Eager()},
    "batches of a random sampler": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 2, drop_last=False)},
    "batches of an elastic sampler": lambda data: {"batch_sampler": BatchSampler(elastic(data), 2, drop_last=False)},
    "batches of a sampler with a state": lambda _: {"batch_sampler": BatchSampler(SamplerWithState(COUNT), 2, drop_last=True)},
    "batches with a state": lambda _: {"batch_sampler": BatchesWithState(COUNT)},
    "batches whose iterators have a state": lambda _: {"batch_sampler": BatchesWithIterators(COUNT)},
    "batches in both": lambda _: {
        "batch_sampler": torchdata_sampler.BatchSampler(BothWithState(COUNT), 2, drop_last=False)
    },
    "refilled batches": lambda _: {"batch_sampler": RefilledBatches(COUNT)},
    "list of batches": lambda _: {"batch_sampler": [[1, 2], [3], [4, 5, 6], [7], [8, 9]]},
    "torchobj's batches": lambda data: {"batch_sampler": torchobj.LookaheadBatchSampler(RandomSampler(data), 2)},
    "torchobj's batches of an elastic sampler": lambda data: {
        "batch_sampler": torchobj.LookaheadBatchSampler(elastic(data), 2)
    },
    "no batches": lambda _: {"batch_size": None},
    "no batches, elastic": lambda data: {"batch_size": None, "sampler": elastic(data)},
    "no batches, with a state": lambda _: {"batch_size": None, "sampler": BothWithState(COUNT)},
    "no batches, iterators with a state": lambda data: {"batch_size": None, "sampler": torchdata_sampler.RandomSampler(data)},
}  # fmt: skip
#: These are in `make test`.
OFTEN = list(KINDS)[:4]
WITH_WORKERS = ("torchdata with rare states", "Accelerate with persistent workers")
#: Their samples depend on timing without torchobj too: torch's workers receive a batch after the sampler has gone on, and
#: torchdata draws two batches from an order that has ended.
NOT_WITH_WORKERS = ("refilled batches", "a state that goes on")
#: A plain loader of torchdata that resumes with them and a worker ends in an error: the sampler that got back its state has no
#: index left for the batches since the last state of the worker.
NOT_WITH_RARE_STATES = ("with a state", "torchdata's distributed", "batches with a state")
#: Of sixty samples.
LONG = ("a state that goes on", "drawn at once")


def plain(data, workers, settings):
    return torch.utils.data.DataLoader(data, num_workers=workers, **settings)


def torchdata_loader(data, workers, settings):
    return StatefulDataLoader(data, num_workers=workers, **settings)


def torchdata_loader_with_rare_states(data, workers, settings):
    return StatefulDataLoader(data, num_workers=workers, snapshot_every_n_steps=3, **settings)


def prepared(data, workers, settings, **arguments):
    loader = torch.utils.data.DataLoader(data, num_workers=workers, **settings)
    return prepare_data_loader(loader, put_on_device=False, use_stateful_dataloader=True, **arguments)


def prepared_of_two_ranks(data, workers, settings):
    return prepared(data, workers, settings, num_processes=2, process_index=1)


def prepared_persistent(data, workers, settings):
    return prepared(data, workers, settings | {"persistent_workers": workers > 0})


LIBRARIES = {
    "torchdata": torchdata_loader,
    "torchdata with rare states": torchdata_loader_with_rare_states,
    "Accelerate": prepared,
    "Accelerate of two ranks": prepared_of_two_ranks,
    "Accelerate with persistent workers": prepared_persistent,
}
#: Before the first pass, before its first batch, after two batches, after the last one, after the end, in the next epoch.
POINTS = ("new", "begun", 2, "last", "end", (1, 2))


def state_at(loader, point):
    """The state of a loader at a point of its passes."""
    epoch, batches = point if isinstance(point, tuple) else (0, point)
    for number in range(epoch):
        begin_epoch(loader, number)
        list(loader)
    begin_epoch(loader, epoch)
    if point != "new":
        iterator = iter(loader)
        if batches == "end":
            list(iterator)
        elif batches != "begun":
            for _ in itertools.islice(iterator, len(loader) if batches == "last" else batches):
                pass
    # Later batches do not change it.
    return copy.deepcopy(loader.state_dict())


def begin_epoch(loader, epoch):
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def passes_after(loader, state, epoch, count=2):
    """The batches of the rest of a pass, and of the following ones."""
    torch.manual_seed(11)
    loader.load_state_dict(state)
    found = []
    for number in range(epoch, epoch + count):
        begin_epoch(loader, number)
        found.append(listed(loader))
    return found


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def cases():
    for library, kind, workers in itertools.product(LIBRARIES, KINDS, (0, 1)):
        if ("torchdata" not in library and "no batches" in kind) or (workers == 0 and library in WITH_WORKERS):
            continue
        without_oracle = NOT_WITH_WORKERS + (NOT_WITH_RARE_STATES if "rare" in library else ())
        if workers == 0 or kind not in without_oracle:
            yield pytest.param(library, kind, workers, POINTS, marks=pytest.mark.matrix)
    for number, kind in enumerate(OFTEN):
        yield "torchdata", kind, 0, POINTS
        yield "Accelerate", kind, number % 2, (2,)


@pytest.mark.parametrize(("library", "kind", "workers", "points"), list(cases()))
def test_a_state_gives_the_samples_of_plain_loaders_whichever_loader_is_attached(
    folder, library, kind, workers, points
):
    def make(*, attached):
        data = records(folder, 60 if kind in LONG else COUNT)
        torch.manual_seed(11)
        loader = LIBRARIES[library](data, workers, KINDS[kind](data))
        return torchobj.attach(loader) if attached else loader

    for point in points:
        epoch = point[0] if isinstance(point, tuple) else 0
        plain = state_at(make(attached=False), point)
        expected = passes_after(make(attached=False), copy.deepcopy(plain), epoch)
        attached = state_at(make(attached=True), point)
        assert same(without_seed(attached), without_seed(plain)), point
        for state, loaded in ((plain, True), (attached, False), (attached, True)):
            found = passes_after(make(attached=loaded), copy.deepcopy(state), epoch)
            assert found == expected, (point, state is attached, loaded)


def without_seed(state):
    """A state without the random number that a loader draws for its workers."""
    if not isinstance(state, dict):
        return state
    return {key: without_seed(value) for key, value in state.items() if key != "_base_seed"}


def test_only_what_wraps_a_state_is_recognised_by_its_class(folder):
    # isinstance() of a protocol finds no attributes of instances.
    for kind, settings in KINDS.items():
        arguments = settings(records(folder))
        sampler = arguments.get("batch_sampler", arguments.get("sampler", [1]))
        ahead = Lookahead(sampler, None)
        for wrapper, within in ((ahead, sampler), (iter(ahead), iter(sampler))):
            assert hasattr(type(wrapper), "state_dict") == is_stateful(within), kind
            assert isinstance(wrapper, Stateful) == isinstance(within, Stateful), kind


def test_a_state_of_torchdata_is_refused_by_a_loader_of_torchobj(folder):
    state = state_at(stateful(folder), 2)
    with pytest.raises(
        ConfigError, match=r"'_index_sampler_state', .* is not one of a torchobj\.DataLoader; load it into"
    ):
        torchobj.DataLoader(records(folder), 2).load_state_dict(state)


def stateful(folder, **settings):
    return StatefulDataLoader(records(folder), batch_size=2, shuffle=True, generator=generator(), **settings)


def test_a_state_is_loaded_before_or_after_attach_and_again(folder):
    [*expected] = listed(stateful(folder))
    states = [state_at(torchobj.attach(stateful(folder)), batches) for batches in (1, 3)]
    before = stateful(folder)
    before.load_state_dict(states[1])
    assert listed(torchobj.attach(before)) == expected[3:]
    twice = torchobj.attach(stateful(folder))
    twice.load_state_dict(states[0])
    twice.load_state_dict(states[1])
    assert twice.state_dict() is not None
    assert listed(twice) == expected[3:]
    # Also in the middle of a pass that is resumed, and while it is attached.
    twice.load_state_dict(states[0])
    next(iter(twice))
    state = copy.deepcopy(twice.state_dict())
    twice.load_state_dict(state)
    assert listed(twice) == expected[2:]
    attached_between = stateful(folder)
    iterator = iter(attached_between)
    seen = [next(iterator).tolist()]
    torchobj.attach(attached_between)
    seen.append(next(iterator).tolist())
    resumed = stateful(folder)
    resumed.load_state_dict(copy.deepcopy(attached_between.state_dict()))
    assert seen + listed(resumed) == expected


def test_a_state_that_another_library_changes_is_followed(folder):
    # Accelerate subtracts the batches that the other ranks have not returned yet.
    def make():
        return torchobj.attach(prepared(records(folder), 0, {"batch_size": 2}))

    state = state_at(make(), 3)
    state["_sampler_iter_yielded"] -= 1
    state["_num_yielded"] -= 1
    resumed = make()
    resumed.load_state_dict(state)
    assert listed(resumed) == [[4, 5], [6, 7], [8, 9], [10]]


@pytest.mark.parametrize("kind", ["batches without a state", "torchobj's batches of an elastic sampler", "in order"])
def test_skipped_batches_are_not_read(folder, kind):
    data = records(folder)
    state = state_at(torchdata_loader(data, 0, KINDS[kind](data)), 2)
    for attach in (True, False) if "torchobj" in kind else (True,):
        loader = torchdata_loader(data, 0, KINDS[kind](data))
        loader = torchobj.attach(loader) if attach else loader
        loader.load_state_dict(state)
        with Taken() as taken:
            rest = sum(map(len, listed(loader)))
        assert (taken.announced, taken.misses) == (rest, 0)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_skip_first_batches_of_accelerate_gives_the_rest(folder, workers):
    def make():
        data = records(folder)
        torch.manual_seed(11)
        settings = {"batch_size": 2, "sampler": RandomSampler(data, generator=generator())}
        return prepare_data_loader(
            torch.utils.data.DataLoader(data, num_workers=workers, **settings), put_on_device=False
        )

    expected = listed(make())
    assert listed(skip_first_batches(torchobj.attach(make()), 2)) == expected[2:]
    assert listed(torchobj.attach(skip_first_batches(make(), 2))) == expected[2:]


class Dynamic(BatchesWithState):
    """Batches of one, two and three samples, without a state."""

    state_dict = load_state_dict = None


def sums(samples):
    """As many numbers as a packed batch has, which are not its samples."""
    return torch.zeros(1 + sum(samples))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("collate_fn", [None, sums])
@pytest.mark.parametrize("make", [prepared, prepared_of_two_ranks, torchdata_loader, plain])
def test_an_attached_loader_with_a_batch_sampler_counts_samples(folder, make, collate_fn, workers):
    for settings in ({"batch_size": 4}, {"batch_sampler": Dynamic(COUNT)}):
        if make is prepared_of_two_ranks and "batch_sampler" in settings:
            continue
        data = records(folder)
        loader = torchobj.attach(make(data, workers, settings | {"collate_fn": collate_fn}))
        batches = sum(1 for _ in loader)
        # The first pass of Accelerate's loader had begun before it was attached: its batches are measured.
        if collate_fn is None or make is plain or make is torchdata_loader:
            assert loader.stats().samples == (8 if make is prepared_of_two_ranks else COUNT)
        before = loader.stats().samples
        assert sum(1 for _ in loader) == batches
        assert loader.stats().samples - before == (8 if make is prepared_of_two_ranks else COUNT)
        assert loader.stats().batches == 2 * batches


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, numbers):
        return {"loss": self.layer(numbers.float()[:, None]).mean()}


def fitted(make, folder, tmp_path, checkpoint=None):
    """The batches of a Trainer of Lightning that saves after the second one, and ends in the second epoch."""
    lightning = pytest.importorskip("lightning.pytorch")
    seen = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Regression()

        def training_step(self, batch, _):
            seen.append(batch.tolist())
            return self.model(batch)["loss"]

        def on_train_batch_end(self, *_):
            if self.trainer.global_step == 2 and checkpoint is None:
                self.trainer.save_checkpoint(tmp_path / "second.ckpt")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=8, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Module(), make(folder), ckpt_path=checkpoint)
    return seen


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*weights_only")
@pytest.mark.filterwarnings("ignore:.*is not an instance of")
def test_a_trainer_of_lightning_resumes_a_loader_that_was_saved_or_is_attached(folder, tmp_path):
    def attached(folder):
        return torchobj.attach(stateful(folder))

    whole = fitted(stateful, folder, tmp_path)
    checkpoint = tmp_path / "second.ckpt"
    expected = fitted(stateful, folder, tmp_path, checkpoint)
    assert expected[:4] == whole[2:6]
    assert fitted(attached, folder, tmp_path, checkpoint) == expected
    assert fitted(attached, folder, tmp_path) == whole
    assert fitted(attached, folder, tmp_path, checkpoint) == expected
    assert fitted(stateful, folder, tmp_path, checkpoint) == expected


@pytest.mark.parametrize("use_callback", [False, True])
def test_the_trainer_of_transformers_resumes_with_the_samples_that_follow(folder, tmp_path, use_callback):
    transformers = pytest.importorskip("transformers")

    def train(*, attached, resume=None):
        seen = []

        def collate(samples):
            seen.append(list(samples))
            return {"numbers": torch.tensor(samples)}

        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), report_to=[], use_cpu=True, num_train_epochs=2, save_steps=2, seed=3,
            disable_tqdm=True, remove_unused_columns=False, dataloader_pin_memory=False,
            per_device_train_batch_size=4, logging_strategy="no",
        )  # fmt: skip
        callbacks = [torchobj.transformers.LookaheadCallback()] if attached else []
        trainer = transformers.Trainer(
            Regression(), arguments, train_dataset=records(folder), data_collator=collate, callbacks=callbacks
        )
        trainer.train(resume_from_checkpoint=resume)
        return seen

    whole = train(attached=use_callback)
    for attached in (False, True):
        assert train(attached=attached, resume=str(tmp_path / "checkpoint-2")) == whole[2:]
