"""The tensors of files of safetensors, or of folders of them, by name: which object has each of them. Reads headers."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torchobj import _torchobj
from torchobj.checkpoint.archive import entries
from torchobj.checkpoint.safetensors import names
from torchobj.checkpoint.safetensors.file import SafetensorsFile, StartedObject
from torchobj.checkpoint.safetensors.header import StoredTensor
from torchobj.checkpoint.safetensors.json_text import JsonText
from torchobj.config import StoreConfig
from torchobj.exceptions import BucketNotFoundError, CheckpointError, ObjectNotFoundError
from torchobj.store.concurrency import concurrently
from torchobj.store.file_objects import store_of
from torchobj.urls import Url

__all__ = ["Weights", "open_weights"]

_Item = TypeVar("_Item", bound=Hashable)
_Result = TypeVar("_Result")

#: Maximum size of an index; that of 100,000 tensors has 9 MB.
_INDEX_BYTES = 64 << 20


class Weights(NamedTuple):
    """What is selected of files or folders."""

    tensors: dict[str, tuple[SafetensorsFile, StoredTensor]]
    metadata: dict[str, Any]
    """That of the first file, or of the index of the first folder."""


class _Place(NamedTuple):
    """A file that has not been read."""

    store: "_torchobj.NativeStore"
    url: Url

    def open(self) -> SafetensorsFile:
        try:
            return SafetensorsFile(self.store, self.url.key, str(self.url))
        except BucketNotFoundError:
            raise
        except ObjectNotFoundError as error:
            raise CheckpointError(f"{self.url}: does not exist, but the index names it") from error


class _Contents(NamedTuple):
    """The tensors of a URL: the file of each."""

    files: Mapping[str, SafetensorsFile | _Place]
    metadata: dict[str, Any]


def open_weights(urls: Sequence[str], keys: Sequence[str] | None, config: StoreConfig | None) -> Weights:
    """Finds the tensors of files and folders. Reads the headers of files with tensors that are selected.

    Args:
        urls: Files, indexes, and folders.
        keys: Selects tensors, as `torchobj.load`; None: all.
        config: Settings of the store.

    Raises:
        ConfigError: A URL names no object, or a key selects nothing.
        CheckpointError: A header or an index is damaged, they contradict each other, or two files have a tensor.
        StoreError: An object cannot be read.
    """
    contents = _each(lambda url: _contents(url, config), urls)
    files: dict[str, SafetensorsFile | _Place] = {}
    for url in urls:
        for name, file in contents[url].files.items():
            if name in files:
                raise CheckpointError(f"{file.url}: {name}: is also in {files[name].url}")
            files[name] = file
    selected = list(files) if keys is None else [path[0] for path in entries.select(files, keys, ", ".join(urls[:3]))]
    opened = _each(_Place.open, {file for name in selected if isinstance(file := files[name], _Place)})
    tensors = {}
    for name in selected:
        listed = files[name]
        file = opened[listed] if isinstance(listed, _Place) else listed
        if name not in file.tensors:
            raise CheckpointError(f"{file.url}: has no tensor {name!r}, which the index expects in it")
        tensors[name] = file, file.tensors[name]
    for place, file in opened.items():
        for name in file.tensors:
            if files.get(name) != place:
                expected = f"in {files[name].url}" if name in files else "in no file"
                raise CheckpointError(f"{file.url}: has the tensor {name!r}, which the index expects {expected}")
    return Weights(tensors, contents[urls[0]].metadata if urls else {})


def _contents(url: str, config: StoreConfig | None) -> _Contents:
    parsed, store = store_of(url, config)
    if names.is_index(url):
        return _indexed(store, parsed)
    if not names.is_folder(url):
        return _single(store, parsed)
    try:
        return _indexed(store, parsed._replace(key=parsed.key + names.INDEX))
    except BucketNotFoundError:
        raise
    except ObjectNotFoundError:
        pass
    try:
        return _single(store, parsed._replace(key=parsed.key + names.WHOLE))
    except ObjectNotFoundError as error:
        raise CheckpointError(
            f"{parsed}: has neither {names.INDEX} nor {names.WHOLE}; StorageReader reads shards, which "
            "StorageWriter(consolidate=True) joins"
        ) from error


def _single(store: "_torchobj.NativeStore", url: Url) -> _Contents:
    file = SafetensorsFile(store, url.key, str(url))
    return _Contents(dict.fromkeys(file.tensors, file), file.metadata)


def _indexed(store: "_torchobj.NativeStore", url: Url) -> _Contents:
    index = StartedObject(store, url.key, str(url))
    try:
        weight_map, metadata = _parsed(index)
    except CheckpointError as error:
        raise CheckpointError(f"{url}: the index is damaged: {error}") from None
    folder = url.key[: url.key.rfind("/") + 1]
    places = {file: _Place(store, url._replace(key=folder + file)) for file in set(weight_map.values())}
    return _Contents({name: places[file] for name, file in weight_map.items()}, metadata)


def _parsed(index: StartedObject) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the file of each tensor, and the metadata of an index."""
    if index.size > _INDEX_BYTES:
        raise CheckpointError(f"it has {index.size:,} bytes; the limit is {_INDEX_BYTES:,}")
    text = JsonText(index.start(index.size))
    found = dict(text.members(lambda name: text.strings() if name == "weight_map" else text.value()))
    text.end()
    if "weight_map" not in found:
        raise CheckpointError("it has no weight_map")
    for file in set(found["weight_map"].values()):
        names.check_shard(file)
    metadata = found.get("metadata")
    return found["weight_map"], metadata if isinstance(metadata, dict) else {}


def _each(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> dict[_Item, _Result]:
    """Returns the results of concurrent calls. Raises the first error."""
    results: dict[_Item, _Result] = {}
    for item, outcome in concurrently(function, items):
        if isinstance(outcome, Exception):
            raise outcome
        results[item] = outcome
    return results
