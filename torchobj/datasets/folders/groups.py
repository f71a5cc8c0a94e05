"""`GroupDataset`: samples of several objects whose names differ only in their ends."""

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from typing_extensions import override

from torchobj._torchobj import ObjectReader, ObjectRef
from torchobj.config import StoreConfig
from torchobj.config.checks import check, check_callable
from torchobj.datasets.containers.tar_samples import Sample
from torchobj.datasets.failures import OnError
from torchobj.datasets.folders.folder import Arrangement, Folder
from torchobj.datasets.listing import ALLOWED
from torchobj.datasets.objects import ObjectDataset
from torchobj.datasets.samples import Sample_co, positions_of
from torchobj.exceptions import ObjectNotFoundError

__all__ = ["GroupDataset"]

logger = logging.getLogger("torchobj")

#: Maximum number of incomplete groups that a message names.
_SHOWN = 3


class GroupDataset(ObjectDataset[Sample_co]):
    """A map-style dataset whose samples are groups of objects: an image, its mask and its labels.

    The names of the objects of a group differ only in their ends. A sample is a dict of readers by field, and the
    common part of the names after the folder as `__key__`. Samples are in the order of these keys. The folder is listed
    once, at the first use; workers share the listing, and under torch.distributed rank 0 lists for all ranks. An object
    that has changed since is an error.

    Args:
        url: URL of the folder, of any scheme. Objects in its subfolders belong to it.
        fields: The end of the names of each field, such as `{"image": ".jpg", "mask": ".mask.png"}`. If several match
            a name, the longest does: `a.mask.png` is the mask of `a`, and no field `.png` of `a.mask`. Upper and lower
            case are different. Objects that match none are ignored.
        transform: Converts the dict to a sample. None: the sample is the dict.
        missing: Groups without an object for each field are an error (`raise`), or are left out (`drop`) and counted in
            a warning.
        allow_empty: Whether a folder without any object of these fields is a dataset without samples, and logged.
            False: it is an error.
        config: Settings of the store.
        on_error: Action for a sample that cannot be read or transformed: as for `ObjectDataset`.

    Attributes:
        failed_samples: Number of samples that failed, in this process and its DataLoader workers.

    Raises:
        ConfigError: An argument is invalid. No request is sent here.
        ObjectNotFoundError: At the first use: there are no groups, with the nearest keys; or incomplete ones, with
            their keys and fields.

    Example:
        >>> import torchobj
        >>> store = torchobj.Store("memory://masks")
        >>> for name in ("a.txt", "a.mask.json", "b/c.txt", "b/c.mask.json", "readme"):
        ...     _ = store.put(f"train/{name}", b"[1, 2]")
        >>> def decode(sample):
        ...     text, mask = torchobj.decode.text(sample["text"]), torchobj.decode.json(sample["mask"])
        ...     return sample["__key__"], text, mask
        >>> fields = {"text": ".txt", "mask": ".mask.json"}
        >>> dataset = torchobj.GroupDataset("memory://masks/train/", fields, transform=decode)
        >>> len(dataset), dataset[1]
        (2, ('b/c', '[1, 2]', [1, 2]))
    """

    _arrangement: Arrangement | None = None

    def __init__(
        self,
        url: str,
        fields: Mapping[str, str],
        transform: Callable[[dict[str, Any]], Sample_co] | None = None,
        *,
        missing: Literal["raise", "drop"] = "raise",
        allow_empty: bool = False,
        config: StoreConfig | None = None,
        on_error: OnError = "raise",
    ) -> None:
        is_suffixes = isinstance(fields, Mapping) and all(isinstance(end, str) and end for end in fields.values())
        check("fields", fields, 'suffixes by field, such as {"image": ".jpg"}', ok=bool(fields) and is_suffixes)
        check("fields", fields, "fields with different suffixes", ok=len({*fields.values()}) == len(fields))
        check("fields", fields, "without '__key__', which is the key of the group", ok="__key__" not in fields)
        check_callable("transform", transform)
        check("missing", missing, "'raise' or 'drop'", ok=missing in ("raise", "drop"))
        check("allow_empty", allow_empty, "True or False", ok=isinstance(allow_empty, bool))
        super().__init__(config=config, on_error=on_error)
        self._folder = Folder(url, config)
        self._listing = self._folder.listing
        self.fields, self.transform = dict(fields), transform
        self._is_dropping, self._allow_empty = missing == "drop", allow_empty

    def __repr__(self) -> str:
        described = f"{self._listing!r}, fields: {', '.join(self.fields)}"
        return f"<{type(self).__name__} {described}, on_error={self._torchobj.failures.on_error!r}>"

    def _found(self) -> Arrangement:
        """The objects, found at the first call. Every call ensures that the ranks of a job agree on the listing."""
        self._listing.objects()
        if self._arrangement is None:
            self._arrangement = self._arranged()
        return self._arrangement

    def _arranged(self) -> Arrangement:
        """The objects of one group after the other, in the order of their stems."""
        by_suffix = {suffix: position for position, suffix in enumerate(self.fields.values())}
        lengths = sorted({len(suffix) for suffix in by_suffix}, reverse=True)
        groups: dict[str, list[int]] = {}
        for index, name in self._folder.names():
            # The longest suffix first.
            for length in lengths:
                position, stem = by_suffix.get(name[-length:]), name[:-length]
                if position is not None and stem and not stem.endswith("/"):
                    groups.setdefault(stem, [-1] * len(by_suffix))[position] = index
                    break
        self._check(groups)
        stems = sorted(stem for stem, parts in groups.items() if min(parts) >= 0)
        return self._folder.in_order(array("q", (index for stem in stems for index in groups[stem])))

    def _check(self, groups: Mapping[str, Sequence[int]]) -> None:
        described = ", ".join(self.fields.values())
        if not groups:
            described = f"{self._folder.url}: no object has a name that ends with one of {described}"
            if not self._allow_empty:
                raise ObjectNotFoundError(f"{described}{self._listing.nearest()}; {ALLOWED}")
            logger.warning("%s", described)
        incomplete = [stem for stem, parts in groups.items() if min(parts) < 0]
        if not incomplete:
            return
        shown = "; ".join(self._described(stem, groups[stem]) for stem in sorted(incomplete)[:_SHOWN])
        more = f"; and {len(incomplete) - _SHOWN} more" if len(incomplete) > _SHOWN else ""
        if self._is_dropping and len(incomplete) < len(groups):
            logger.warning("%s: %d of %d groups are incomplete and were dropped: %s%s", self._folder.url,
                           len(incomplete), len(groups), shown, more)  # fmt: skip
            return
        advice = "check the suffixes" if self._is_dropping else "upload the objects, or pass missing='drop'"
        raise ObjectNotFoundError(
            f"{self._folder.url}: {len(incomplete)} of {len(groups)} groups are incomplete: {shown}{more}; {advice}"
        )

    def _described(self, stem: str, parts: Sequence[int]) -> str:
        absent = zip(self.fields.items(), parts, strict=True)
        return f"{stem!r} has no " + " and no ".join(f"{name} ({suffix})" for (name, suffix), at in absent if at < 0)

    def __len__(self) -> int:
        return len(self._found()) // len(self.fields)

    def key(self, index: int) -> str:
        """The key of a sample, its `__key__`.

        Args:
            index: Number of the sample. Negative ones count from the end.

        Raises:
            IndexError: There is no such sample.
        """
        first, suffix = positions_of([index], len(self))[0] * len(self.fields), next(iter(self.fields.values()))
        return self._found().key(first)[len(self._folder.url.key) :].removesuffix(suffix)

    @override
    def objects_at(self, index: int) -> Sequence[ObjectRef]:
        groups, count = self._found(), len(self.fields)
        return [groups.ref(position) for position in range(index * count, (index + 1) * count)]

    @override
    def build(self, index: int, readers: Sequence[ObjectReader]) -> Any:
        sample = Sample({"__key__": self.key(index), **dict(zip(self.fields, readers, strict=True))})
        return sample if self.transform is None else self.transform(sample)
