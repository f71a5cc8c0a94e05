"""Reads objects that a dataset names by `ObjectRef`, each with the configuration that applies to it."""

from collections.abc import Iterable, Sequence

from torchobj import _torchobj
from torchobj._torchobj import ObjectReader, ObjectRef
from torchobj.config import Prefix, StoreConfig, by_prefix
from torchobj.datasets import prefetch_source

__all__ = ["RefReader"]


class _ConfiguredReader:
    """Reads objects to which one prefix of the configuration file within a bucket applies, or none of these.

    Args:
        prefix: The prefix; None for all objects.
        configs: Configurations by scheme and bucket, the longest first; the last one, with "", is for all others.
    """

    def __init__(self, prefix: Prefix | None, configs: list[tuple[str, StoreConfig]]) -> None:
        self.prefix, self._configs = prefix, configs
        self._source: prefetch_source.Source[_torchobj.RefSource] = prefetch_source.Source()

    def source(self) -> "_torchobj.RefSource | None":
        """The objects as a source of the prefetcher; None if there is no prefetcher."""
        if not prefetch_source.SUPPORTED:
            return None
        native = _torchobj.RefSource
        return self._source.native(lambda budget: native(self._configs, budget), native.attach)

    def read(self, refs: list[ObjectRef]) -> list[ObjectReader | Exception]:
        """Readers of objects, read concurrently. Announced objects may be in memory already."""
        prefetched = self.source()
        if prefetched is not None and prefetched.announced():
            return prefetched.read(refs)
        return _torchobj.read_refs(self._configs, refs)


class RefReader:
    """Reads the objects of one dataset that are given by `ObjectRef`.

    Args:
        config: The argument of the dataset; prefixes of the configuration file apply within it.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        whole: list[tuple[str, StoreConfig]] = []
        #: One for each prefix within a bucket, the longest first; the last one is for all other objects.
        self._readers: list[_ConfiguredReader] = []
        for prefix, chosen in by_prefix(config):
            if prefix is not None and prefix.is_below_bucket:
                self._readers.append(_ConfiguredReader(prefix, [("", chosen)]))
            else:
                whole.append(("" if prefix is None else str(prefix), chosen))
        self._readers.append(_ConfiguredReader(None, whole))

    def start(self) -> None:
        """Creates the sources of the prefetcher, before workers are forked: they inherit them."""
        for reader in self._readers:
            reader.source()

    def read(self, refs: list[ObjectRef]) -> list[ObjectReader | Exception]:
        """Readers of objects, or exceptions. Objects with the same configuration are read concurrently."""
        found: dict[int, ObjectReader | Exception] = {}
        for reader, positions in self._divided(refs):
            found.update(zip(positions, reader.read([refs[position] for position in positions]), strict=True))
        return [found[position] for position in range(len(refs))]

    def objects(self, refs: list[ObjectRef]) -> list[tuple[int, int]]:
        """Pairs of source number and index, which a loader announces."""
        pairs: list[tuple[int, int]] = []
        for reader, positions in self._divided(refs):
            if (source := reader.source()) is not None:
                pairs += source.objects([refs[position] for position in positions])
        return pairs

    def _divided(self, refs: list[ObjectRef]) -> Iterable[tuple[_ConfiguredReader, Sequence[int]]]:
        """The reader of each object, with the positions of its objects in `refs`."""
        if len(self._readers) == 1:
            return [(self._readers[0], range(len(refs)))]
        positions: dict[_ConfiguredReader, list[int]] = {}
        for position, ref in enumerate(refs):
            url = Prefix.of(ref.url)
            reader = next(each for each in self._readers if each.prefix is None or each.prefix.matches(url))
            positions.setdefault(reader, []).append(position)
        return positions.items()

    def iteration(self) -> "RefIterations | None":
        """Reads objects and announces later ones; None if there is no prefetcher."""
        iterations = []
        for reader in self._readers:
            if (source := reader.source()) is None:
                return None
            iterations.append((reader, _torchobj.RefIteration(source)))
        return RefIterations(self, dict(iterations))


class RefIterations:
    """One pass over objects, which announces those that it reads later. Dropping it cancels its announcements.

    Args:
        reader: The reader of the dataset.
        iterations: An iteration for each configuration.
    """

    def __init__(self, reader: RefReader, iterations: "dict[_ConfiguredReader, _torchobj.RefIteration]") -> None:
        self._reader, self._iterations = reader, iterations

    def budget(self) -> int:
        """The memory budget of the prefetcher in bytes."""
        return next(iter(self._iterations.values())).budget()

    def read(self, refs: list[ObjectRef], ahead: list[ObjectRef]) -> list[ObjectReader | Exception]:
        """Announces `ahead`, and returns readers of `refs`, or exceptions in their place."""
        if len(self._iterations) == 1:
            return next(iter(self._iterations.values())).read(refs, ahead)
        for reader, positions in self._reader._divided(ahead):
            self._iterations[reader].read([], [ahead[position] for position in positions])
        return self._reader.read(refs)
