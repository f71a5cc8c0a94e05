"""A place in the order of a sampler, saved as a dict and found again. Counts nothing that a loader hands out.

What has a state of its own, the sampler or its iterator, is asked for it. The order of any other is drawn again, from
the random numbers that it was drawn from, and what was handed out is passed over.
"""

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.utils.data

from torchobj.exceptions import ConfigError
from torchobj.loader.nested import in_batches, innermost
from torchobj.loader.packing import packed, unpacked
from torchobj.stateful import is_stateful

__all__ = ["Mark", "Order", "between", "check", "generator_of", "load", "state_of", "undrawn", "upgraded"]

logger = logging.getLogger("torchobj")

#: The layout of the states that are written. 1 had a list of tensors as `rng`, of 0 to 2 elements, and the state of a
#: sampler's iterator as it was: a checkpoint of torch.distributed.checkpoint, which flattens lists and dicts, that was
#: saved in mid-epoch did not fit a fresh loader.
VERSION = 2
_READABLE = (1, VERSION)

_END = object()


class Origin(NamedTuple):
    """What the order of a pass was made from."""

    #: Of the generator, when the iterator was made and when it was first asked; empty where the sampler has a state.
    rng: tuple[torch.Tensor, ...]
    epoch: int | None


class Mark(NamedTuple):
    """A place in a pass."""

    batches: int
    #: Of the sampler, or its iterator, if it has one.
    own: Any
    origin: Origin


def _keeper(sampler: Any) -> Any:
    """The sampler that has a state; None if it has none."""
    inner = in_batches(sampler)
    return inner if is_stateful(inner) else None


def generator_of(sampler: Any) -> torch.Generator | None:
    """The generator that an order is drawn from; None for torch's default one."""
    generator = getattr(innermost(sampler), "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _number(sampler: Any, name: str) -> int | None:
    value = getattr(innermost(sampler), name, None)
    return value if isinstance(value, int) else None


def _length(sampler: Any) -> int | None:
    try:
        return len(innermost(sampler))
    except (NotImplementedError, TypeError):
        return None


#: What an order that is drawn again must have in common with that of the state.
_SHAPE: dict[str, Callable[[Any], Any]] = {
    "batch_size": lambda sampler: getattr(sampler, "batch_size", None),
    "drop_last": lambda sampler: getattr(sampler, "drop_last", None),
    "length": _length,
    "num_replicas": lambda sampler: _number(sampler, "num_replicas"),
    "rank": lambda sampler: _number(sampler, "rank"),
    "seed": lambda sampler: _number(sampler, "seed"),
    "shuffle": lambda sampler: _number(sampler, "shuffle"),
}


def _get_rng(generator: torch.Generator | None) -> torch.Tensor:
    return torch.get_rng_state() if generator is None else generator.get_state()


def _set_rng(generator: torch.Generator | None, state: torch.Tensor) -> None:
    if generator is None:
        torch.set_rng_state(state)
    else:
        generator.set_state(state)


@contextlib.contextmanager
def undrawn(generator: torch.Generator | None) -> Iterator[None]:
    """Puts back what is drawn within from `generator`, or from torch's default one."""
    before = _get_rng(generator)
    try:
        yield
    finally:
        _set_rng(generator, before)


class Order(Iterator[Any]):
    """One pass over a sampler or batch sampler, from its start or from a place that was saved."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self._generator = generator_of(sampler)
        self._resumed: Mapping[str, Any] | None = None
        self._origin: Origin | None = None
        self._batches = 0
        self._open()

    def _open(self) -> None:
        self._own = _keeper(self.sampler)
        rng = (_get_rng(self._generator),) if self._own is None else ()
        self._inner = iter(self.sampler)
        if self._own is None and is_stateful(self._inner):
            self._own, rng = self._inner, ()
        self._at_iter = rng

    def resume(self, state: Mapping[str, Any]) -> None:
        """Begins at the place of `state`, which `load` has taken."""
        self._resumed = state

    @property
    def resumes(self) -> bool:
        """Whether it begins at a place that was saved."""
        return self._resumed is not None

    def __next__(self) -> Any:
        if self._origin is None:
            self._begin()
        item = next(self._inner)
        self._batches += 1
        return item

    def mark(self) -> Mark:
        """The place behind the item that was yielded last."""
        own = None if self._own is None else copy.deepcopy(self._own.state_dict())
        return Mark(self._batches, own, self._origin or self._made_from())

    def _made_from(self) -> Origin:
        at_pull = (_get_rng(self._generator),) if self._at_iter else ()
        return Origin((*self._at_iter, *at_pull), _number(self.sampler, "epoch"))

    def _begin(self) -> None:
        state, self._resumed = self._resumed, None
        # The loop may have gone on to another epoch since.
        if state is None or state["epoch"] != _number(self.sampler, "epoch"):
            self._origin = self._made_from()
            return
        self._origin = Origin(_rng_of(state), state["epoch"])
        self._batches = state["batches"]
        if state["sampler"] is None:
            self._replay()
            return
        keeper = _keeper(self.sampler)
        if keeper is not None:
            # Again: an iterator that nobody used may have taken it.
            keeper.load_state_dict(copy.deepcopy(state["sampler"]))
        self._open()
        if keeper is None:
            if self._own is None:
                own = unpacked(state["sampler"], "sampler")
                raise ConfigError(f"sampler={own!r}: of the state; the iterator of {state['order']} takes none")
            self._own.load_state_dict(unpacked(state["sampler"], "sampler"))

    def _replay(self) -> None:
        assert self._origin is not None  # noqa: S101  the caller set it
        at_iter, at_pull = self._origin.rng
        # The training's own numbers go on as if nothing had been drawn.
        with undrawn(None) if self._generator is None else contextlib.nullcontext():
            _set_rng(self._generator, at_iter)
            inner = iter(self.sampler)
            _set_rng(self._generator, at_pull)
            skipped = sum(1 for _ in itertools.islice(inner, self._batches))
            # One more than is skipped: most samplers draw when their first item is asked for.
            first = next(inner, _END)
        if skipped < self._batches:
            raise ConfigError(
                f"batches={self._batches}: of the state; the order of {type(innermost(self.sampler)).__name__} now "
                f"ends after {skipped}: resume with the sampler and dataset that the state was saved with"
            )
        self._inner = itertools.chain([] if first is _END else [first], inner)


def state_of(mark: Mark, sampler: Any) -> dict[str, Any]:
    """The state of a place within a pass over `sampler`."""
    # The state of an iterator is packed: a sampler that has not been iterated over cannot tell its keys.
    own = mark.own if mark.own is None or _keeper(sampler) is not None else packed(mark.own)
    return _state(sampler, mark.batches, mark.origin.rng, own, mark.origin.epoch, within_epoch=True)


def between(sampler: Any) -> dict[str, Any]:
    """The state of `sampler` before its next pass begins."""
    keeper, generator = _keeper(sampler), generator_of(sampler)
    own = None if keeper is None else copy.deepcopy(keeper.state_dict())
    rng = (generator.get_state(),) if own is None and generator is not None else ()
    return _state(sampler, 0, rng, own, _number(sampler, "epoch"), within_epoch=False)


def _state(
    sampler: Any, batches: int, rng: tuple[torch.Tensor, ...], own: Any, epoch: int | None, *, within_epoch: bool
) -> dict[str, Any]:
    return {
        "version": VERSION,
        "within_epoch": within_epoch,
        "batches": batches,
        "order": type(innermost(sampler)).__name__,
        **{name: value_of(sampler) for name, value_of in _SHAPE.items()},
        "epoch": epoch,
        # One value at every moment: the states of the generator when the iterator was made and when it was first asked,
        # or before the epoch the one that it has; nothing where the sampler has a state of its own.
        "rng": _joined(rng),
        "sampler": own,
    }


def _joined(rng: Iterable[torch.Tensor]) -> bytes | None:
    # Not empty: torch.load(weights_only=True) refuses that.
    return b"".join(bytes(each.numpy()) for each in rng) or None


def _rng_of(state: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The generator's states that a state holds."""
    rng = state["rng"] or ()
    if not isinstance(rng, bytes):
        return tuple(rng)
    size = max(1, len(rng) // 2) if state["within_epoch"] else len(rng)
    parts = [rng[start : start + size] for start in range(0, len(rng), size)]
    return tuple(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)


def upgraded(state: Mapping[str, Any], sampler: Any) -> dict[str, Any]:
    """A state that `check` has accepted, in the layout that is written now.

    Args:
        state: In any layout that can be read.
        sampler: What makes the order; None for an iterable dataset.
    """
    rng = _joined(state["rng"]) if isinstance(state["rng"], list) else state["rng"]
    own = state["sampler"]
    if own is not None and sampler is not None and _keeper(sampler) is None and not isinstance(own, bytes):
        own = packed(own)
    return {**state, "version": VERSION, "rng": rng, "sampler": own}


def check(state: Any) -> None:
    """Refuses what is no state.

    Raises:
        ConfigError: Names the field.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"state={state!r}: is no loader's state; must be what state_dict() returned")
    if state.get("version") not in _READABLE:
        raise ConfigError(f"version={state.get('version')!r}: of the state; this torchobj reads 1 and {VERSION}")
    within, rng = state.get("within_epoch"), state.get("rng")
    tests = {
        "within_epoch": isinstance(within, bool),
        "batches": isinstance(state.get("batches"), int) and state["batches"] >= 0,
        "rng": ("rng" in state and rng is None)
        or isinstance(rng, bytes)
        or (isinstance(rng, list) and all(isinstance(each, torch.Tensor) for each in rng)),
    }
    tests |= {name: name in state for name in ("order", *_SHAPE, "epoch", "sampler")}
    for name, holds in tests.items():
        if not holds:
            raise ConfigError(f"{name}={state.get(name)!r}: is no loader's state; must be what state_dict() returned")


def load(sampler: Any, state: Any) -> None:
    """Prepares `sampler` for the pass of `state`: an `Order` goes to the place itself.

    Raises:
        ConfigError: The state is none, or of another sampler; names the field.
    """
    check(state)
    name = type(innermost(sampler)).__name__
    if state["order"] != name:
        raise ConfigError(f"order={state['order']!r}: of the state; now the order is that of {name}")
    keeper, own = _keeper(sampler), state["sampler"]
    if own is None:
        _prepare_to_replay(sampler, state)
    elif keeper is not None:
        keeper.load_state_dict(copy.deepcopy(own))
        # A sampler that stood at its end yields nothing once.
        if not state["within_epoch"] and next(iter(keeper), _END) is not _END:
            keeper.load_state_dict(copy.deepcopy(own))


def _prepare_to_replay(sampler: Any, state: Mapping[str, Any]) -> None:
    inner = innermost(sampler)
    if state["within_epoch"]:
        for name, value_of in _SHAPE.items():
            if state[name] != (value := value_of(sampler)):
                raise ConfigError(
                    f"{name}={state[name]!r}: of the state; now {value!r}, and the order of "
                    f"{type(inner).__name__} cannot be resumed so; ElasticDistributedSampler's can"
                )
        sizes, size = [len(each) for each in _rng_of(state)] or None, len(_get_rng(generator_of(sampler)))
        if sizes != [size, size]:
            raise ConfigError(
                f"rng={sizes}: bytes of the generator's states in the state; the order of {type(inner).__name__} takes "
                f"two of {size}"
            )
        if not type(inner).__module__.startswith("torch."):
            logger.warning(
                "%s has no state_dict: %d batches of its order are passed over; that is exact if it draws from torch's "
                "generators only",
                type(inner).__name__,
                state["batches"],
            )
    elif (rng := _rng_of(state)) and (generator := generator_of(sampler)) is not None:
        generator.set_state(rng[0])
    if state["epoch"] is not None and callable(getattr(inner, "set_epoch", None)):
        inner.set_epoch(state["epoch"])
