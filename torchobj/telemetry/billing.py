"""What requests are billed as, and what they cost at given prices. Counts nothing itself."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torchobj.config import PriceOptions

#: The billing class of each operation, as a field of `Billed`: both providers divide the operations alike. S3 bills
#: LIST at the price of PUT, HEAD as GET, and Google Cloud Storage has class A (lists and puts) and class B (gets).
#: Deletes, aborted uploads and connections are free.
_CLASSES = {
    "get": "billed_gets",
    "head": "billed_gets",
    "list": "billed_lists",
    "list_uploads": "billed_lists",
    "list_buckets": "billed_lists",
    "put": "billed_puts",
    "begin_upload": "billed_puts",
    "put_part": "billed_puts",
    "commit": "billed_puts",
    "copy": "billed_puts",
}

#: The outcomes of billed requests: S3 bills 4xx responses and no 5xx. A read whose body breaks off was `ok` before.
_BILLED = ("ok", "refused")


class Billed(NamedTuple):
    """Numbers of billed requests by their class, and of bytes, by the keys of their metrics."""

    billed_gets: int = 0
    billed_lists: int = 0
    billed_puts: int = 0
    received_bytes: int = 0

    def plus(self, other: "Billed") -> "Billed":
        """The sums of both."""
        return Billed(*(one + another for one, another in zip(self, other, strict=True)))

    def since(self, before: "Billed") -> "Billed":
        """The difference to an earlier moment. Nothing if the process was forked in between and counts from zero."""
        return Billed(*(max(0, now - then) for now, then in zip(self, before, strict=True)))

    def dollars(self, prices: PriceOptions) -> float:
        """What they cost."""
        requests = (
            self.billed_gets * prices.get_per_1000
            + self.billed_lists * prices.list_per_1000
            + self.billed_puts * prices.put_per_1000
        )
        return requests / 1000 + self.received_bytes / (1 << 30) * prices.egress_per_gib


def billed(found: Mapping[str, Any]) -> Billed:
    """What `request_stats()` of the native module counted, by billing class.

    Of a hedged read, whose loser is not counted as an attempt, both requests are billed.
    """
    numbers = [found["outcomes"].index(outcome) for outcome in _BILLED]
    sums = Billed(billed_gets=found["hedges"], received_bytes=found["received_bytes"])._asdict()
    for operation, name in _CLASSES.items():
        sums[name] += sum(found["requests"][operation][number] for number in numbers)
    return Billed(**sums)


def shown_dollars(dollars: float) -> str:
    """An amount with cents, and with two digits if it is smaller.

    Example:
        >>> shown_dollars(1234.5), shown_dollars(0.00494), shown_dollars(0)
        ('$1,234.50', '$0.0049', '$0.00')
    """
    digits = 2 if dollars == 0 else max(2, 1 - math.floor(math.log10(dollars)))
    return f"${dollars:,.{digits}f}"
