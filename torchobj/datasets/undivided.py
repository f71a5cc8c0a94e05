"""Says once that several ranks read the same samples, each all of them, which is almost always a mistake.

The ranks tell each other by the store of the default process group, and by no collective: the second one that reads the
same samples says it. A rank that reads alone, as for a validation, repeats nothing. Workers cannot use that store:
those of a loader that is not torchobj's speak for rank 1. Knows no samplers.
"""

import logging
import zlib
from typing import Any

import torch.distributed
import torch.utils.data

from torchobj.datasets.wrappers import datasets_within
from torchobj.ranks.sample_ranks import model_dimensions, rank_of_library
from torchobj.reading import lookahead_warning
from torchobj.warn_once import FORKED
from torchobj.workers import process
from torchobj.workers.process import Rank

logger = logging.getLogger("torchobj")

#: What this process has noted; forked workers inherit it.
_noted: set[str] = set()


def note_pass(dataset: Any, advice: str, *, samples: str = "", recorded: Rank | None = None) -> None:
    """Records that this rank begins to read all samples of a dataset. Logs if another one does so too.

    Args:
        dataset: The dataset, or a wrapper of datasets.
        advice: What to pass in order to divide the samples, and what if this is intended.
        samples: Identifies the samples beside the name of the dataset: those of ranks may differ.
        recorded: The rank of the trainer, in a worker that was spawned.
    """
    rank = rank_of_library() or process.rank(recorded)
    # Ranks of one model get the same samples.
    if rank.world_size == 1 or model_dimensions():
        return
    name = " and ".join(dict.fromkeys(map(_name, datasets_within(dataset))))
    key = f"torchobj/undivided/{zlib.crc32(f'{name} {samples}'.encode()):08x}"
    if key in _noted:
        return
    _noted.add(key)
    if process.in_worker():
        info = torch.utils.data.get_worker_info()
        speaks = rank.number == 1 and info is not None and info.id == 0 and not lookahead_warning.is_disabled()
        is_second = speaks and FORKED.is_first(key)
    else:
        is_second = _is_second_rank(key, rank.number)
    if is_second:
        logger.warning(
            "%s: each of %d ranks reads all samples, so that every sample is repeated %d times; pass %s",
            name,
            rank.world_size,
            rank.world_size,
            advice,
        )


def _is_second_rank(key: str, number: int) -> bool:
    """Whether another rank has called this with the same key before, and no third one has."""
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        first = store.compare_set(key, "", str(number))
        return bool(first != str(number).encode() and store.add(f"{key}/said", 1) == 1)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        # The group was destroyed, or the rank that serves its store has ended.
        logger.debug("whether other ranks read the same samples is not known: %s", error)
        return False


def _name(dataset: Any) -> str:
    listing = getattr(dataset, "_listing", None)
    return type(dataset).__name__ if listing is None else str(listing.name)
