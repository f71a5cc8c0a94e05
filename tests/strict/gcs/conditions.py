"""Preconditions on generations and metagenerations.

Source: GCS documentation, "Request preconditions". A generation condition is about the live object, also where the
request names another generation.
"""

from __future__ import annotations

from collections.abc import Mapping

from .errors import GcsError
from .request import number_of
from .store import StoredObject

_NAMES = ("GenerationMatch", "GenerationNotMatch", "MetagenerationMatch", "MetagenerationNotMatch")


def check(
    query: Mapping[str, str],
    live: StoredObject | None,
    *,
    addressed: StoredObject | None = None,
    prefix: str = "if",
    reads: bool = False,
) -> None:
    """Raises conditionNotMet, or notModified for a read, if a condition does not hold.

    live: the object whose generation is compared; None counts as generation 0.
    addressed: the object that the metageneration is compared with, if it is not the live one.
    prefix: "ifSource" checks the conditions on the source of a rewrite.
    """
    generation, not_generation, metageneration, not_metageneration = (
        number_of(prefix + name, query.get(prefix + name)) for name in _NAMES
    )
    current = live.generation if live is not None else 0
    changed = addressed or live
    if generation is not None and generation != current:
        raise _failed(prefix + "GenerationMatch")
    if metageneration is not None and (changed is None or metageneration != changed.metageneration):
        raise _failed(prefix + "MetagenerationMatch")
    if not_generation is not None and not_generation == current:
        raise _not_modified(prefix + "GenerationNotMatch", reads=reads)
    if not_metageneration is not None and changed is not None and not_metageneration == changed.metageneration:
        raise _not_modified(prefix + "MetagenerationNotMatch", reads=reads)


def _failed(parameter: str) -> GcsError:
    return GcsError("conditionNotMet", parameter=parameter)


def _not_modified(parameter: str, *, reads: bool) -> GcsError:
    return GcsError("notModified") if reads else _failed(parameter)
