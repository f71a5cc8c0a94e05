"""What a save of a step writes: staged on the thread of the caller, and written below the folder of an attempt."""

from collections.abc import Mapping
from typing import Protocol

from torchobj.checkpoint.steps.commit import Kind, WrittenObject
from torchobj.ranks.meeting import Ranks

__all__ = ["Content"]


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
