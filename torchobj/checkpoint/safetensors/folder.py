"""A folder of shards with an index, as `huggingface_hub.save_torch_state_dict` writes it. Sends nothing."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from torchobj.checkpoint.archive.plan import Plan
from torchobj.checkpoint.safetensors import names
from torchobj.checkpoint.safetensors.save import checked, plan_of
from torchobj.config import StoreConfig
from torchobj.exceptions import ConfigError, PreconditionFailedError
from torchobj.store.file_objects import store_of

__all__ = ["clear", "index_of", "plans_of"]


def plans_of(
    tensors: Any, url: str, metadata: Mapping[str, str] | None, max_shard_bytes: int | None
) -> list[tuple[str, Plan]]:
    """Plans the objects of a file, or of a folder: their URLs and contents, in the order in which they are written.

    Raises:
        ConfigError: An argument is invalid.
        CheckpointError: Tensors share memory, or their memory was freed.
    """
    if max_shard_bytes is not None and (type(max_shard_bytes) is not int or max_shard_bytes < 1):
        raise ConfigError(f"max_shard_bytes={max_shard_bytes!r}: must be a number of bytes, or None for one file")
    tensors = checked(tensors)
    if not names.is_folder(url):
        if max_shard_bytes is not None:
            raise ConfigError(f"max_shard_bytes={max_shard_bytes}: {url} must be a folder: end with a slash")
        return [(url, plan_of(tensors, metadata))]
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) < 2:
        return [(url + names.WHOLE, plan_of(tensors, metadata))]
    by_name = {names.shard(number, len(shards)): shard for number, shard in enumerate(shards, 1)}
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    text = index_of({name: file for file, shard in by_name.items() for name in shard}, total_bytes)
    plans = [(url + file, plan_of(shard, metadata)) for file, shard in by_name.items()]
    return [*plans, (url + names.INDEX, Plan([(0, text)], [], [], len(text), []))]


def index_of(files: Mapping[str, str], total_bytes: int) -> bytes:
    """Returns the content of an index.

    Args:
        files: The name of the file of each tensor, by the name of the tensor.
        total_bytes: Size of all tensors.
    """
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": dict(files)}, indent=2).encode()


def _shards(tensors: Mapping[str, torch.Tensor], max_bytes: int | None) -> list[dict[str, torch.Tensor]]:
    """Divides tensors in their order into shards of at most `max_bytes`; a larger tensor is a shard by itself."""
    if max_bytes is None:
        return [dict(tensors)]
    large: list[dict[str, torch.Tensor]] = []
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if tensor.nbytes > max_bytes:
            # The shard before it goes on behind it.
            large.append({name: tensor})
            continue
        if size + tensor.nbytes > max_bytes:
            large.append(shard)
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    return [*large, shard] if shard else large


def clear(url: str, config: StoreConfig | None, *, overwrite: bool) -> None:
    """Deletes the weights that a folder has, so that no index names files of another save.

    Raises:
        PreconditionFailedError: There are some, and `overwrite` is false.
    """
    parsed, store = store_of(url, config)
    found = [
        key
        for entries, _ in store.list(parsed.key + "model", "/")
        for key, *_ in entries
        if names.is_of_model(key.removeprefix(parsed.key))
    ]
    if found and not overwrite:
        raise PreconditionFailedError(f"{parsed._replace(key=found[0])}: exists, and overwrite=False")
    # The index first: without it the folder has no weights.
    for keys in ([key for key in found if key.endswith(".json")], found):
        if keys:
            store.delete(keys)
