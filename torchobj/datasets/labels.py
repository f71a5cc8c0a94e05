"""The samples of an `ImageFolder` as pairs of URL and target, without a Python object for each."""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
from typing_extensions import override

from torchobj.datasets.arranged_listing import Arrangement

__all__ = ["Labels", "Samples", "Targets"]

_Item = TypeVar("_Item")


class Labels(NamedTuple):
    """The classes, and the targets of the samples: one for each run of neighbours, with the number of samples up to its
    end.
    """

    classes: list[str]
    class_to_idx: dict[str, int]
    runs: list[Any]
    ends: list[int]

    def target(self, index: int) -> Any:
        """The target of a sample."""
        return self.runs[bisect.bisect_right(self.ends, index)]

    def counts(self) -> list[int]:
        """Number of samples of each run."""
        return [end - begin for begin, end in itertools.pairwise([0, *self.ends])]

    def targets(self) -> Iterator[Any]:
        """The targets of all samples."""
        return itertools.chain.from_iterable(map(itertools.repeat, self.runs, self.counts()))

    def with_targets(self, targets: Iterable[Any]) -> "Labels":
        """The same classes with the targets of other samples."""
        runs: list[Any] = []
        ends: list[int] = []
        for count, target in enumerate(targets, 1):
            if runs and type(target) is type(runs[-1]) is int and target == runs[-1]:
                ends[-1] = count
            else:
                runs.append(target)
                ends.append(count)
        return self._replace(runs=runs, ends=ends)


class _LazyList(Sequence[_Item]):
    """A sequence like a list, whose items are computed when they are accessed."""

    def __init__(self, arrangement: Arrangement[Labels]) -> None:
        self._arrangement = arrangement

    def _item(self, index: int) -> _Item:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._arrangement.manifest)

    @overload
    def __getitem__(self, index: int) -> _Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Item]: ...
    def __getitem__(self, index: int | slice) -> _Item | list[_Item]:
        # The range checks the index, and counts negative ones from the end.
        chosen = range(len(self))[index]
        return self._item(chosen) if isinstance(chosen, int) else [self._item(number) for number in chosen]

    def __iter__(self) -> Iterator[_Item]:
        return map(self._item, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, _LazyList)):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Iterable[_Item]) -> list[_Item]:
        return [*self, *other] if isinstance(other, (list, _LazyList)) else NotImplemented

    def __radd__(self, other: Iterable[_Item]) -> list[_Item]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        shown = [repr(item) for item in self[:3]]
        return f"[{', '.join([*shown, '...'] if len(self) > 3 else shown)}]"


class Targets(_LazyList[Any]):
    """The target of each sample."""

    @override
    def _item(self, index: int) -> Any:
        return self._arrangement.details.target(index)

    @override
    def __iter__(self) -> Iterator[Any]:
        return self._arrangement.details.targets()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:  # noqa: FBT001  numpy's arguments
        if copy is False:
            raise ValueError("the targets are computed: an array of them is a copy")
        labels = self._arrangement.details
        return np.repeat(np.array(labels.runs, dtype or (None if labels.runs else np.int64)), labels.counts())


class Samples(_LazyList[tuple[str, Any]]):
    """URL and target of each sample."""

    @override
    def _item(self, index: int) -> tuple[str, Any]:
        return self._arrangement.manifest.url(index), self._arrangement.details.target(index)
