"""Lightning checkpoints in object storage: a plugin for the Trainer or Fabric of `lightning` or `pytorch_lightning`.

Imports one of the two packages when a plugin is created, unless one is imported already. Lightning also accesses paths
directly through fsspec: importing this module registers `torchobj.fsspec` for `s3://` and `gs://` there, unless another
filesystem is registered, with the configuration of the most recent plugin.
"""

import dataclasses
import importlib
import importlib.util
import logging
import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from torchobj.config import GCSOptions, StoreConfig, store_config
from torchobj.exceptions import CheckpointError, ConfigError
from torchobj.fsspec import register
from torchobj.store import ObjectInfo, Store
from torchobj.urls import SCHEMES, Url, parse_url

__all__ = ["ObjectCheckpointIO"]

logger = logging.getLogger("torchobj")

#: The module of the plugin base class in each package; pytorch_lightning depends on lightning_fabric.
_PACKAGES = {
    "lightning": "lightning.fabric.plugins.io.checkpoint_io",
    "lightning_fabric": "lightning_fabric.plugins.io.checkpoint_io",
}

#: Paths without a scheme that fsspec changes: it expands `~`, removes `file:` and splits at `::`.
_MISREAD = re.compile(r"^~|^[A-Za-z0-9+.-]+:|::")

if TYPE_CHECKING:
    from lightning.fabric.plugins.io import CheckpointIO as _Base
else:
    _Base = object


class ObjectCheckpointIO(_Base):
    """Saves and loads the checkpoints of a Trainer or Fabric as objects. Each appears whole or not at all.

    It is an instance of `CheckpointIO` of each package that is imported when it is created. Paths are URLs such as
    `s3://bucket/key` or `gs://bucket/key`; paths without a scheme are local files, handled by Lightning's
    `TorchCheckpointIO`.

    Lightning looks for `ckpt_path="last"` on the local disk: pass that of `newest`, or the callback `LastCheckpoint`.

    Args:
        config: Settings of the store.

    Example:
        ```python
        from torchobj.lightning import ObjectCheckpointIO

        plugin = ObjectCheckpointIO()
        trainer = Trainer(default_root_dir="s3://bucket/run", plugins=[plugin])
        trainer.fit(model, ckpt_path=plugin.newest("s3://bucket/run"))
        ```
    """

    #: Accepted URL schemes.
    _schemes: tuple[str, ...] = SCHEMES

    def __init__(
        self,
        *,
        config: StoreConfig | None = None,
    ) -> None:
        _join(import_one=True)
        self._config = store_config(config)
        is_configured = {
            "s3": dataclasses.replace(self._config, gcs=GCSOptions()) != StoreConfig(),
            "gs": self._config.gcs != GCSOptions(),
        }
        for scheme, needs_config in is_configured.items():
            is_served = register(config=config, replace=False, schemes=(scheme,))
            if needs_config and not is_served:
                logger.warning(
                    "Lightning also accesses %s:// paths through fsspec, where another filesystem than torchobj is "
                    "registered, which does not have this plugin's configuration; torchobj.fsspec.register(config=...) "
                    "replaces it",
                    scheme,
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(config=state["_config"])  # type: ignore[misc]  # registers the plugin and fsspec in the new process

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Saves a checkpoint. An existing one is replaced as a whole, or not at all.

        Raises:
            ConfigError: `path` does not name an object, or `storage_options` is not None.
            StoreError: The store refused a request, or failed after all retries.
        """
        if storage_options is not None:
            raise ConfigError(f"storage_options={storage_options!r}: must be None; settings are in the config")
        from torchobj.checkpoint.archive.save import save  # noqa: PLC0415  imports torch

        if self._is_local(path):
            _torch_checkpoint_io().save_checkpoint(checkpoint, path)
            return
        url = self._parsed(path)
        try:
            save(checkpoint, str(url), config=self._config)
        finally:
            _forget_listings(url)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any | None = None,
        weights_only: bool | None = None,  # noqa: FBT001  Lightning's signature
    ) -> dict[str, Any]:
        """Loads a checkpoint.

        Args:
            path: Its URL, or a local file.
            map_location: As for `torch.load`. None loads to the CPU, as Lightning's own plugin does.
            weights_only: As for `torch.load`. None is Lightning's default: True since its version 2.6.

        Raises:
            ObjectNotFoundError: The checkpoint does not exist.
            CheckpointError: The object is not a checkpoint, or contains something that `weights_only` refuses.
        """
        from torchobj.checkpoint.archive.load import load  # noqa: PLC0415  imports torch

        location = "cpu" if map_location is None else map_location
        checkpoint: dict[str, Any]
        if self._is_local(path):
            given = {} if weights_only is None else {"weights_only": weights_only}
            checkpoint = _torch_checkpoint_io().load_checkpoint(path, location, **given)
            return checkpoint
        if weights_only is None:
            weights_only = _is_weights_only_by_default()
        try:
            checkpoint = load(str(self._parsed(path)), location, weights_only, config=self._config)
        except CheckpointError as error:
            if weights_only and "weights_only" in str(error):
                raise CheckpointError(f"{error} (for a Trainer: fit(..., weights_only=False))") from error.__cause__
            raise
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Deletes a checkpoint. Does nothing if it does not exist.

        A URL names an object, or the folder of a distributed checkpoint: then the metadata and the files that it names
        are deleted, and nothing else below the folder.

        Raises:
            ConfigError: `path` is empty, a whole bucket, a local folder that contains the current directory or the home
                directory, or a path without a scheme that begins with `~` or `name:`, or contains `::`.
            CheckpointError: The metadata in the folder cannot be read; nothing was deleted.
        """
        if self._is_local(path):
            _check_removable(path)
            _torch_checkpoint_io().remove_checkpoint(path)
            return
        from torchobj.checkpoint.dcp.removal import remove  # noqa: PLC0415  imports torch

        url = self._parsed(path)
        try:
            remove(url, self._config)
        finally:
            _forget_listings(url)

    def teardown(self) -> None:
        """Does nothing: a checkpoint is complete when `save_checkpoint` returns."""

    def newest(self, url: str) -> str | None:
        """Returns the most recent checkpoint below a folder, for `ckpt_path=`, or None if no checkpoint exists.

        Args:
            url: The `default_root_dir`, or the `dirpath` of a ModelCheckpoint; a local folder if it has no scheme. Only
                names that end in `.ckpt` count.
        """
        is_local = self._is_local(url)
        # Keeps the slash of the root.
        parsed = self._parsed(f"file://{os.path.abspath(url)}" if is_local else url.rstrip("/"))  # noqa: PTH100  no links
        listed = Store(parsed.base, config=self._config).list(f"{parsed.key}/" if parsed.key else "")
        found = [info for info in listed if info.key.endswith(".ckpt")]
        if not found:
            return None

        def order(info: ObjectInfo) -> tuple[float, list[int], str]:
            # Listings have a resolution of seconds: within one, the numbers of epoch and step decide.
            time_s = -math.inf if info.last_modified is None else info.last_modified.timestamp()
            return time_s, [int(number) for number in re.findall(r"\d+", info.key)], info.key

        base = "" if is_local else parsed.base
        return f"{base}/{max(found, key=order).key}"

    def _is_local(self, path: Any) -> bool:
        """Returns whether a path is local, without a scheme.

        Raises:
            ConfigError: It is local, and this class accepts URLs only.
        """
        is_local = "://" not in _text(path)
        if is_local and "file" not in self._schemes:
            raise ConfigError(f"path={os.fspath(path)!r}: must be a URL, as s3://bucket/key")
        return is_local

    def _parsed(self, path: Any) -> Url:
        return parse_url(_text(path), self._schemes)


def _forget_listings(url: Url) -> None:
    """Removes an object or folder, and the folders above, from the listings that fsspec's file systems have cached.

    Lightning reads and looks for checkpoints through them; s3fs and gcsfs take a file that is in no cached listing as
    missing.
    """
    for name in {"s3": ("s3", "s3a"), "gs": ("gs", "gcs")}.get(url.scheme, ()):
        kind = fsspec.registry.get(name)
        for files in [] if kind is None else list(kind._cache.values()):
            files.invalidate_cache(str(url))


def _join(*, import_one: bool) -> None:
    """Registers the plugin as `CheckpointIO` of each imported package; if none is, imports an installed one."""
    imported = [module for module in _PACKAGES.values() if module in sys.modules]
    if not imported and import_one:
        installed = [module for name, module in _PACKAGES.items() if importlib.util.find_spec(name) is not None]
        if not installed:
            raise ConfigError("neither lightning nor pytorch_lightning is installed")
        imported = installed
    for module in imported:
        importlib.import_module(module).CheckpointIO.register(ObjectCheckpointIO)


def _text(path: Any) -> str:
    """Returns a path of Lightning as a str, with both slashes of a URL.

    Sharding strategies convert paths to `Path`, which merges slashes.
    """
    text: str = os.fspath(path)
    return re.sub(r"^file:/(?!/)", "file:///", re.sub(r"^(s3|gs|gcs|memory):/(?!/)", r"\1://", text))


def _check_removable(path: Any) -> None:
    """Checks that a local folder may be deleted as a checkpoint.

    Raises:
        ConfigError: It contains the current directory or the home directory, or is a path that fsspec changes.
    """
    text = os.fspath(path)
    if _MISREAD.search(text):
        raise ConfigError(
            f"path={text!r}: fsspec would expand or split it, and delete another path; nothing was deleted. Give an "
            "absolute path, or a URL such as file:///folder/name"
        )
    # The path that Lightning's plugin deletes.
    target = Path(LocalFileSystem._strip_protocol(text)).resolve()
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  does not raise without a home directory
    if not text or any(kept.resolve().is_relative_to(target) for kept in (Path.cwd(), home)):
        raise ConfigError(f"path={text!r}: is {target}, which contains more than a checkpoint; nothing was deleted")


def _torch_checkpoint_io() -> Any:
    """Returns Lightning's plugin for local files, from the imported package."""
    package = next(module for module in _PACKAGES.values() if module in sys.modules).rpartition(".")[0]
    return importlib.import_module(f"{package}.torch_io").TorchCheckpointIO()


def _is_weights_only_by_default() -> bool:
    """Returns the default of Lightning's own plugin: False before 2.6, later torch's default."""
    from torchobj.checkpoint.archive.load import is_switched_on  # noqa: PLC0415  imports torch

    version = next(sys.modules[name].__version__ for name in _PACKAGES if name in sys.modules)
    is_old = tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < (2, 6)
    # torch.load reads this variable only if `weights_only` is not passed.
    return not is_old and not is_switched_on("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")


_join(import_one=False)
register(replace=False)
