"""What the clients of all benchmarks have in common."""

from typing import ClassVar

from benchmarks.lab.location import Location


class Client:
    """A client to measure. One that cannot do something does not define it."""

    modules: ClassVar[tuple[str, ...]] = ()
    """What its first use imports."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self.open(location)

    def open(self, location: Location) -> None:
        """Makes the client."""
        raise NotImplementedError
