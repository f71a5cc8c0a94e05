"""Shared reads of small objects, and what each rank reads in them."""

from torchobj.ranks.shared_read import reads
from torchobj.ranks.shared_read.participant import Participant

MIB = 1 << 20


def use_small_parts(monkeypatch, slots):
    """Parts of 1 MiB, of which a ring has `slots`; reads from 1 MiB on are shared."""
    monkeypatch.setattr(reads, "_settings", lambda config: reads._Settings(MIB, slots))
    monkeypatch.setattr(reads, "MIN_BYTES", MIB)


def count_chunks():
    """A list with the number of bytes that this process reads for all ranks, from now on."""
    counted, real = [0], Participant._read_chunks

    def counting(self, claims):
        counted[0] += sum(self._chunks.size(claim.chunk) for claim in claims)
        return real(self, claims)

    Participant._read_chunks = counting
    return counted
