"""Run by `test_gcs_kills.py`: for each line of orders a child that replaces an object by 36 parts, to be killed."""

import torchobj
from tests.support.killing import serve

PARTS = 36
PART_BYTES = 5 << 20


def body(fill):
    return fill.encode() * (PARTS * PART_BYTES)


def save(orders):
    """Writes the object."""
    torchobj.Store(orders["url"], config=orders["config"]).put("large", body(orders["fill"]))


if __name__ == "__main__":
    serve(save)
