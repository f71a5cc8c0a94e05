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
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils.data

from torchobj.exceptions import ConfigError
from torchobj.stateful import Position, is_stateful, state_if_possible

logger = logging.getLogger("torchobj")

#: The layout of states. Its values are no lists or dicts of varying keys, because torch.distributed.checkpoint flattens
#: them, and a checkpoint from mid-epoch must fit a fresh loader.
VERSION = 2

_END = object()


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


def _get_rng(generator: torch.Generator | None) -> bytes:
    state = torch.get_rng_state() if generator is None else generator.get_state()
    return bytes(state.numpy())


def _set_rng(generator: torch.Generator | None, rng: bytes) -> None:
    state = torch.frombuffer(bytearray(rng), dtype=torch.uint8)
    if generator is None:
        torch.set_rng_state(state)
    else:
        generator.set_state(state)


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restores the state of torch's default generator at the end of the context."""
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)


@contextlib.contextmanager
def drawing_from_a_copy(loader: Any) -> Iterator[None]:
    """Within the context, what a loader draws for its workers does not change its generator, or torch's default one."""
    given = loader.generator
    loader.generator = torch.Generator("cpu" if given is None else given.device)
    loader.generator.set_state(torch.get_rng_state() if given is None else given.get_state())
    try:
        yield
    finally:
        loader.generator = given


class Order(Iterator[Any]):
    """One pass over a sampler or batch sampler, from its start or from a position."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self._generator = generator_of(sampler)
        self._start: Position | None = None
        #: The fields of a position that stay the same during a pass: the batches before it, the epoch, and the random
        #: numbers from which the order is drawn; None before the first item.
        self.origin: Position | None = None
        #: The iterator of the sampler.
        self.iterator: Any = iter(())
        self._open()

    def _open(self) -> None:
        self._stateful = _stateful_sampler(self.sampler)
        self._at_iter = b"" if self._stateful is not None else _get_rng(self._generator)
        self.iterator = iter(self.sampler)
        if self._stateful is None and is_stateful(self.iterator):
            self._stateful, self._at_iter = self.iterator, b""

    def start(self, position: Position) -> None:
        """Starts at a position, which `load` has accepted."""
        self._start = position

    def __next__(self) -> Any:
        if self.origin is None:
            self._begin()
        return next(self.iterator)

    @property
    def has_state(self) -> bool:
        """Whether the sampler or its iterator has a state of its own."""
        return self._stateful is not None

    def state(self) -> Any:
        """The state of the sampler or its iterator after the last item that was yielded; None without one."""
        return None if self._stateful is None else state_if_possible(self._stateful)

    def states(self) -> dict[str, Any]:
        """The states of the sampler and of its iterator after the last item, by which other libraries resume."""
        both = {"sampler": self.sampler, "iterator": self.iterator}
        return {name: state_if_possible(each) if is_stateful(each) else None for name, each in both.items()}

    def _begin(self) -> None:
        position, self._start = self._start, None
        epoch = _int_attribute(self.sampler, "epoch")
        # The loop may have changed the epoch since.
        if position is None or position["epoch"] != epoch:
            rng = self._at_iter + _get_rng(self._generator) if self._at_iter else None
            self.origin = {"batches": 0, "epoch": epoch, "rng": rng}
            return
        self.origin = {name: position[name] for name in ("batches", "epoch", "rng")}
        own = position["sampler"]
        if own is None:
            self._replay(position["batches"], position["rng"])
        elif (sampler := _stateful_sampler(self.sampler)) is not None:
            # Loaded again, because an unused iterator may have consumed it.
            sampler.load_state_dict(copy.deepcopy(own))
            self._open()
        else:
            self._open()
            own = unpacked(own, "sampler")
            if self._stateful is None:
                raise ConfigError(
                    f"sampler={own!r}: in the state; the iterator of {position['order']} has no load_state_dict"
                )
            self._stateful.load_state_dict(own)

    def _replay(self, batches: int, rng: bytes) -> None:
        # Drawing must not change the random numbers of the training.
        with preserved_rng() if self._generator is None else contextlib.nullcontext():
            _set_rng(self._generator, rng[: len(rng) // 2])
            inner = iter(self.sampler)
            _set_rng(self._generator, rng[len(rng) // 2 :])
            skipped = sum(1 for _ in itertools.islice(inner, batches))
            # One more than is skipped: most samplers draw when their first item is requested.
            first = next(inner, _END)
        if skipped < batches:
            raise ConfigError(
                f"batches={batches}: in the state; the order of {type(innermost(self.sampler)).__name__} now "
                f"ends after {skipped}: resume with the sampler and dataset that the state was saved with"
            )
        self.iterator = itertools.chain([] if first is _END else [first], inner)


def within_pass(sampler: Any, origin: Position, batches: int, state: Any) -> Position:
    """The position after `batches` batches of an order from this origin, the last of which had left this `state`."""
    if state is not None and _stateful_sampler(sampler) is None:
        # That of an iterator: a sampler that was not iterated over does not know its keys.
        state = packed(state)
    return _position(sampler, within_epoch=True, own=state) | origin | {"batches": batches}


def between_passes(sampler: Any) -> Position:
    """The position of `sampler` before its next pass starts."""
    stateful, generator = _stateful_sampler(sampler), generator_of(sampler)
    own = None if stateful is None else state_if_possible(stateful)
    rng = _get_rng(generator) if own is None and generator is not None else None
    epoch = _int_attribute(sampler, "epoch")
    return _position(sampler, within_epoch=False, own=own) | {"batches": 0, "epoch": epoch, "rng": rng}


def _position(sampler: Any, *, within_epoch: bool, own: Any) -> Position:
    """What a position depends on, and the state of the sampler, without `batches`, `epoch` and `rng`.

    `rng` has the bytes of the states of the generator when the iterator was created and at its first request, or before
    the epoch of its current state; None if the sampler has a state of its own.
    """
    fixed = {"version": VERSION, "order": type(innermost(sampler)).__name__, **_shape_of(sampler)}
    return fixed | {"within_epoch": within_epoch, "sampler": own}


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
    rng = state.get("rng")
    tests = {
        "within_epoch": isinstance(state.get("within_epoch"), bool),
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
    """Prepares `sampler` for the pass of `state`; an `Order` moves to its position.

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
        rng, size = state["rng"], 2 * len(_get_rng(generator_of(sampler)))
        if rng is None or len(rng) != size:
            raise ConfigError(
                f"rng={rng and len(rng)}: bytes of generator states in the state; the order of {type(inner).__name__} "
                f"needs {size}"
            )
        if not type(inner).__module__.startswith("torch."):
            logger.warning(
                "%s has no state_dict: its order is drawn again and the first %d batches are skipped, which is exact "
                "only if it draws from torch's generators",
                type(inner).__name__,
                state["batches"],
            )
    elif state["rng"] and (generator := generator_of(sampler)) is not None:
        _set_rng(generator, state["rng"])
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
