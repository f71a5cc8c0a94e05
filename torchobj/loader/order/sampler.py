"""A distributed sampler whose order is computed on the fly, does not depend on the number of ranks, and can be resumed
with another number of ranks. `lookahead` announces its indices.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch.distributed
import torch.utils.data
from torch.distributed.device_mesh import DeviceMesh

from torchobj.config.checks import check
from torchobj.datasets.rank_passes import RankPasses
from torchobj.exceptions import ConfigError
from torchobj.loader.order.host_order import HostOrder
from torchobj.ranks import broadcast
from torchobj.ranks.machine import host_count
from torchobj.ranks.sample_ranks import detected_rank, given_rank

__all__ = ["ElasticDistributedSampler"]

#: Number of indices computed at a time, in less than a millisecond.
_CHUNK = 4096


def _samples_of_rank(samples: int, num_replicas: int, *, drop_last: bool) -> int:
    return samples // num_replicas if drop_last else -(-samples // num_replicas)


def _hosts(ranks: int) -> int:
    """The number of hosts of an order with locality."""
    try:
        return host_count(ranks)
    except ConfigError as error:
        raise ConfigError(f"locality='host': {error}") from None


class PassPlan(NamedTuple):
    """The parameters that determine the indices of one pass."""

    seed: int
    epoch: int
    start: int
    length: int
    num_replicas: int
    turn: int
    """Which sample of each `num_replicas` samples of the order this rank takes."""
    shuffle: bool
    drop_last: bool
    hosts: int
    """Number of hosts of the order: every `hosts`-th sample belongs to the same one."""

    @property
    def samples(self) -> int:
        """Number of samples of the pass on this rank."""
        return _samples_of_rank(max(0, self.length - self.start), self.num_replicas, drop_last=self.drop_last)

    def indices(self, first: int, end: int) -> list[int]:
        """The indices of samples `first..end` of the pass."""
        numbers = np.arange(first, end, dtype=np.uint64)
        positions = numbers * np.uint64(self.num_replicas) + np.uint64(self.start + self.turn)
        # The last round is padded from the start of the order, as torch does.
        if self.shuffle:
            positions = HostOrder(self.length, self.hosts, self.seed, self.epoch).at(positions)
        else:
            positions %= np.uint64(self.length)
        found: list[int] = positions.tolist()
        return found


class IndexIterator(Iterator[int]):
    """One pass of one rank. Its plan is made at the first request, because loaders create iterators that they never
    use.
    """

    def __init__(self, sampler: "ElasticDistributedSampler") -> None:
        self._sampler = sampler
        self.plan: PassPlan | None = None
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
        """Number of samples of the global order that all ranks together have received, if each has received as many as
        this one.
        """
        if self.plan is None:
            return 0
        # Samples that drop_last leaves out count as done.
        yielded = self.plan.length if self._ended else (self._before + self._position) * self.plan.num_replicas
        return min(self.plan.start + yielded, self.plan.length)


class ElasticDistributedSampler(torch.utils.data.DistributedSampler[int]):
    """A `torch.utils.data.DistributedSampler` for jobs that are resumed in mid-epoch, by any number of ranks.

    An epoch has one global order, a permutation that depends on `seed` and `epoch` only. Rank `r` of `w` takes every
    `w`-th remaining sample, starting with the `r`-th, so that the ranks together read it from its start. Indices are
    computed 4096 at a time: a billion samples need no memory for the permutation and no time to start.

    With `locality="host"` each sample is read on the same host in every epoch. That is less random: a rank gets only
    samples of the part of its host, and each global batch has as many of one part as of another.

    Args:
        dataset: Anything with a length, which is read when iteration starts.
        num_replicas, rank: As for torch's sampler. None: those of torch.distributed when iteration starts, or 1 and 0
            if it is not initialised; 1 and 0 too if a loader that Accelerate has prepared iterates, which divides the
            batches itself; in a Trainer of Lightning, those of its strategy. The sampler can be created before
            torch.distributed is initialised.
        shuffle: Whether to shuffle. False: the global order is that of the dataset.
        seed: Must be the same on every rank.
        drop_last: If the remaining samples cannot be divided evenly, True drops the last ones; False repeats samples
            from the start of the order.
        world_size: Another name of `num_replicas`, as the iterable datasets have.
        mesh: A `DeviceMesh`, instead of `num_replicas` and `rank`. Ranks that differ only in dimensions for parts of
            the model, such as `tp`, `cp` and `pp`, get the same samples. Dimensions with names such as `dp`, `fsdp`,
            `dp_replicate` and `data_parallel` divide them; pass `mesh["name"]` to divide by one of another name.
        locality: "host": the ranks of a host get the same samples in all epochs, in another order, so that a disk cache
            has them from the second epoch on. The parts of the hosts are random, of equal size, and depend on `seed`
            and the number of hosts. That is the number of ranks divided by `LOCAL_WORLD_SIZE`, which torchrun sets; the
            ranks of a host have consecutive numbers. None: each epoch shuffles all samples over all ranks.

    Raises:
        ConfigError: An argument is invalid; or, when iteration starts, only one of `num_replicas` and `rank` is known,
            or, with `locality="host"`, the number of hosts is not known or the hosts have different numbers of ranks.

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
        *,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        locality: Literal["host"] | None = None,
    ) -> None:
        # torch's __init__ is not called: it reads the length, which lists, and needs torch.distributed.
        if world_size is not None and num_replicas is not None and world_size != num_replicas:
            raise ConfigError(
                f"world_size={world_size!r}, num_replicas={num_replicas!r}: are the same; pass one of them"
            )
        num_replicas = world_size if num_replicas is None else num_replicas
        if mesh is not None:
            rank, num_replicas = given_rank(rank, num_replicas, mesh) or (rank, num_replicas)
        for name, value in {"num_replicas": num_replicas, "rank": rank, "seed": seed}.items():
            is_number = hasattr(value, "__index__") and not isinstance(value, bool)
            check(name, value, "an int", ok=is_number or (value is None and name != "seed"))
        check("num_replicas", num_replicas, "1 or more", ok=num_replicas is None or num_replicas > 0)
        if rank is not None and not 0 <= rank < (rank + 1 if num_replicas is None else num_replicas):
            raise ConfigError(f"rank={rank!r}: must be 0..{num_replicas or 'num_replicas'}, end excluded")
        check("locality", locality, "'host' or None", ok=locality is None or locality == "host")
        self.dataset: Any = dataset
        self.locality = locality
        self._num_replicas, self._rank = num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._epoch_is_set = False
        self._rank_passes = RankPasses()
        # Samples of the epoch that are done before the next pass starts.
        self._start = 0
        # Number of hosts of the order of an epoch that is resumed; None: that of the job.
        self._order_hosts: int | None = None
        # The pass that was started last.
        self._latest: IndexIterator | None = None

    def __repr__(self) -> str:
        # The arguments: torch.distributed and the dataset are not accessed.
        shape = f"num_replicas={self._num_replicas}, rank={self._rank}, shuffle={self.shuffle}, seed={self.seed}"
        locality = "" if self.locality is None else f", locality={self.locality!r}"
        return f"<{type(self).__name__} {shape}, drop_last={self.drop_last}{locality}, epoch {self.epoch}>"

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # torch.distributed may be initialised later
        """Number of ranks of the job."""
        return self._group()[0]

    @property
    def rank(self) -> int:  # type: ignore[override]  # torch.distributed may be initialised later
        """The rank of this sampler."""
        return self._group()[1]

    def _group(self) -> tuple[int, int]:
        num_replicas, rank = self._num_replicas, self._rank
        if num_replicas is None and rank is None:
            found = detected_rank(None)
            return found.world_size, found.number
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            num_replicas = distributed.get_world_size() if num_replicas is None else num_replicas
            rank = distributed.get_rank() if rank is None else rank
        if num_replicas is None or rank is None or rank >= num_replicas:
            raise ConfigError(
                f"num_replicas={num_replicas!r}, rank={rank!r}: rank must be 0..num_replicas, end excluded; pass both, "
                "or neither and initialise torch.distributed before the loop"
            )
        return num_replicas, rank

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # the dataset is listed at its first use
        """Number of samples of a whole epoch on one rank."""
        return _samples_of_rank(len(self.dataset), self.num_replicas, drop_last=self.drop_last)

    @property
    def total_size(self) -> int:  # type: ignore[override]  # as num_samples
        """Number of samples of a whole epoch on all ranks, including the padding."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        return IndexIterator(self)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, and thereby the order, of the following passes. A resumed position in another epoch is
        discarded.
        """
        if epoch != self.epoch:
            self._start, self._order_hosts = 0, None
        self.epoch, self._epoch_is_set = epoch, True

    def plan(self) -> PassPlan:
        """The plan of a pass that would start now."""
        num_replicas, rank = self._group()
        start, length = self._start, len(self.dataset)
        hosts = 1 if self.locality is None else _hosts(num_replicas)
        # Fewer samples than hosts cannot be divided.
        order_hosts = self._order_hosts or (hosts if hosts <= length else 1)
        turn = rank
        if order_hosts == hosts:
            # The order has the samples of host `h` at the positions `p` with `p % hosts == h`.
            host, local_rank = divmod(rank, num_replicas // hosts)
            turn = (host - start) % hosts + local_rank * hosts
        return PassPlan(
            self.seed, self.epoch, start, length, num_replicas, turn, self.shuffle, self.drop_last, order_hosts
        )

    def begin(self, indices: IndexIterator) -> PassPlan:
        """Called when a pass starts; the pass after it starts at the beginning of its epoch.

        Raises:
            ManifestMismatchError: Another rank has another listing of a dataset.
            ConfigError: Another rank has another order, with `locality="host"`.
        """
        plan = self.plan()
        broadcast.confirm()
        if self.locality is not None:
            self._confirm_hosts(plan)
        if not self._epoch_is_set:
            self._rank_passes.begin(self, plan.epoch, plan.start)
        self._start, self._order_hosts, self._latest = 0, None, indices
        return plan

    def _confirm_hosts(self, plan: PassPlan) -> None:
        hosts = _hosts(plan.num_replicas)
        found = broadcast.first_value(type(self).__name__, "hosts", 0, str(hosts), waits=True)
        if found is not None and (first := found.split())[1] != str(hosts):
            raise ConfigError(
                f"locality='host': this rank finds {hosts} hosts by LOCAL_WORLD_SIZE, rank {first[0]} finds {first[1]};"
                " all hosts must have the same number of ranks"
            )

    def latest_plan(self) -> PassPlan | None:
        """The plan of the pass that was started last."""
        return None if self._latest is None else self._latest.plan

    def next_pass(self) -> Self:
        """A sampler of the pass after the latest: of the next epoch if the loop sets epochs, otherwise of the same
        epoch.
        """
        following = copy.copy(self)
        following._start, following._order_hosts, following._latest = 0, None, None
        latest = self.latest_plan()
        if self._epoch_is_set and latest is not None and latest.epoch == self.epoch:
            following.epoch += 1
        return following

    def take_over(self, following: Self) -> None:
        """Takes over the pass that `following` started, which has the same plan."""
        self._latest = following._latest

    def state_dict(self) -> dict[str, Any]:
        """The position after the last index that was drawn from the latest pass, on each rank.

        A loader draws indices ahead of the batches that it returns: save the state of the loader instead.

        Returns:
            A dict of plain values: `seed`, `epoch`, `done` (number of samples of the epoch's global order that all
            ranks together have received), `length`, `shuffle`, and with `locality="host"` also `hosts` (number of hosts
            of the order of these samples; None of one host, and before the first sample).
        """
        done, hosts, latest = self._start, self._order_hosts, self._latest
        seed, epoch, length = self.seed, self.epoch, len(self.dataset)
        if not done and latest is not None and latest.plan is not None and latest.plan.epoch == self.epoch:
            done, hosts = latest.done(), latest.plan.hosts
        state = {"seed": seed, "epoch": epoch, "done": done, "length": length, "shuffle": self.shuffle}
        hosts = hosts if self.shuffle and done and hosts != 1 else None
        # Also where the rest of such an epoch is read without locality.
        return state | {"hosts": hosts} if self.locality is not None or hosts is not None else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues after the position of `state_dict`, with the current number of ranks; the next pass yields the
        rest. The rest of the epoch keeps its order: if that is of another number of hosts, `locality="host"` begins
        with the next epoch.

        Raises:
            ConfigError: It is not a state of such a sampler, or has another length or `shuffle`.
        """
        for name in ("seed", "epoch", "done", "length"):
            value = state_dict.get(name)
            if not isinstance(value, int) or (name in ("done", "length") and value < 0):
                raise ConfigError(f"{name}={value!r}: not a sampler's state; must be the return value of state_dict()")
        if state_dict["length"] != len(self.dataset):
            raise ConfigError(
                f"length={state_dict['length']}: in the state; the dataset of this sampler has "
                f"{len(self.dataset)} samples, and therefore another order"
            )
        shuffle, hosts = state_dict.get("shuffle"), state_dict.get("hosts")
        if shuffle is not self.shuffle:
            raise ConfigError(f"shuffle={shuffle!r}: in the state; this sampler has {self.shuffle}")
        if hosts is not None and not (type(hosts) is int and 1 <= hosts <= max(1, state_dict["length"])):
            raise ConfigError(f"hosts={hosts!r}: in the state; must be the number of hosts of its order, or None")
        self.seed, self.epoch = state_dict["seed"], state_dict["epoch"]
        self._start, self._latest = min(state_dict["done"], state_dict["length"]), None
        # Where nothing was read, the order is that of this job.
        self._order_hosts = (hosts or 1) if self._start and self.shuffle else None
