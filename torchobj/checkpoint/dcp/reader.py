"""The storage reader for `torch.distributed.checkpoint`. `load_items` reads the items."""

import os
import uuid
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from torchobj.checkpoint.dcp.checkpoint_storage import CheckpointStorage
from torchobj.checkpoint.dcp.load_items import ItemIndex, load_items
from torchobj.checkpoint.dcp.metadata import load_metadata
from torchobj.checkpoint.dcp.object_names import METADATA, ranked
from torchobj.config import S3ClientConfig, StoreConfig
from torchobj.exceptions import CheckpointError

__all__ = ["StorageReader"]


class StorageReader(CheckpointStorage, TorchStorageReader):
    """Loads distributed checkpoints from a store that torch 2.6 or later, s3torchconnector or torchobj wrote.

    Reads ranges of all files in parallel, directly into the memory of the tensors. Of a tensor with another sharding
    than when it was saved, it reads only the required ranges. It compares the checksums in the files of all tensors
    that are read whole. Unpickling the metadata executes no code from it. A reader can be pickled.

    Args:
        url: Folder of the checkpoint: `s3://bucket/step-100`, `gs://bucket/step-100`, `file:///folder` or `memory://name/folder`.
        verify: Compare checksums.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: Override those of the configuration.

    Raises:
        ConfigError: `url` is not a URL of a store.

    Example:
        ```python
        reader = torchobj.checkpoint.StorageReader("s3://bucket/step-100")
        torch.distributed.checkpoint.load(state_dict, storage_reader=reader)
        ```
    """

    def __init__(
        self,
        url: str,
        *,
        verify: bool = True,
        config: StoreConfig | S3ClientConfig | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
    ) -> None:
        super().__init__(url, config, region, endpoint_url)
        self._verify = verify
        self._load_id = str(uuid.uuid4())
        self._index: ItemIndex | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Starts a new load, from `checkpoint_id` if given.

        Raises:
            ConfigError: `checkpoint_id` is not a URL of a store.
        """
        super().reset(checkpoint_id)
        self._index = None
        self._load_id = str(uuid.uuid4())

    # torch passes keywords only to signatures with the name `kwargs`.
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Returns the metadata of the checkpoint, or with `rank` the metadata that this rank wrote.

        Raises:
            ObjectNotFoundError: The checkpoint does not exist.
            CheckpointError: The object is not metadata, or names a class that metadata does not need.
        """
        name = ranked(METADATA, kwargs.get("rank"))
        data = self._checkpoint.get(name)
        metadata = load_metadata(data, self._checkpoint.url_of(name))
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None  # noqa: S101  set above
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001, ARG002
        """Takes the metadata of the checkpoint.

        Raises:
            CheckpointError: The metadata has no table of items.
        """
        if not isinstance(metadata.storage_data, dict):
            raise CheckpointError(f"{self.checkpoint_id}: the metadata has no table of items (storage_data)")
        self._index = ItemIndex(metadata, self.checkpoint_id)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Loads the items of the rank into the destinations of the planner.

        Raises:
            IntegrityError: Bytes differ from what was written; the message names tensor and file.
            CheckpointError: The checkpoint does not have an item, or has an invalid one.
            ObjectChangedError: Another save replaced a file during the load.
            StoreError: A request failed.
        """
        if self._index is None:
            raise CheckpointError(f"{self.checkpoint_id}: set_up_storage_reader was not called")
        load_items(self._checkpoint, self._index, plan.items, planner, verify=self._verify)
        future: Future[None] = Future()
        future.set_result(None)
        return future
