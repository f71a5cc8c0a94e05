"""The random number generators of a process, as part of a checkpoint. Uses no store."""

import base64
import json
import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from torchobj.exceptions import CheckpointError

__all__ = ["RngState"]

logger = logging.getLogger("torchobj")


class RngState:
    """The generators of Python, numpy and torch, on the CPU and on each CUDA device, of every rank.

    `state_dict` is collective if `torch.distributed` is initialised, and returns the generators of every rank. A rank
    loads its own; a rank that the saving job did not have keeps its generators, and logs a warning.

    Example:
        >>> state = RngState()
        >>> saved = state.state_dict()
        >>> drawn = torch.rand(2), numpy.random.rand(), random.random()
        >>> state.load_state_dict(saved)
        >>> (torch.rand(2) == drawn[0]).all().item(), numpy.random.rand() == drawn[1], random.random() == drawn[2]
        (True, True, True)
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the generators of all ranks, in one string."""
        own: Any = _generators()
        ranks = [own]
        if _distributed():
            ranks = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(ranks, own)
        # One value: a list would differ in length, and so not match, in a job with another number of ranks.
        return {"ranks": json.dumps(ranks)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets the generators of this rank.

        Raises:
            CheckpointError: It is not a result of `state_dict`.
        """
        rank = torch.distributed.get_rank() if _distributed() else 0
        try:
            ranks = json.loads(state_dict["ranks"])
            if rank >= len(ranks):
                logger.warning(
                    "rank %d keeps its random generators: the checkpoint has those of %d ranks", rank, len(ranks)
                )
                return
            _set_generators(ranks[rank])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"this is not a state of an RngState: {error!r}") from error


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _generators() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    # The global generator: most code uses it, and others cannot be found.
    name, keys, position, has_gauss, cached = numpy.random.get_state()  # noqa: NPY002  as explained above
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, numpy.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def _set_generators(saved: Mapping[str, Any]) -> None:
    version, internal, gauss = saved["python"]
    name, keys, *rest = saved["numpy"]
    random.setstate((version, tuple(internal), gauss))
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))  # noqa: NPY002  as above
    torch.set_rng_state(_tensor(saved["torch"]))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, state in enumerate(saved["cuda"][:devices]):
        torch.cuda.set_rng_state(_tensor(state), device)
