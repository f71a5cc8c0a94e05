"""Saves a position in the order of a sampler as a dict, and restores it.

A sampler or iterator with a state of its own is saved by that state. Any other order is drawn again from the same
random numbers, and the items that were already returned are skipped.

`torch.distributed.checkpoint` flattens dicts and lists, and restores only names that it saved. A state of another
library, whose keys vary, is packed into a single value, so that it always has the same name.
"""

import contextlib
import copy
import io
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.utils.data

from torchobj.exceptions import ConfigError
from torchobj.stateful import is_stateful, state_if_possible

logger = logging.getLogger("torchobj")

#: The layout of states. Its values are no lists or dicts of varying keys, because torch.distributed.checkpoint flattens
#: them, and a checkpoint from mid-epoch must fit a fresh loader.
VERSION = 2

_END = object()


class Origin(NamedTuple):
    """The inputs from which the order of a pass was drawn."""

    #: States of the generator when the iterator was created and at its first request; empty if the sampler has a state.
    rng: tuple[torch.Tensor, ...]
    epoch: int | None


class PassPosition(NamedTuple):
    """A position in a pass."""

    batches: int
    #: The state of the sampler or of its iterator, if it has one.
    own: Any
    origin: Origin


class SamplerStates(NamedTuple):
    """The states by which other libraries save a position; None for an object without one."""

    sampler: Any
    iterator: Any


def in_batches(sampler: Any) -> Any:
    """The sampler within torch's own BatchSampler; any other sampler itself."""
    return sampler.sampler if type(sampler) is torch.utils.data.BatchSampler else sampler


def innermost(sampler: Any) -> Any:
    """The sampler that generates the indices."""
    within = sampler
    while within is not None:
        sampler = within
        within = getattr(sampler, "sampler", None)
        if within is None:
            within = getattr(sampler, "batch_sampler", None)
    return sampler


def _stateful_sampler(sampler: Any) -> Any:
    """The sampler if it has a state; otherwise None."""
    inner = in_batches(sampler)
    return inner if is_stateful(inner) else None


def generator_of(sampler: Any) -> torch.Generator | None:
    """The generator of an order; None for torch's default generator."""
    generator = getattr(innermost(sampler), "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _int_attribute(sampler: Any, name: str) -> int | None:
    value = getattr(innermost(sampler), name, None)
    return value if isinstance(value, int) else None


def _length(sampler: Any) -> int | None:
    try:
        return len(innermost(sampler))
    except (NotImplementedError, TypeError):
        return None


#: Properties that an order must share with that of the state to be drawn again.
_SHAPE = ("batch_size", "drop_last", "length", "num_replicas", "rank", "seed", "shuffle")


def _shape_of(sampler: Any) -> dict[str, Any]:
    """The properties of an order: of its batches, and of the sampler within."""
    batches = {name: getattr(sampler, name, None) for name in _SHAPE[:2]}
    return batches | {"length": _length(sampler)} | {name: _int_attribute(sampler, name) for name in _SHAPE[3:]}


def _get_rng(generator: torch.Generator | None) -> torch.Tensor:
    return torch.get_rng_state() if generator is None else generator.get_state()


def _set_rng(generator: torch.Generator | None, state: torch.Tensor) -> None:
    if generator is None:
        torch.set_rng_state(state)
    else:
        generator.set_state(state)


@contextlib.contextmanager
def preserved_rng(generator: torch.Generator | None) -> Iterator[None]:
    """Restores the state of `generator`, or of torch's default generator, at the end of the context."""
    before = _get_rng(generator)
    try:
        yield
    finally:
        _set_rng(generator, before)


@contextlib.contextmanager
def drawing_from_a_copy(loader: Any) -> Iterator[None]:
    """Within the context, what a loader draws for its workers does not change its generator, or torch's default one."""
    given = loader.generator
    loader.generator = torch.Generator("cpu" if given is None else given.device)
    loader.generator.set_state(_get_rng(given))
    try:
        yield
    finally:
        loader.generator = given


class Order(Iterator[Any]):
    """One pass over a sampler or batch sampler, from its start or from a saved position."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self._generator = generator_of(sampler)
        self._resumed: Mapping[str, Any] | None = None
        self._origin: Origin | None = None
        self._batches = 0
        #: The iterator of the sampler.
        self.iterator: Any = iter(())
        self._open()

    def _open(self) -> None:
        self._own = _stateful_sampler(self.sampler)
        rng = (_get_rng(self._generator),) if self._own is None else ()
        self.iterator = iter(self.sampler)
        if self._own is None and is_stateful(self.iterator):
            self._own, rng = self.iterator, ()
        self._at_iter = rng

    def resume(self, state: Mapping[str, Any]) -> None:
        """Starts at the position of `state`, which `load` has accepted."""
        self._resumed = state

    @property
    def resumes(self) -> bool:
        """Whether it starts at a saved position."""
        return self._resumed is not None

    def __next__(self) -> Any:
        if self._origin is None:
            self._begin()
        item = next(self.iterator)
        self._batches += 1
        return item

    def mark(self) -> PassPosition:
        """The position after the last item that was yielded."""
        own = None if self._own is None else state_if_possible(self._own)
        return PassPosition(self._batches, own, self._origin or self._current_origin())

    def states(self) -> SamplerStates:
        """The states of the sampler and of its iterator after the last item that was yielded."""
        both = (self.sampler, self.iterator)
        return SamplerStates(*(state_if_possible(each) if is_stateful(each) else None for each in both))

    def _current_origin(self) -> Origin:
        at_first_item = (_get_rng(self._generator),) if self._at_iter else ()
        return Origin((*self._at_iter, *at_first_item), _int_attribute(self.sampler, "epoch"))

    def _begin(self) -> None:
        state, self._resumed = self._resumed, None
        # The loop may have changed the epoch since.
        if state is None or state["epoch"] != _int_attribute(self.sampler, "epoch"):
            self._origin = self._current_origin()
            return
        self._origin = Origin(_rng_of(state), state["epoch"])
        self._batches = state["batches"]
        if state["sampler"] is None:
            self._replay()
            return
        keeper = _stateful_sampler(self.sampler)
        if keeper is not None:
            # Loaded again, because an unused iterator may have consumed it.
            keeper.load_state_dict(copy.deepcopy(state["sampler"]))
        self._open()
        if keeper is None:
            if self._own is None:
                own = unpacked(state["sampler"], "sampler")
                raise ConfigError(
                    f"sampler={own!r}: in the state; the iterator of {state['order']} has no load_state_dict"
                )
            self._own.load_state_dict(unpacked(state["sampler"], "sampler"))

    def _replay(self) -> None:
        assert self._origin is not None  # noqa: S101  the caller set it
        at_iter, at_first_item = self._origin.rng
        # Drawing must not change the random numbers of the training.
        with preserved_rng(None) if self._generator is None else contextlib.nullcontext():
            _set_rng(self._generator, at_iter)
            inner = iter(self.sampler)
            _set_rng(self._generator, at_first_item)
            skipped = sum(1 for _ in itertools.islice(inner, self._batches))
            # One more than is skipped: most samplers draw when their first item is requested.
            first = next(inner, _END)
        if skipped < self._batches:
            raise ConfigError(
                f"batches={self._batches}: in the state; the order of {type(innermost(self.sampler)).__name__} now "
                f"ends after {skipped}: resume with the sampler and dataset that the state was saved with"
            )
        self.iterator = itertools.chain([] if first is _END else [first], inner)


def state_of(mark: PassPosition, sampler: Any) -> dict[str, Any]:
    """The state of a position within a pass over `sampler`."""
    # The state of an iterator is packed, because a sampler that was not iterated over does not know its keys.
    own = mark.own if mark.own is None or _stateful_sampler(sampler) is not None else packed(mark.own)
    return _state(sampler, mark.batches, mark.origin.rng, own, mark.origin.epoch, within_epoch=True)


def state_between_passes(sampler: Any) -> dict[str, Any]:
    """The state of `sampler` before its next pass starts."""
    keeper, generator = _stateful_sampler(sampler), generator_of(sampler)
    own = None if keeper is None else state_if_possible(keeper)
    rng = (generator.get_state(),) if own is None and generator is not None else ()
    return _state(sampler, 0, rng, own, _int_attribute(sampler, "epoch"), within_epoch=False)


def _state(
    sampler: Any, batches: int, rng: tuple[torch.Tensor, ...], own: Any, epoch: int | None, *, within_epoch: bool
) -> dict[str, Any]:
    return {
        "version": VERSION,
        "within_epoch": within_epoch,
        "batches": batches,
        "order": type(innermost(sampler)).__name__,
        **_shape_of(sampler),
        "epoch": epoch,
        # Always a single value: the states of the generator when the iterator was created and at its first request, or
        # before the epoch its current state; None if the sampler has a state of its own.
        "rng": _joined(rng),
        "sampler": own,
    }


def _joined(rng: Iterable[torch.Tensor]) -> bytes | None:
    # Not empty bytes: torch.load(weights_only=True) refuses them.
    return b"".join(bytes(each.numpy()) for each in rng) or None


def _rng_of(state: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The generator states within a state."""
    rng: bytes = state["rng"] or b""
    size = max(1, len(rng) // (2 if state["within_epoch"] else 1))
    parts = [rng[start : start + size] for start in range(0, len(rng), size)]
    return tuple(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)


def check(state: Any) -> None:
    """Checks the fields of a state.

    Raises:
        ConfigError: It is not a state; names the field.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"state={state!r}: not a loader's state; must be the return value of state_dict()")
    if "version" not in state:
        raise ConfigError(
            f"version=None: the state has {', '.join(map(repr, list(state)[:3])) or 'nothing'}, and is not one of a "
            "torchobj.DataLoader; load it into a loader of the class that saved it; torchobj.attach lets it read ahead"
        )
    if state.get("version") != VERSION:
        raise ConfigError(f"version={state.get('version')!r}: in the state; this version of torchobj reads {VERSION}")
    within, rng = state.get("within_epoch"), state.get("rng")
    tests = {
        "within_epoch": isinstance(within, bool),
        "batches": isinstance(state.get("batches"), int) and state["batches"] >= 0,
        "rng": ("rng" in state and rng is None) or isinstance(rng, bytes),
    }
    tests |= {name: name in state for name in ("order", *_SHAPE, "epoch", "sampler")}
    for name, holds in tests.items():
        if not holds:
            raise ConfigError(
                f"{name}={state.get(name)!r}: not a loader's state; must be the return value of state_dict()"
            )


def load(sampler: Any, state: Any) -> None:
    """Prepares `sampler` for the pass of `state`; an `Order` moves to the position itself.

    Raises:
        ConfigError: It is not a state, or of another sampler; names the field.
    """
    check(state)
    name = type(innermost(sampler)).__name__
    if state["order"] != name:
        raise ConfigError(f"order={state['order']!r}: in the state; the sampler now is a {name}")
    keeper, own = _stateful_sampler(sampler), state["sampler"]
    if own is None:
        _prepare_to_replay(sampler, state)
    elif keeper is not None:
        keeper.load_state_dict(copy.deepcopy(own))
        # A sampler that was saved at its end yields nothing once.
        if not state["within_epoch"] and next(iter(keeper), _END) is not _END:
            keeper.load_state_dict(copy.deepcopy(own))


def _prepare_to_replay(sampler: Any, state: Mapping[str, Any]) -> None:
    inner = innermost(sampler)
    if state["within_epoch"]:
        for name, value in _shape_of(sampler).items():
            if state[name] != value:
                raise ConfigError(
                    f"{name}={state[name]!r}: in the state; now {value!r}, so that the order of "
                    f"{type(inner).__name__} cannot be resumed; use an ElasticDistributedSampler"
                )
        sizes, size = [len(each) for each in _rng_of(state)] or None, len(_get_rng(generator_of(sampler)))
        if sizes != [size, size]:
            raise ConfigError(
                f"rng={sizes}: sizes of the generator states in the state, in bytes; the order of "
                f"{type(inner).__name__} needs two of {size}"
            )
        if not type(inner).__module__.startswith("torch."):
            logger.warning(
                "%s has no state_dict: its order is drawn again and the first %d batches are skipped, which is exact "
                "only if it draws from torch's generators",
                type(inner).__name__,
                state["batches"],
            )
    elif (rng := _rng_of(state)) and (generator := generator_of(sampler)) is not None:
        generator.set_state(rng[0])
    if state["epoch"] is not None and callable(getattr(inner, "set_epoch", None)):
        inner.set_epoch(state["epoch"])


def packed(state: Any) -> Any:
    """The state as bytes, or unchanged if `torch.load(weights_only=True)` refuses its contents.

    An unchanged state is left to the checkpoint, which decides whether it can be loaded.
    """
    out = io.BytesIO()
    try:
        torch.save(state, out)
        data = out.getvalue()
        torch.load(io.BytesIO(data), weights_only=True)
    except Exception:  # noqa: BLE001  pickling an object of the user can raise anything
        return state
    return data


def unpacked(state: Any, name: str) -> Any:
    """A copy of the state that `packed` was given. Executes no code that the state names.

    Args:
        state: The return value of `packed`.
        name: Name of the field in the loader's state, for error messages.

    Raises:
        ConfigError: The bytes are damaged, or name a class that `torch.load(weights_only=True)` refuses.
    """
    if not isinstance(state, bytes):
        return copy.deepcopy(state)
    try:
        return torch.load(io.BytesIO(state), weights_only=True)
    except Exception as error:
        # The message of torch is a paragraph with colours about its arguments, which the caller does not have.
        reason = type(error).__name__
        raise ConfigError(f"{name}: {len(state)} bytes of the state cannot be read: {reason}") from error
