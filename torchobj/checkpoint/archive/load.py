"""`torchobj.load`: reads the tensors of a checkpoint in parallel, directly into their final memory.

Two requests fetch the pickle, which comes first in the file, and the directory, which comes last. The outline of the
pickle lists the storages. Their bytes are read into their final memory and verified before the object is unpickled, so
that code of the pickle sees complete tensors. What `weights_only` refuses is refused before any tensor is read.
"""

import functools
import logging
import operator
import os
import pickle
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torchobj.checkpoint.archive import device_memory, entries, pickling
from torchobj.checkpoint.archive.pickling import (
    MapLocation,
    Outline,
    StorageOutline,
    check_nesting,
    uses_in,
)
from torchobj.checkpoint.archive.records import NotPlannableError, RecordRange, Records
from torchobj.checkpoint.matching import Pair, assign, pairs_of
from torchobj.checkpoint.safetensors import load as safetensors
from torchobj.checkpoint.safetensors import names
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError, TorchobjError
from torchobj.ranks.shared_read.reads import Reads, ShareOption, read_alone, sharing
from torchobj.store.file_objects import open_reader, store_of
from torchobj.store.transfers import ByteProgress, ProgressOption
from torchobj.telemetry.ranges import profiled

__all__ = ["effective_weights_only", "is_switched_on", "load", "load_counted"]

logger = logging.getLogger("torchobj")

#: Switches of torch.load. The first overrides the argument: a site's rule that no checkpoint runs code. The second
#: changes its default.
_FORCED, _LIFTED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def is_switched_on(name: str) -> bool:
    """Returns whether an environment variable is set to a value that torch treats as true."""
    return os.environ.get(name, "0").lower() in ("1", "y", "yes", "true")


def effective_weights_only(weights_only: bool | None) -> bool:  # noqa: FBT001  as in torch.load
    """Returns the argument `weights_only` as the switches of `torch.load` change it.

    Args:
        weights_only: The argument; None if the caller did not pass it.

    Raises:
        ConfigError: Both switches are set.
    """
    is_forced, is_lifted = is_switched_on(_FORCED), is_switched_on(_LIFTED)
    if is_forced and is_lifted:
        raise ConfigError(f"{_FORCED} and {_LIFTED} are both set, and exclude each other: unset one of them")
    if is_lifted and weights_only is None:
        message = (
            f"{_LIFTED} is set, and `weights_only` was not passed: loading with weights_only=False, which runs code"
        )
        # At the line of the caller of `load`.
        warnings.warn(f"{message} that the file names", UserWarning, stacklevel=3)
        return False
    return is_forced or weights_only is None or bool(weights_only)


def load(  # noqa: PLR0917  the arguments of torch.load, in their order
    url: str,
    map_location: MapLocation = None,
    weights_only: bool | None = None,  # noqa: FBT001  as in torch.load
    keys: Sequence[str] | None = None,
    verify: bool = True,  # noqa: FBT001, FBT002
    into: Any = None,
    *,
    format: names.Format = None,  # noqa: A002  as in `save`
    progress: ProgressOption = None,
    config: StoreConfig | None = None,
    share: ShareOption = "auto",
    process_group: "torch.distributed.ProcessGroup | None" = None,
) -> Any:
    """Loads a file of `torch.save` or `torchobj.save`, or of safetensors.

    Tensors are read in parallel ranges directly into their final memory; the peak is at most 1.05 of the result. Files
    of torch before 1.6 and TorchScript archives are read by `torch.load`, which is logged.

    A URL that ends with `.safetensors` is that of a file of safetensors. One that ends with a slash is that of a folder
    with `model.safetensors.index.json`, whose files are loaded as one state, or with `model.safetensors`; the URL of
    the index can be passed too. Headers are checked before they are trusted.

    Args:
        url: `s3://bucket/key`, `gs://bucket/key`, `file:///folder/file` or `memory://name/key`.
        map_location: As for `torch.load`. Tensors of a GPU pass through 256 MiB of pinned memory; `"meta"` reads none.
        weights_only: As for `torch.load`: whether to refuse pickles that could run code. None: True, unless the
            environment variable `TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD` is set, which warns. With
            `TORCH_FORCE_WEIGHTS_ONLY_LOAD` it is always True.
        keys: Load only these entries, named by the keys of mappings joined by ".": each selects the entry with this
            name and those whose name starts with it and ".", such as `model.layer1`. Other tensors are not read.
        verify: Whether to compare the CRC-32 of each record with the file's. Files without CRC-32 load too, such as all
            files of safetensors.
        into: An object of the same structure: its tensors are filled in place, everything else is replaced.
            Differences are reported before the first byte is overwritten. If reading fails later, tensors may hold old
            and new bytes. A view of a part of a saved storage is verified in memory for the whole storage.
        format: `"safetensors"`, or None: by the suffix of the URL.
        progress: Receives a `torchobj.files.Progress` of the bytes of tensors about every 0.1 s and at the end, in this
            thread; True shows a bar on stderr. An exception that it raises ends the load, as an error of a read does.
        config: Settings of the store.
        share: Which ranks read the bytes once for all of them, through a ring of shared memory of up to 64 parts
            (`max_in_flight` times `part_bytes`), and at most a sixteenth of the memory. `"host"`: those of each
            machine. `"job"`: all; machines send parts to each other by gloo, unless reading is faster. Both are
            collective: all ranks load the same entries of the same version, and an error of one is raised on all.
            `"auto"`: several ranks of a machine that happen to load the same entries at the same time. It is not
            collective, and waits for no rank that has not begun. None: this rank reads for itself.
        process_group: The ranks of `"host"` and `"job"`. None: all. A rank that does not come fails the load of the
            others after the timeout of the group.

    Returns:
        The object; with `keys`, the same mappings with these entries only; with `into`, `into`. For safetensors an
        `OrderedDict` of tensors, whose attribute `metadata` is the dict of the file's, or of the index's, metadata.

    Raises:
        ConfigError: The URL does not name an object, a key selects nothing, `into` does not match, or both of these
            variables are set.
        CheckpointError: The file is not a checkpoint, is damaged, or is refused by `weights_only`; or an index names a
            file that does not exist, or other tensors than it has.
        IntegrityError: The bytes of a tensor differ from what was saved; the message names it.
        StoreError: The store refused a request, or failed after all retries.
        Exception: With `"host"` and `"job"`, that of another rank.

    Example:
        >>> import torch, torchobj
        >>> _ = torchobj.save({"a": torch.ones(2), "b": torch.zeros(2)}, "memory://example/loaded.pt")
        >>> load("memory://example/loaded.pt", keys=["a"])
        {'a': tensor([1., 1.])}
    """
    counted = ByteProgress(progress)
    with sharing(share, url, config, process_group) as reads:
        if names.is_safetensors(url, format) or names.is_index(url) or names.is_folder(url):
            # Such files contain no code that `weights_only` could refuse, and no checksums that `verify` could compare.
            with profiled("torchobj.load"):
                loaded = safetensors.load(
                    url, map_location, keys=keys, into=into, config=config, counted=counted, reads=reads
                )
        else:
            loaded = load_counted(
                url,
                map_location,
                weights_only=effective_weights_only(weights_only),
                keys=keys,
                verify=verify,
                into=into,
                config=config,
                counted=counted,
                reads=reads,
            )
        counted.finish()
    return loaded


@profiled("torchobj.load")
def load_counted(
    url: str,
    map_location: MapLocation = None,
    *,
    weights_only: bool,
    keys: Sequence[str] | None = None,
    verify: bool = True,
    into: Any = None,
    config: StoreConfig | None,
    counted: ByteProgress,
    reads: Reads = read_alone,
) -> Any:
    """`load` as a part of an operation, whose progress is `counted`. Arguments and errors are those of `load`.

    `weights_only` is what `effective_weights_only` returned.
    """
    wanted = None if keys is None else entries.checked_keys(keys)
    parsed, store = store_of(url, config)
    try:
        records = Records(store, parsed.key, str(parsed), reads)
        plan = _Plan(records, map_location, weights_only=weights_only, verify=verify, counted=counted)
        return plan.load(wanted) if into is None else plan.fill(into, wanted)
    except NotPlannableError as error:
        reason = error
    except CheckpointError as error:
        # The modules that parse the file do not know its URL.
        raise CheckpointError(f"{parsed}: {error}") from error.__cause__
    logger.info("%s: read by torch.load: %s", parsed, reason)
    loaded = _load_with_torch(str(parsed), config, map_location, weights_only=weights_only)
    if wanted is not None:
        loaded = entries.selected(loaded, entries.select(loaded, wanted, str(parsed)))
    if into is None:
        return loaded
    with torch.no_grad():
        for pair in pairs_of(into, loaded, str(parsed)):
            pair.target.copy_(pair.source)
    return assign(into, loaded)


def _load_with_torch(url: str, config: StoreConfig | None, map_location: MapLocation, *, weights_only: bool) -> Any:
    torch_load: Any = torch.load
    with open_reader(url, config) as reader:
        try:
            return torch_load(reader, map_location, weights_only=weights_only)
        except TorchobjError:
            raise
        except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as error:
            # Raised by torch for a file that is damaged, or that it refuses.
            raise CheckpointError(f"{url}: {pickling.message_of(error)}") from error


#: Storages on meta, by address: the key of each, and the storage, which keeps its address in use.
_Origins = dict[int, tuple[str, torch.UntypedStorage]]


class _Plan:
    """One load of a file: finds the storages, reads them, and creates the object or fills another one."""

    def __init__(
        self,
        records: Records,
        map_location: MapLocation,
        *,
        weights_only: bool,
        verify: bool,
        counted: ByteProgress,
    ) -> None:
        self._records, self._counted = records, counted
        self._map_location = map_location
        self._weights_only, self._verify = weights_only, verify
        if torch._guards.detect_fake_mode(None) is not None:
            raise NotPlannableError("a FakeTensorMode is active")
        self._data = records.get("data.pkl", verify=verify) or b""
        self._swapped = pickling.byte_order(records.get("byteorder", verify=verify)) != sys.byteorder
        check_nesting(self._data, "data.pkl")
        self._outline = Outline(self._data)
        refused = pickling.refused_global(self._outline.globals) if weights_only else None
        if refused is not None:
            raise CheckpointError(pickling.refusal(refused))
        for key, storage in self._outline.storages.items():
            record = records.by_name.get(f"data/{key}")
            if record is None:
                raise CheckpointError(f"{self._outline.names.get(key)}: it has no record data/{key}")
            if record.size != storage.nbytes or not self._outline.consistent:
                raise NotPlannableError(f"data/{key} differs in size from its storage")

    def load(self, keys: Sequence[str] | None) -> Any:
        """Returns the object, or the entries of `keys`."""
        if keys is None:
            return self._unpickled(self._outline.storages.values(), {})
        tree = self._outline.tree
        paths = entries.select(tree, keys, self._records.url)
        loaded = self._unpickled(self._needed([functools.reduce(operator.getitem, path, tree) for path in paths]), {})
        return entries.selected(loaded, paths)

    def fill(self, into: Any, keys: Sequence[str] | None) -> Any:
        """Fills `into`, and returns it."""
        paths = None if keys is None else entries.select(self._outline.tree, keys, self._records.url)
        origins: _Origins = {}
        loaded = self._unpickled(self._needed([]), origins)
        if paths is not None:
            loaded = entries.selected(loaded, paths)
        pairs = pairs_of(into, loaded, self._records.url)
        with torch.no_grad():
            self._fill(pairs, origins)
        return assign(into, loaded)

    def _needed(self, parts: Sequence[Any]) -> list[StorageOutline]:
        """Returns the storages of some parts of the object, and all those that unpickling may access."""
        uses = [use for part in parts for use in uses_in(part)]
        uses += [use for use in self._outline.uses if not use.dense]
        return list({use.storage.key: use.storage for use in uses}.values())

    def _unpickled(self, wanted: Iterable[StorageOutline], origins: _Origins) -> Any:
        """Returns the object with these storages read and the others on meta, which are added to `origins`."""
        restore, wanted = pickling.restored_by(self._map_location), list(wanted)
        devices: dict[str, torch.device] = {}
        if self._map_location is None or isinstance(self._map_location, str | bytes | torch.device | dict):
            # Before anything is read: torch raises an error here if a GPU is missing.
            locations = {storage.location for storage in wanted}
            devices = {location: restore(device_memory.storage_of(0), location).device for location in locations}
        read = self._read(wanted, devices)

        def storage_of(key: str, nbytes: int, location: str) -> torch.UntypedStorage:
            storage = read.pop(key, None)
            if storage is None:
                storage = device_memory.storage_of(nbytes, "meta")
                origins[storage._cdata] = (key, storage)
            # On a device: it was read to where it belongs.
            return restore(storage, location) if storage.device.type == "cpu" else storage

        return pickling.unpickle(self._data, storage_of, self._map_location, weights_only=self._weights_only)

    def _read(
        self, wanted: Sequence[StorageOutline], devices: Mapping[str, torch.device]
    ) -> dict[str, torch.UntypedStorage]:
        """Reads storages, by their locations to these devices, or else to the CPU. Omits those on meta."""
        storages: dict[str, torch.UntypedStorage] = {}
        for outline in wanted:
            device = devices.get(outline.location, torch.device("cpu"))
            if device.type != "meta":
                storages[outline.key] = device_memory.storage_of(outline.nbytes, "cpu" if self._swapped else device)
        ranges = [self._range(key, 0, device_memory.bytes_of(storage)) for key, storage in storages.items()]
        self._records.read(ranges, verify=self._verify, counted=self._counted)
        for key, storage in storages.items() if self._swapped else ():
            storage.byteswap(self._outline.storages[key].dtype)
        return storages

    def _range(self, key: str, start: int, target: torch.Tensor) -> RecordRange:
        label = f"{self._outline.names.get(key)} (data/{key})"
        record = self._records.by_name[f"data/{key}"]
        if start + len(target) > record.size:
            raise CheckpointError(f"{label}: it is larger than its record")
        return RecordRange(record, start, target, label)

    def _fill(self, pairs: Sequence[Pair], origins: _Origins) -> None:
        """Copies the tensors that were read, and reads the others into the tensors to fill."""
        for pair in pairs:
            if pair.source.device.type == "meta" and pair.source.untyped_storage()._cdata not in origins:
                raise ConfigError(f"{pair.path}: was saved on the meta device, without values")
        direct: dict[tuple[int, int], tuple[str, int, torch.Tensor]] = {}
        copied: dict[str, list[Pair]] = {}
        last_end = 0
        for pair in sorted(pairs, key=lambda pair: _address(pair.target)):
            torch.autograd.graph.increment_version(pair.target)
            if pair.source.device.type != "meta":
                pair.target.copy_(pair.source)
                continue
            if not pair.target.numel():
                continue
            key, _ = origins[pair.source.untyped_storage()._cdata]
            memory = (_address(pair.target), pair.target.nbytes)
            start = int(pair.source.storage_offset()) * pair.source.element_size()
            # Tied tensors are read once; others that overlap are written one after the other.
            overlaps = memory[0] < last_end and direct.get(memory, ("", 0))[:2] != (key, start)
            if overlaps or not self._is_direct(pair, key):
                copied.setdefault(key, []).append(pair)
            else:
                direct[memory] = (key, start, pair.target.detach().reshape(-1).view(torch.uint8))
                last_end = max(last_end, sum(memory))
        ranges = [self._range(*part) for part in direct.values()]
        self._records.read(ranges, verify=self._verify, counted=self._counted)
        for key, several in copied.items():
            self._fill_by_copy(key, several)

    def _is_direct(self, pair: Pair, key: str) -> bool:
        """Returns whether the bytes of the file can be read into the target, and verified there."""
        target, source = pair.target, pair.source
        plain = not target.is_conj() and not target.is_neg() and bool(_address(target))
        return (
            plain
            and target.is_contiguous()
            and source.is_contiguous()
            and not self._swapped
            and (not self._verify or target.nbytes == self._outline.storages[key].nbytes)
        )

    def _fill_by_copy(self, key: str, pairs: Sequence[Pair]) -> None:
        """Reads a whole storage, and copies from it."""
        storage = self._read([self._outline.storages[key]], {})[key]
        for _, target, source in pairs:
            whole = torch.empty(0, dtype=source.dtype, device="cpu")
            target.copy_(whole.set_(storage, source.storage_offset(), source.shape, source.stride()))


def _address(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's memory; 0 for sparse tensors and subclasses, which have more than that."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor.data_ptr() if plain else 0
