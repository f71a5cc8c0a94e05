"""What `torch.distributed.checkpoint` loads through. Leaves the items to `reading`."""

import os
import uuid
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from torchobj.checkpoint.dcp.metadata import load_metadata
from torchobj.checkpoint.dcp.place import METADATA, Placed, ranked
from torchobj.checkpoint.dcp.reading import read_items
from torchobj.checkpoint.dcp.wanted import Directory
from torchobj.config import S3ClientConfig, StoreConfig
from torchobj.exceptions import CheckpointError

__all__ = ["StorageReader"]


class StorageReader(Placed, TorchStorageReader):
    """Loads distributed checkpoints from a store, whoever wrote them: torch 2.6 or later, s3torchconnector, torchobj.

    Ranges of all files are read in parallel, straight into the memory of the tensors; of a tensor that is divided
    otherwise than it was saved, only what is needed. Checksums, which stand in each file, are compared wherever a
    tensor is read whole. The metadata is read without running any code of it. Can be pickled, as URL and settings.

    Args:
        url: The checkpoint's folder: `s3://bucket/step-100`, `file:///folder` or `memory://name/folder`.
        verify: Whether checksums are compared.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: In place of the configuration's.

    Raises:
        ConfigError: No URL.

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
        self._directory: Directory | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, from another URL where one is given.

        Raises:
            ConfigError: It is no URL.
        """
        super().reset(checkpoint_id)
        self._directory = None
        self._load_id = str(uuid.uuid4())

    # torch looks for the name `kwargs` in these signatures.
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """The metadata of the checkpoint; with `rank` that of this rank's own.

        Raises:
            ObjectNotFoundError: There is no checkpoint.
            CheckpointError: It is no metadata, or names what does not belong there.
        """
        name = ranked(METADATA, kwargs.get("rank"))
        data = self._place.get(name)
        metadata = load_metadata(data, self._place.url_of(name))
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None  # noqa: S101  set above
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001, ARG002
        """Hears what the checkpoint has.

        Raises:
            CheckpointError: The metadata does not say where anything lies.
        """
        if not isinstance(metadata.storage_data, dict):
            raise CheckpointError(f"{self.checkpoint_id}: the metadata does not say where anything lies")
        self._directory = Directory(metadata, self.checkpoint_id)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the rank's items, and returns when they are where the planner says.

        Raises:
            IntegrityError: Bytes are not what was written; the message names tensor and file.
            CheckpointError: The checkpoint cannot hold what is asked for.
            ObjectChangedError: Another save has replaced a file meanwhile.
            StoreError: What could not be read.
        """
        if self._directory is None:
            raise CheckpointError(f"{self.checkpoint_id}: set_up_storage_reader was not called")
        read_items(self._place, self._directory, plan.items, planner, verify=self._verify)
        future: Future[None] = Future()
        future.set_result(None)
        return future
