"""What a save of a step writes: staged on the thread of the caller, and written below the folder of an attempt."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torchobj.checkpoint.steps.commit import Kind
from torchobj.ranks.meeting import Ranks

__all__ = ["Content", "WrittenObject"]


class WrittenObject(NamedTuple):
    """What is known of an object that a save wrote, and that its commit will name."""

    size: int | None = None
    """Size in bytes, which is compared with the listing; None if it is not known."""
    crc32: int | None = None
    """CRC-32 of its bytes, if known."""
    sha256: str | None = None
    """SHA-256 of its bytes, if known."""


class Content(Protocol):
    """The content of one save. All ranks create it, call `stage`, and then `write`."""

    @property
    def kind(self) -> Kind:
        """The kind of the commit."""

    def stage(self, ranks: Ranks) -> None:
        """Takes what will be written. Collective, on the thread of the caller.

        Raises:
            ConfigError: It cannot be written.
            Exception: It could not be copied. Every error is raised on all ranks.
        """

    def write(self, folder: str, writers: Ranks) -> Mapping[str, WrittenObject]:
        """Writes what this rank has to write. May be called on another thread.

        Args:
            folder: URL of the attempt's folder, with the slash.
            writers: The ranks that save, for this thread.

        Returns:
            On the first rank the objects of all ranks, by their names in the folder.

        Raises:
            Exception: It could not be written.
        """
