"""A distributed sampler whose order is computed, does not depend on the number of ranks, and can be resumed by another
number of them. Makes indices only; who announces them is `lookahead`.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import torch.distributed
import torch.utils.data

from torchobj.exceptions import ConfigError
from torchobj.loader.permutation import Permutation

__all__ = ["ElasticDistributedSampler"]

#: Indices that are computed at once: under a millisecond.
_CHUNK = 4096


class Plan(NamedTuple):
    """What decides which indices one pass yields."""

    seed: int
    epoch: int
    start: int
    length: int
    num_replicas: int
    rank: int
    shuffle: bool
    drop_last: bool

    @property
    def samples(self) -> int:
        """Of the pass, on this rank."""
        left = max(0, self.length - self.start)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def indices(self, first: int, end: int) -> list[int]:
        """Those from `first` to `end` of its samples."""
        numbers = np.arange(first, end, dtype=np.uint64)
        positions = numbers * np.uint64(self.num_replicas) + np.uint64(self.start + self.rank)
        # What pads the last round is the order's beginning, as with torch.
        positions %= np.uint64(self.length)
        if self.shuffle:
            positions = Permutation(self.length, self.seed, self.epoch).at(positions)
        found: list[int] = positions.tolist()
        return found


class Indices(Iterator[int]):
    """One pass of one rank. Which, is decided when the first index is asked for: loaders make iterators that they never
    use.
    """

    def __init__(self, sampler: "ElasticDistributedSampler") -> None:
        self._sampler = sampler
        self.plan: Plan | None = None
        self._chunk: list[int] = []
        self._position = self._before = 0
        self._ended = False

    def __next__(self) -> int:
        if self._position == len(self._chunk):
            self._compute()
        index = self._chunk[self._position]
        self._position += 1
        return index

    def _compute(self) -> None:
        if self.plan is None:
            self.plan = self._sampler.begin(self)
        self._before, self._position = self._before + len(self._chunk), 0
        end = min(self._before + _CHUNK, self.plan.samples)
        self._chunk = self.plan.indices(self._before, end) if self._before < end else []
        if not self._chunk:
            self._ended = True
            raise StopIteration

    def done(self) -> int:
        """Samples of the global order that the ranks have had together, when each has had as many as this one."""
        if self.plan is None:
            return 0
        # What drop_last leaves out is done with too.
        yielded = self.plan.length if self._ended else (self._before + self._position) * self.plan.num_replicas
        return min(self.plan.start + yielded, self.plan.length)


class ElasticDistributedSampler(torch.utils.data.DistributedSampler[int]):
    """A `torch.utils.data.DistributedSampler` for jobs that are resumed in mid-epoch, by any number of ranks.

    The order of an epoch is one global order, a permutation chosen by `seed` and `epoch` alone. Of what is left of it
    rank `r` of `w` takes every `w`-th sample from the `r`-th on, so that the ranks together go through it from its
    start. It is computed as it goes, 4096 indices at a time: a billion samples take no memory and no time to begin.

    Args:
        dataset: Anything with a length; asked for it when iteration starts.
        num_replicas, rank: As torch's. None: those of torch.distributed when iteration starts, or 1 and 0 if it is not
            initialised then, so that the sampler may be made before it is.
        shuffle: False: the global order is that of the dataset.
        seed: The same on every rank.
        drop_last: Where the samples that are left cannot be dealt evenly: True drops the last few; False takes as many
            again from the start of the order.

    Raises:
        ConfigError: `num_replicas` or `rank` is out of range; when iteration starts, one of them is given and the other
            can not be had.

    Example:
        >>> sampler = ElasticDistributedSampler(range(8), num_replicas=2, rank=0, seed=1)
        >>> first = [index for _, index in zip(range(2), sampler)]
        >>> state = sampler.state_dict()
        >>> state["epoch"], state["done"]
        (0, 4)
        >>> alone = ElasticDistributedSampler(range(8), num_replicas=1, rank=0)
        >>> alone.load_state_dict(state)
        >>> len(list(alone)), len(list(alone))
        (4, 8)
    """

    def __init__(  # noqa: PLR0917  torch's signature
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,  # noqa: FBT001, FBT002  torch's signature
        seed: int = 0,
        drop_last: bool = False,  # noqa: FBT001, FBT002  torch's signature
    ) -> None:
        # Not torch's: it asks for the length, which lists, and for torch.distributed.
        if num_replicas is not None and num_replicas < 1:
            raise ConfigError(f"num_replicas={num_replicas!r}: must be 1 or more")
        if rank is not None and not 0 <= rank < (rank + 1 if num_replicas is None else num_replicas):
            raise ConfigError(f"rank={rank!r}: must be 0..{num_replicas or 'num_replicas'}, end excluded")
        self.dataset: Any = dataset
        self._num_replicas, self._rank = num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._epoch_is_set = False
        # Samples of the epoch that are done before the next pass begins.
        self._start = 0
        # The pass that was begun last.
        self._latest: Indices | None = None

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # torch.distributed may be initialised later
        """Ranks of the job."""
        return self._group()[0]

    @property
    def rank(self) -> int:  # type: ignore[override]  # torch.distributed may be initialised later
        """The rank that indices are for."""
        return self._group()[1]

    def _group(self) -> tuple[int, int]:
        num_replicas, rank = self._num_replicas, self._rank
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            num_replicas = distributed.get_world_size() if num_replicas is None else num_replicas
            rank = distributed.get_rank() if rank is None else rank
        elif num_replicas is None and rank is None:
            return 1, 0
        if num_replicas is None or rank is None or rank >= num_replicas:
            raise ConfigError(
                f"num_replicas={num_replicas!r}, rank={rank!r}: rank must be 0..num_replicas, end excluded; give both, "
                "or none and initialise torch.distributed before the loop"
            )
        return num_replicas, rank

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # the dataset is listed at its first use
        """Samples of a whole epoch on one rank."""
        return self._plan(0).samples

    @property
    def total_size(self) -> int:  # type: ignore[override]  # as num_samples
        """Samples of a whole epoch on all ranks, the padding included."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        return Indices(self)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the passes to come. What was resumed is forgotten if this is another epoch than its."""
        if epoch != self.epoch:
            self._start = 0
        self.epoch, self._epoch_is_set = epoch, True

    def plan(self) -> Plan:
        """The pass that would begin now."""
        return self._plan(self._start)

    def _plan(self, start: int) -> Plan:
        num_replicas, rank = self._group()
        length = len(self.dataset)
        return Plan(self.seed, self.epoch, start, length, num_replicas, rank, self.shuffle, self.drop_last)

    def begin(self, indices: Indices) -> Plan:
        """Called by a pass that begins; the next one begins at the epoch's start."""
        plan = self.plan()
        self._start, self._latest = 0, indices
        return plan

    def begun(self) -> Plan | None:
        """The pass that was begun last."""
        return None if self._latest is None else self._latest.plan

    def following(self) -> Self:
        """A sampler of the pass behind the latest: of the next epoch, if the loop sets epochs, else of this again."""
        following = copy.copy(self)
        following._start, following._latest = 0, None
        latest = self.begun()
        if self._epoch_is_set and latest is not None and latest.epoch == self.epoch:
            following.epoch += 1
        return following

    def adopt(self, following: Self) -> None:
        """Makes the pass that `following` began the latest of this one; its plan is this one's."""
        self._latest = following._latest

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands: after the index that was taken last from the latest pass, on each rank.

        A loader takes indices ahead of what it hands out: its own state is the one to save then.

        Returns:
            A dict of plain values: `seed`, `epoch`, `done` (samples of the epoch's global order that all ranks had
            together), `length` and `shuffle`.
        """
        done, latest = self._start, self._latest
        if not done and latest is not None and latest.plan is not None and latest.plan.epoch == self.epoch:
            done = latest.done()
        length = len(self.dataset)
        return {"seed": self.seed, "epoch": self.epoch, "done": done, "length": length, "shuffle": self.shuffle}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` stood, with whatever number of ranks there is now; the next pass yields the rest.

        Raises:
            ConfigError: It is no state of such a sampler, or of one with another length or `shuffle`.
        """
        for name in ("seed", "epoch", "done", "length"):
            value = state_dict.get(name)
            if not isinstance(value, int) or (name in ("done", "length") and value < 0):
                raise ConfigError(f"{name}={value!r}: is no sampler's state; must be what state_dict() returned")
        if state_dict["length"] != len(self.dataset):
            raise ConfigError(
                f"length={state_dict['length']}: of the dataset that the state is of; this one has "
                f"{len(self.dataset)} samples, and another order"
            )
        if state_dict.get("shuffle") is not self.shuffle:
            raise ConfigError(f"shuffle={state_dict.get('shuffle')!r}: of the state; this sampler has {self.shuffle}")
        self.seed, self.epoch = state_dict["seed"], state_dict["epoch"]
        self._start, self._latest = min(state_dict["done"], state_dict["length"]), None
