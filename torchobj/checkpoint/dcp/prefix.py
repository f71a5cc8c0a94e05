"""Prefixes for the files of each rank: the strategies of s3torchconnector, with its names.

S3 partitions keys by prefix, and serves more requests per second to ranks whose keys start differently.
"""

from abc import ABC, abstractmethod

import torch.distributed

__all__ = [
    "BinaryPrefixStrategy",
    "DefaultPrefixStrategy",
    "HexPrefixStrategy",
    "NumericPrefixStrategy",
    "RoundRobinPrefixStrategy",
    "S3PrefixStrategyBase",
]


def _within_epoch(folder: str, epoch_num: int | None, rank: int) -> str:
    epoch = "" if epoch_num is None else f"epoch_{epoch_num}/"
    return f"{folder}/{epoch}__{rank}_"


class S3PrefixStrategyBase(ABC):
    """Chooses the prefix of a rank's files, relative to the checkpoint."""

    def __call__(self, rank: int) -> str:
        """Calls `generate_prefix`."""
        return self.generate_prefix(rank)

    @abstractmethod
    def generate_prefix(self, rank: int) -> str:
        """Returns the prefix of the files of `rank`."""


class DefaultPrefixStrategy(S3PrefixStrategyBase):
    """`__<rank>_`, as in torch."""

    def generate_prefix(self, rank: int) -> str:
        """`__<rank>_`"""
        return f"__{rank}_"


class NumericPrefixStrategy(S3PrefixStrategyBase):
    """`<number>/epoch_<epoch>/__<rank>_`: numbers with their digits reversed, so that the first digits differ.

    Args:
        base: 2 or 16, or another base that `_format_number` writes.
        epoch_num: Epoch in the prefix; None omits it.
        min_prefix_length: Minimum number of digits.
        prefix_count: Number of different prefixes; None uses the number of ranks.

    Raises:
        ValueError: An argument is not an int, or is too small.
    """

    def __init__(
        self, base: int, epoch_num: int | None = None, min_prefix_length: int = 10, prefix_count: int | None = None
    ) -> None:
        if min_prefix_length < 1:
            raise ValueError(f"min_prefix_length={min_prefix_length}: must be 1 or more")
        if epoch_num is not None and not isinstance(epoch_num, int):
            raise ValueError(f"epoch_num={epoch_num!r}: must be None or an int")
        if prefix_count is not None and (not isinstance(prefix_count, int) or prefix_count < 1):
            raise ValueError(f"prefix_count={prefix_count!r}: must be None, or an int of 1 or more")
        self.base = base
        self.epoch_num = epoch_num
        self.min_prefix_len = min_prefix_length
        self.prefix_count = prefix_count or self._rank_count()
        self.prefix_map = self._generate_prefix_map()

    @staticmethod
    def _rank_count() -> int:
        is_running = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_world_size() if is_running else 1

    def generate_prefix(self, rank: int) -> str:
        """Returns the prefix of the files of `rank`."""
        return _within_epoch(self.prefix_map[rank % len(self.prefix_map)], self.epoch_num, rank)

    def _generate_prefix_map(self) -> list[str]:
        length = 1
        while self.base**length < self.prefix_count:
            length += 1
        length = max(length, self.min_prefix_len)
        return [self._format_number(number, length)[::-1] for number in range(self.prefix_count)]

    @abstractmethod
    def _format_number(self, number: int, length: int) -> str:
        """Returns the number with `length` digits."""


class BinaryPrefixStrategy(NumericPrefixStrategy):
    """A `NumericPrefixStrategy` of binary numbers."""

    def __init__(
        self, epoch_num: int | None = None, min_prefix_length: int = 10, prefix_count: int | None = None
    ) -> None:
        super().__init__(2, epoch_num, min_prefix_length, prefix_count)

    def _format_number(self, number: int, length: int) -> str:
        return format(number, f"0{length}b")


class HexPrefixStrategy(NumericPrefixStrategy):
    """A `NumericPrefixStrategy` of hexadecimal numbers."""

    def __init__(
        self, epoch_num: int | None = None, min_prefix_length: int = 10, prefix_count: int | None = None
    ) -> None:
        super().__init__(16, epoch_num, min_prefix_length, prefix_count)

    def _format_number(self, number: int, length: int) -> str:
        return format(number, f"0{length}x")


class RoundRobinPrefixStrategy(S3PrefixStrategyBase):
    """`<prefix>/epoch_<epoch>/__<rank>_`, with the prefixes in turn.

    Args:
        user_prefixes: One or more prefixes.
        epoch_num: Epoch in the prefix; None omits it.

    Raises:
        ValueError: `user_prefixes` is empty.
    """

    def __init__(self, user_prefixes: list[str], epoch_num: int | None = None) -> None:
        if not user_prefixes:
            raise ValueError("user_prefixes=[]: must have one at least")
        self.user_prefixes = user_prefixes
        self.epoch_num = epoch_num

    def generate_prefix(self, rank: int) -> str:
        """Returns the prefix of the files of `rank`."""
        return _within_epoch(self.user_prefixes[rank % len(self.user_prefixes)], self.epoch_num, rank)
