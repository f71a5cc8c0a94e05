"""The kinds of reader that a dataset passes to its transform. `s3torchconnector` has the other library's names."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ReaderConstructor:
    """A kind of reader."""

    name: str
    """`sequential`, `range_based` or `dcp_optimized`."""
    jump_bytes: int | None = None
    """Number of bytes that are fetched after a seek."""
    ahead_bytes: int | None = None
    """Number of bytes that are fetched ahead of a sequential reader."""

    @property
    def whole(self) -> bool:
        """Whether the object is read whole, before the transform is called."""
        return self.name == "sequential"


SEQUENTIAL = ReaderConstructor("sequential")
