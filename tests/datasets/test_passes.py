"""Passes over a shuffled iterable dataset are counted by its loader, unless an epoch is set."""

import itertools
import pickle

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import torchobj
from tests.support.iterables import COUNT, dataset, flat, numbers, write_objects
from tests.support.long_tables import often
from torchobj.ranks.sharding import shuffled

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # Of any loader of an iterable dataset with a length.
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
]

MODES = {
    "no workers": {"num_workers": 0},
    "workers": {"num_workers": 2, "multiprocessing_context": "fork"},
    "persistent workers": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    "spawned workers": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    "persistent spawned workers": {
        "num_workers": 2,
        "multiprocessing_context": "forkserver",
        "persistent_workers": True,
    },
}
FEW = ["no workers", "workers", "persistent workers"]
LOADERS = {"ours": torchobj.DataLoader, "torch's": DataLoader, "torchdata's": StatefulDataLoader}


def long_table(kinds, modes):
    """Each kind of loader with each mode; in each run two with our loader, and one with another."""
    tested = {("ours", "no workers"), ("ours", "workers"), ("torchdata's", "persistent workers")}
    return [
        pytest.param(kind, mode, marks=[] if (kind, mode) in tested else matrix) for kind in kinds for mode in modes
    ]


matrix = pytest.mark.matrix


@pytest.fixture
def folder(tmp_path):
    return write_objects(tmp_path)


def samples_of(folder, **given):
    return dataset(folder, shuffle=True, **given)


def loader(samples, mode="no workers", kind="ours"):
    return LOADERS[kind](samples, batch_size=10, **MODES[mode])


def orders(count, mode="no workers", rank=0, world_size=1):
    """The orders of the first epochs. Workers return their batches in turn."""
    found = []
    for epoch in range(count):
        order = shuffled(COUNT, 0, epoch)[rank::world_size].tolist()
        workers = MODES[mode]["num_workers"] or 1
        parts = [[order[worker::workers][at : at + 10] for at in range(0, COUNT, 10)] for worker in range(workers)]
        found.append(flat(flat(zip(*parts, strict=True))))
    return found


@pytest.mark.parametrize(("kind", "mode"), long_table(LOADERS, MODES))
def test_each_pass_has_the_order_of_the_next_epoch(folder, kind, mode):
    passes = loader(samples_of(folder), mode, kind)
    found = [numbers(passes) for _ in range(3)]
    assert found == orders(3, mode)
    assert all(sorted(each) == list(range(COUNT)) for each in found)


def test_passes_without_a_loader_are_counted(folder):
    samples = samples_of(folder)
    assert [list(samples) for _ in range(3)] == orders(3)


@pytest.mark.parametrize(("kind", "mode"), long_table(LOADERS, ["no workers", "workers"]))
def test_a_new_loader_for_each_pass_goes_on_counting(folder, kind, mode):
    samples = samples_of(folder)
    assert [numbers(loader(samples, mode, kind)) for _ in range(3)] == orders(3, mode)


@pytest.mark.parametrize(("kind", "mode"), long_table(LOADERS, FEW))
def test_a_rank_that_breaks_early_has_the_order_of_the_others_in_the_next_pass(folder, kind, mode):
    ranks = [loader(samples_of(folder, rank=rank, world_size=2), mode, kind) for rank in range(2)]
    first = iter(ranks[0])
    next(first)
    del first
    assert len(numbers(ranks[1])) == COUNT // 2
    assert sorted(flat(numbers(each) for each in ranks)) == list(range(COUNT))
    assert numbers(ranks[1]) == orders(3, mode, 1, 2)[2]


def at(samples, epoch):
    samples.set_epoch(epoch)
    return samples


@pytest.mark.parametrize("mode", FEW)
def test_an_iterator_that_is_never_used_does_not_count(folder, mode):
    passes = loader(samples_of(folder), mode)
    for _ in range(2):
        iter(passes)
    assert numbers(passes) == orders(1, mode)[0]


@pytest.mark.parametrize("mode", FEW)
def test_passes_over_other_datasets_in_between_do_not_count(folder, mode):
    training, validation = loader(samples_of(folder), mode), loader(samples_of(folder, seed=1), mode)
    found = []
    for _ in range(2):
        found.append(numbers(training))
        numbers(validation)
    assert found == orders(2, mode)


@pytest.mark.parametrize(("kind", "mode"), long_table(LOADERS, FEW))
def test_an_epoch_that_is_set_stays_until_another_is_set(folder, kind, mode):
    samples = samples_of(folder)
    passes = loader(samples, mode, kind)
    found = []
    for epoch in (None, 4, None, 1):
        if epoch is not None:
            samples.set_epoch(epoch)
        found.append(numbers(passes))
    expected = orders(5, mode)
    assert found == [expected[0], expected[4], expected[4], expected[1]]


@pytest.mark.parametrize("done", often(1, [7, 0, COUNT // 10]))
@pytest.mark.parametrize(("kind", "mode"), long_table(["ours", "torchdata's"], [*FEW, "persistent spawned workers"]))
def test_a_resumed_pass_and_those_after_it_are_of_the_epochs_of_the_first_run(folder, kind, mode, done):
    before = loader(samples_of(folder), mode, kind)
    numbers(before)
    iterator = iter(before)
    for _ in range(done):
        next(iterator)
    if done == COUNT // 10 and kind == "ours":
        with pytest.raises(StopIteration):
            next(iterator)
    state = pickle.loads(pickle.dumps(before.state_dict()))
    rest = numbers(iterator)
    del iterator
    after = loader(samples_of(folder), mode, kind)
    after.load_state_dict(state)
    expected = orders(4, mode)
    if done == COUNT // 10 and kind == "torchdata's":
        # Its state is one from before it has seen the end of the pass.
        assert (numbers(after) or numbers(after)) == expected[2]
        return
    if done < COUNT // 10:
        assert numbers(after) == (rest if done else expected[1])
    assert [numbers(after) for _ in range(2)] == expected[2:]


@pytest.mark.parametrize("done", [0, 5, COUNT])
def test_a_state_of_the_dataset_keeps_the_count(folder, done):
    before = samples_of(folder)
    list(before)
    iterator = iter(before)
    seen = list(itertools.islice(iterator, done))
    after = samples_of(folder)
    after.load_state_dict(pickle.loads(pickle.dumps(before.state_dict())))
    expected = orders(3)
    assert seen + list(after) == expected[1]
    assert list(after) == expected[2]


@pytest.mark.parametrize("mode", often(2, reversed(FEW)))
def test_a_state_keeps_that_the_epoch_was_set(folder, mode):
    samples = at(samples_of(folder), 2)
    before = loader(samples, mode)
    iterator = iter(before)
    next(iterator)
    states = [before.state_dict()]
    flat(batch.tolist() for batch in iterator)
    states.append(before.state_dict())
    order = orders(3, mode)[2]
    for state, first in zip(states, (order[10:], order), strict=True):
        after = loader(samples_of(folder), mode)
        after.load_state_dict(state)
        assert [numbers(after), numbers(after)] == [first, order]
    # Until the loop sets another one.
    after.dataset.set_epoch(0)
    assert numbers(after) == orders(1, mode)[0]


class Wrapper(torch.utils.data.IterableDataset):
    """A dataset of users, without a state."""

    def __init__(self, within):
        self.within = within

    def __iter__(self):
        yield from self.within


@pytest.mark.parametrize(("kind", "mode"), long_table(["ours", "torchdata's"], FEW))
def test_a_pass_within_a_wrapper_is_read_again_in_the_same_order(folder, kind, mode):
    before = loader(Wrapper(samples_of(folder)), mode, kind)
    first = numbers(before)
    iterator = iter(before)
    for _ in range(5):
        next(iterator)
    state = before.state_dict()
    rest = numbers(iterator)
    assert rest == first[50:]
    after = loader(Wrapper(samples_of(folder)), mode, kind)
    after.load_state_dict(state)
    assert numbers(after) == rest


@pytest.mark.parametrize("mode", often(2, reversed(FEW)))
def test_passes_over_a_mixture_and_of_its_datasets_have_orders_of_their_own(folder, mode):
    def mixed():
        return torchobj.interleave(
            [samples_of(folder, limit=40), samples_of(folder)], stopping_strategy="all_exhausted"
        )

    passes = loader(mixed(), mode)
    found = [numbers(passes) for _ in range(2)]
    assert found == [numbers(loader(at(mixed(), epoch), mode)) for epoch in range(2)]
    assert found[0] != found[1]
    if mode == "no workers":
        # The smaller one is read in another order when it starts again.
        small = found[0][::2]
        assert sorted(small[:40]) == sorted(small[40:80]) == list(range(40))
        assert small[:40] != small[40:80]


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_mixture_resumes_after_its_datasets_started_again(folder, epoch):
    def mixed():
        members = [samples_of(folder, limit=20), Wrapper(samples_of(folder, limit=30)), samples_of(folder, limit=90)]
        return torchobj.interleave(members, stopping_strategy="all_exhausted")

    before = mixed()
    for _ in range(epoch):
        list(before)
    iterator = iter(before)
    seen = list(itertools.islice(iterator, 200))
    state = pickle.loads(pickle.dumps(before.state_dict()))
    rest = list(iterator)
    after = mixed()
    after.load_state_dict(state)
    assert list(after) == rest
    assert len(seen) == 200
    assert list(after) == list(before)


class WithEpochs(torch.utils.data.IterableDataset):
    """A dataset of another library, as those of Hugging Face."""

    def __init__(self):
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch] * 3)


def test_other_datasets_of_a_mixture_are_told_the_epoch_of_each_pass():
    mixed = torchobj.interleave([WithEpochs(), [9] * 6], stopping_strategy="all_exhausted")
    assert [each for each in mixed if each != 9] == [0, 0, 0, 1, 1, 1]
    assert [each for each in mixed if each != 9] == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epochs_of_lightning_have_orders_of_their_own(folder, workers):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(1, 1), []

        def training_step(self, batch, _index):
            self.seen += batch.tolist()
            return self.layer(batch.float()[:, None]).mean()

        def validation_step(self, batch, _index):
            pass

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=3, **dict.fromkeys(names, False))
    module, mode = Module(), "workers" if workers else "no workers"
    trainer.fit(module, loader(samples_of(folder), mode), loader(samples_of(folder, limit=20), mode))
    assert module.seen == flat(orders(3, mode))


@pytest.mark.parametrize("value", [2, "yes", None])
def test_a_state_with_an_invalid_flag_is_refused(folder, value):
    samples = samples_of(folder)
    with pytest.raises(torchobj.exceptions.ConfigError, match="epoch_is_set of the state"):
        samples.load_state_dict(samples.state_dict() | {"epoch_is_set": value})


def test_an_epoch_that_is_set_after_an_iterator_was_created_is_kept(folder):
    reference = samples_of(folder)
    reference.set_epoch(7)
    expected = numbers(torchobj.DataLoader(reference, batch_size=10))
    samples = samples_of(folder)
    passes = torchobj.DataLoader(samples, batch_size=10)
    iterator = iter(passes)
    samples.set_epoch(7)
    next(iterator)
    assert numbers(passes) == expected


def test_a_loop_that_seeds_torch_before_each_epoch_has_the_next_order(folder):
    samples, found = samples_of(folder), []
    for _ in range(3):
        torch.manual_seed(0)
        found.append(tuple(numbers(DataLoader(samples, batch_size=10, num_workers=2, multiprocessing_context="fork"))))
    assert len(set(found)) == 3


def test_an_iterator_that_is_used_late_does_not_set_the_count_back(folder):
    samples = samples_of(folder)
    first, second = (torchobj.DataLoader(samples, batch_size=10) for _ in range(2))
    late = iter(first)
    found = [tuple(numbers(second)) for _ in range(3)]
    next(late)
    found.append(tuple(numbers(second)))
    assert len(set(found)) == 4
