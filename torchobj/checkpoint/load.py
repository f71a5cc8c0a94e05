"""`torchobj.load`: a checkpoint planned from its two ends, its tensors read in parallel straight into their memory.

Two requests fetch the ends: the pickle, which stands first, and the directory, which stands last. The pickle's outline
says which storages are wanted. Their bytes are read into their final memory and checked, and only then is the object
made: what unpickling computes of a tensor is right, and what it refuses was refused before anything large was read.
"""

import logging
import os
import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torchobj.checkpoint import filling, pickling, selection, staging
from torchobj.checkpoint.archive import Record
from torchobj.checkpoint.files import _store_of, open_reader
from torchobj.checkpoint.memory import memory_of
from torchobj.checkpoint.outline import Outline, StorageOutline, outline_of, uses_in
from torchobj.checkpoint.pickling import MapLocation, Restore
from torchobj.checkpoint.ranges import RangedObject
from torchobj.checkpoint.records import NotPlannableError, Records, Want, check
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.exceptions import CheckpointError, TorchobjError

__all__ = ["is_switched_on", "load"]

logger = logging.getLogger("torchobj")

#: As torch.load asks it, before every argument: a site's rule that no checkpoint runs code.
_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def is_switched_on(name: str) -> bool:
    """Whether a switch in the environment is on, by the words that torch takes for that."""
    return os.environ.get(name, "0").lower() in ("1", "y", "yes", "true")


def load(  # noqa: PLR0917  the arguments of torch.load, in their order
    url: str,
    map_location: MapLocation = None,
    weights_only: bool = True,  # noqa: FBT001, FBT002  as in torch.load
    keys: Sequence[str] | None = None,
    verify: bool = True,  # noqa: FBT001, FBT002
    into: Any = None,
    *,
    config: StoreConfig | S3ClientConfig | None = None,
    region: str | None = None,
    endpoint_url: str | None = None,
) -> Any:
    """Loads what `torch.save` or `torchobj.save` saved.

    Tensors are read in parallel ranges straight into their final memory: at most 1.05 of what is returned is used.
    What no range can serve, files of torch before 1.6 and TorchScript, is read by `torch.load`; the log says so.

    Args:
        url: `s3://bucket/key`, `file:///folder/file` or `memory://name/key`.
        map_location: As for `torch.load`. Tensors of a GPU come through 64 MiB of pinned memory; `"meta"` reads none.
        weights_only: As for `torch.load`: whether to refuse what could run code.
        keys: Only these entries, by the keys of mappings joined by ".": each names the entry of that path and those
            whose path begins with it and ".", as `model.layer1`. The others' tensors are not read.
        verify: Whether to compare the CRC-32 of each record with the file's. Files without them load.
        into: An object of the same structure: its tensors are filled in place and everything else is replaced.
            What does not fit is found before the first byte is overwritten; when reading fails later, tensors may hold
            bytes of both. A view of a part of what was saved is verified by way of memory for the whole.

    Returns:
        The object; with `keys`, the same mappings with these entries only; with `into`, `into`.

    Raises:
        ConfigError: No URL of an object; a key that names nothing; `into` does not fit.
        CheckpointError: It is no checkpoint, a damaged one, or one that `weights_only` refuses.
        IntegrityError: A tensor's bytes are not those that were saved; the message names it.
        StoreError: The store refused, or went on failing after the retries.

    Example:
        >>> import torch, torchobj
        >>> _ = torchobj.save({"a": torch.ones(2), "b": torch.zeros(2)}, "memory://example/loaded.pt")
        >>> load("memory://example/loaded.pt", keys=["a"])
        {'a': tensor([1., 1.])}
    """
    settings = store_config(config, region, endpoint_url)
    wanted = None if keys is None else selection.checked_keys(keys)
    parsed, store = _store_of(url, settings)
    weights_only = weights_only or is_switched_on(_FORCED)
    try:
        plan = _Plan(Records(RangedObject(store, parsed.key, str(parsed))), map_location, weights_only, verify)
        return plan.into(into, wanted) if into is not None else plan.load(wanted)
    except NotPlannableError as error:
        reason = error
    except CheckpointError as error:
        # What knows no URL says what is wrong; this says where.
        raise CheckpointError(f"{parsed}: {error}") from error.__cause__
    logger.info("%s: read by torch.load: %s", parsed, reason)
    whole = _stock(str(parsed), settings, map_location, weights_only=weights_only)
    if wanted is not None:
        whole = selection.kept(whole, selection.select(whole, wanted, str(parsed)))
    if into is None:
        return whole
    with torch.no_grad():
        for pair in filling.pairs_of(into, whole, str(parsed)):
            pair.target.copy_(pair.source)
    return filling.assigned(into, whole)


def _stock(url: str, settings: StoreConfig, map_location: MapLocation, *, weights_only: bool) -> Any:
    stock: Any = torch.load
    with open_reader(url, settings) as reader:
        try:
            return stock(reader, map_location, weights_only=weights_only)
        except TorchobjError:
            raise
        except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as error:
            # What torch raises of a file that is damaged, or that it refuses.
            raise CheckpointError(f"{url}: {error}") from error


class _Plan:
    """One load: what is where, what is read, and what is made of it."""

    def __init__(self, records: Records, map_location: MapLocation, weights_only: bool, verify: bool) -> None:  # noqa: FBT001
        self._records = records
        self._map_location = map_location
        self._weights_only, self._verify = weights_only, verify
        if torch._guards.detect_fake_mode(None) is not None:
            raise NotPlannableError("tensors are fake here")
        data = records.whole("data.pkl", verify=verify)
        self._data = data or b""
        byte_order = (records.whole("byteorder", verify=verify) or b"little").decode("ascii", "replace")
        if byte_order not in ("little", "big"):
            raise CheckpointError(f"its byte order is {byte_order!r}, neither little nor big")
        self._swapped = byte_order != sys.byteorder
        self._outline: Outline = outline_of(self._data)
        refused = pickling.refused_global(self._outline.globals) if weights_only else None
        if refused is not None:
            raise CheckpointError(
                f"it holds {refused}, which weights_only=True refuses: allow it by torch.serialization.safe_globals, "
                "or load with weights_only=False, which runs what the file names: only for a file that you trust"
            )
        for key, storage in self._outline.storages.items():
            record = records.by_name.get(f"data/{key}")
            if record is None:
                raise CheckpointError(f"{self._outline.names.get(key)}: it has no record data/{key}")
            if record.size != storage.nbytes or not self._outline.consistent:
                raise NotPlannableError(f"data/{key} has another size than its storage")

    def load(self, keys: Sequence[str] | None) -> Any:
        """The object, or the entries of `keys`."""
        tree = self._outline.tree
        if keys is None:
            return self._made(self._outline.storages.values())
        paths = selection.select(tree, keys, self._records.url)
        whole = self._made(self._needed([selection.value_at(tree, path) for path in paths]))
        return selection.kept(whole, paths)

    def into(self, into: Any, keys: Sequence[str] | None) -> Any:
        """`into`, filled."""
        origins: dict[int, tuple[str, torch.UntypedStorage]] = {}
        paths = None if keys is None else selection.select(self._outline.tree, keys, self._records.url)
        loaded = self._made(self._needed([]), origins)
        if paths is not None:
            loaded = selection.kept(loaded, paths)
        pairs = filling.pairs_of(into, loaded, self._records.url)
        with torch.no_grad():
            self._fill(pairs, origins)
        return filling.assigned(into, loaded)

    def _needed(self, parts: Sequence[Any]) -> list[StorageOutline]:
        """The storages of some parts of the object, and those that unpickling may look at wherever they are."""
        uses = [use for part in parts for use in uses_in(part)]
        uses += [use for use in uses_in(self._outline.tree) if not use.dense]
        return list({use.storage.key: use.storage for use in uses}.values())

    def _made(
        self, wanted: Iterable[StorageOutline], origins: dict[int, tuple[str, torch.UntypedStorage]] | None = None
    ) -> Any:
        """The object with these storages read and the others on meta.

        `origins` is given the storages on meta: key and storage, which it keeps, by their address.
        """
        restore = pickling.restored_by(self._map_location)
        read = self._read({storage.key: storage for storage in wanted}, restore)

        def storage_of(key: str, nbytes: int, location: str) -> torch.UntypedStorage:
            if key not in read:
                storage = staging.storage_of(nbytes, "meta")
                if origins is not None:
                    origins[storage._cdata] = (key, storage)
                return storage
            storage, placed = read.pop(key)
            return storage if placed else restore(storage, location)

        return pickling.unpickle(self._data, storage_of, self._map_location, weights_only=self._weights_only)

    def _read(
        self,
        wanted: Mapping[str, StorageOutline],
        restore: Restore,
    ) -> dict[str, tuple[torch.UntypedStorage, bool]]:
        """Storages with their bytes, by key, and whether each is already on the device where it belongs."""
        devices: dict[str, torch.device] = {}
        if self._map_location is None or isinstance(self._map_location, str | bytes | torch.device | dict):
            # Asks about each location before anything is read: an error of torch, as for a missing GPU, comes early.
            locations = {storage.location for storage in wanted.values()}
            devices = {location: restore(staging.storage_of(0), location).device for location in locations}
        near: dict[str, torch.UntypedStorage] = {}
        far: dict[str, torch.UntypedStorage] = {}
        for key, outline in wanted.items():
            device = devices.get(outline.location, torch.device("cpu"))
            if device.type == "meta":
                continue
            if staging.is_reachable(device) or self._swapped:
                near[key] = staging.storage_of(outline.nbytes)
            else:
                far[key] = staging.storage_of(outline.nbytes, device)
        wants = [Want(self._record(key), 0, memory_of(staging.bytes_of(storage))) for key, storage in near.items()]
        self._check(near, self._records.read(wants, checksum=self._verify))
        self._check(far, self._land([(key, 0, staging.bytes_of(storage)) for key, storage in far.items()]))
        if self._swapped:
            for key, storage in near.items():
                _swap(storage, wanted[key].dtype)
        return {key: (storage, False) for key, storage in near.items()} | {
            key: (storage, True) for key, storage in far.items()
        }

    def _record(self, key: str) -> Record:
        return self._records.by_name[f"data/{key}"]

    def _check(self, keys: Any, sums: Sequence[int]) -> None:
        """Compares what was read with the file's CRC-32, where they were asked for."""
        for key, value in zip(keys, sums, strict=False):
            record = self._record(key)
            check(self._records.url, f"{self._outline.names.get(key)} (data/{key})", record, value)
            if record.size and not record.crc32:
                logger.debug("%s: data/%s: not verified: the file has no CRC-32 of it", self._records.url, key)

    def _land(self, targets: Sequence[tuple[str, int, torch.Tensor]]) -> list[int]:
        """Reads bytes of storages, by key and first byte, into memory of devices; their CRC-32 if they are verified."""
        self._records.locate([self._record(key) for key, _, target in targets if len(target)])
        landings = [
            staging.Landing(self._records.offset_of(self._record(key)) + start, target)
            for key, start, target in targets
            if len(target)
        ]
        sums = iter(staging.fill(landings, self._records.read_at, checksum=self._verify))
        return [next(sums) if len(target) else 0 for _, _, target in targets] if self._verify else []

    def _fill(self, pairs: Sequence[filling.Pair], origins: Mapping[int, tuple[str, torch.UntypedStorage]]) -> None:
        """Reads what is on meta into the tensors that it belongs to, and copies what was read."""
        direct: dict[tuple[int, int], tuple[str, int, torch.Tensor]] = {}
        staged: list[tuple[str, int, torch.Tensor]] = []
        indirect: dict[str, list[filling.Pair]] = {}
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
            # Tied tensors are one; others that overlap are written one after the other.
            overlaps = memory[0] < last_end and direct.get(memory, ("", 0))[:2] != (key, start)
            if overlaps or not self._is_direct(pair, key):
                indirect.setdefault(key, []).append(pair)
            elif staging.is_reachable(pair.target.device):
                direct[memory] = (key, start, _raw(pair.target))
                last_end = max(last_end, sum(memory))
            else:
                staged.append((key, start, _raw(pair.target)))
        wants = [Want(self._record(key), start, memory_of(memory)) for key, start, memory in direct.values()]
        self._check([key for key, _, _ in direct.values()], self._records.read(wants, checksum=self._verify))
        self._check([key for key, _, _ in staged], self._land(staged))
        for key, several in indirect.items():
            self._fill_by_copy(key, several)

    def _is_direct(self, pair: filling.Pair, key: str) -> bool:
        """Whether the file's bytes are the target's, and can be verified if they are to be."""
        target, source = pair.target, pair.source
        plain = not target.is_conj() and not target.is_neg() and bool(_address(target))
        return (
            plain
            and target.is_contiguous()
            and source.is_contiguous()
            and not self._swapped
            and (not self._verify or target.nbytes == self._record(key).size)
        )

    def _fill_by_copy(self, key: str, pairs: Sequence[filling.Pair]) -> None:
        """Reads a whole storage, and copies from it."""
        storage = staging.storage_of(self._record(key).size)
        memory = memory_of(staging.bytes_of(storage))
        self._check([key], self._records.read([Want(self._record(key), 0, memory)], checksum=self._verify))
        if self._swapped:
            _swap(storage, self._outline.storages[key].dtype)
        for _, target, source in pairs:
            whole = torch.empty(0, dtype=source.dtype, device="cpu")
            target.copy_(whole.set_(storage, source.storage_offset(), source.shape, source.stride()))


def _swap(storage: Any, dtype: torch.dtype) -> None:
    storage.byteswap(dtype)


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; 0 if that is not the whole of it, as of sparse tensors and subclasses."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor.data_ptr() if plain else 0


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes: uint8 tensor of shape (nbytes,), sharing its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)
