"""Checkpoints of Lightning in object storage: the plugin for a Trainer or Fabric of `lightning` or `pytorch_lightning`.

Imports neither of the two before a plugin is made, and then only where none has been imported. Lightning itself looks
at paths through fsspec, past the plugin: where nothing else serves `s3://` there, `torchobj.fsspec` does once this is
imported, with the configuration of the plugin that was made last.
"""

import importlib
import importlib.util
import logging
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.exceptions import CheckpointError, ConfigError
from torchobj.fsspec import register
from torchobj.store import Store
from torchobj.urls import SCHEMES, Url, parse_url

__all__ = ["ObjectCheckpointIO", "S3LightningCheckpoint"]

logger = logging.getLogger("torchobj")

#: Where each package keeps the class that its Trainer asks for; lightning_fabric is what pytorch_lightning stands on.
_PACKAGES = {
    "lightning": "lightning.fabric.plugins.io.checkpoint_io",
    "lightning_fabric": "lightning_fabric.plugins.io.checkpoint_io",
}

#: Paths without a scheme that fsspec does not take as they are: it expands `~`, removes `file:` and splits at `::`.
_MISREAD = re.compile(r"^~|^[A-Za-z0-9+.-]+:|::")

if TYPE_CHECKING:
    from lightning.fabric.plugins.io import CheckpointIO as _Base
else:
    _Base = object


class ObjectCheckpointIO(_Base):
    """Writes and reads the checkpoints of a Trainer, or of Fabric, as objects. Each appears whole or not at all.

    `isinstance` takes it for a `CheckpointIO` of each package that is imported when it is made. Paths are URLs, as
    `s3://bucket/key`; those without a scheme are files of this machine, left to Lightning's `TorchCheckpointIO`.

    `ckpt_path="last"` finds nothing at a URL: Lightning asks the local disk for what it finds there. `newest` is for
    that.

    Args:
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: In place of the configuration's.

    Example:
        ```python
        from torchobj.lightning import ObjectCheckpointIO

        plugin = ObjectCheckpointIO()
        trainer = Trainer(default_root_dir="s3://bucket/run", plugins=[plugin])
        trainer.fit(model, ckpt_path=plugin.newest("s3://bucket/run"))
        ```
    """

    #: The schemes of URLs that it takes.
    _schemes: tuple[str, ...] = SCHEMES

    def __init__(
        self,
        *,
        config: StoreConfig | S3ClientConfig | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
    ) -> None:
        _join(import_one=True)
        self._config = store_config(config, region, endpoint_url)
        is_served = register(config=config, region=region, endpoint_url=endpoint_url, replace=False)
        if not is_served and self._config != StoreConfig():
            logger.warning(
                "Lightning looks at s3:// paths through what fsspec has for them, which is not torchobj and does not "
                "know this plugin's configuration; torchobj.fsspec.register(config=...) puts torchobj there"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(config=state["_config"])  # type: ignore[misc]  # in a process of its own, nothing is set up yet

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes a checkpoint. What was there before is replaced by the whole of it, or stays.

        Raises:
            ConfigError: `path` names no object, or there are `storage_options`: it has none.
            StoreError: What persists after the retries.
        """
        if storage_options is not None:
            raise ConfigError(f"storage_options={storage_options!r}: must be None; settings are in the config")
        from torchobj.checkpoint.save import save  # noqa: PLC0415  imports torch

        if self._is_local(path):
            _lightnings_own().save_checkpoint(checkpoint, path)
        else:
            save(checkpoint, str(self._url(path)), config=self._config)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any | None = None,
        weights_only: bool | None = None,  # noqa: FBT001  Lightning's signature
    ) -> dict[str, Any]:
        """Reads a checkpoint.

        Args:
            path: Its URL, or a file here.
            map_location: As for `torch.load`. None: into the memory of the CPU, as Lightning's own plugin does.
            weights_only: As for `torch.load`. None: as Lightning without a plugin; True from its version 2.6 on.

        Raises:
            ObjectNotFoundError: There is none.
            CheckpointError: What is there is no checkpoint, or holds what `weights_only` forbids.
        """
        from torchobj.checkpoint.load import load  # noqa: PLC0415  imports torch

        location = "cpu" if map_location is None else map_location
        checkpoint: dict[str, Any]
        if self._is_local(path):
            given = {} if weights_only is None else {"weights_only": weights_only}
            checkpoint = _lightnings_own().load_checkpoint(path, location, **given)
            return checkpoint
        if weights_only is None:
            weights_only = _is_weights_only_by_default()
        try:
            checkpoint = load(str(self._url(path)), location, weights_only, config=self._config)
        except CheckpointError as error:
            if weights_only and "weights_only" in str(error):
                raise CheckpointError(f"{error} (for a Trainer: fit(..., weights_only=False))") from error.__cause__
            raise
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Deletes a checkpoint. One that does not exist is no error.

        At a URL it is an object, or the folder of a distributed checkpoint, of which its metadata and the files that
        this names are deleted. Nothing else that lies below the folder is.

        Raises:
            ConfigError: `path` is empty, a whole bucket, a folder here that contains the current directory or the home
                directory, or a path without a scheme that begins with `~` or `name:`, or contains `::`.
            CheckpointError: The metadata in the folder cannot be read; nothing was deleted.
        """
        if self._is_local(path):
            _check_removable(path)
            _lightnings_own().remove_checkpoint(path)
            return
        from torchobj.checkpoint.removal import remove  # noqa: PLC0415  imports torch

        remove(self._parsed(path), self._config)

    def teardown(self) -> None:
        """Does nothing: a checkpoint is complete when `save_checkpoint` returns."""

    def newest(self, url: str) -> str | None:
        """The checkpoint below a folder that was written last, for `ckpt_path=`; None where there is none.

        Args:
            url: As `default_root_dir` or the `dirpath` of a ModelCheckpoint; without a scheme a folder here. Only names
                that end in `.ckpt` count.
        """
        is_local = self._is_local(url)
        # The slash of the root stays.
        parsed = self._parsed(f"file://{os.path.abspath(url)}" if is_local else url.rstrip("/"))  # noqa: PTH100  no links
        found = [
            (info.last_modified, [int(number) for number in re.findall(r"\d+", info.key)], info.key)
            for info in Store(parsed.base, config=self._config).list(f"{parsed.key}/" if parsed.key else "")
            if info.key.endswith(".ckpt")
        ]
        # A listing knows seconds: within one, the numbers of epoch and step decide.
        if not found:
            return None
        base = "" if is_local else parsed.base
        return f"{base}/{max(found)[-1]}"

    def _is_local(self, path: Any) -> bool:
        """Whether a path of Lightning is one of this machine, without a scheme.

        Raises:
            ConfigError: It is, and this class takes none.
        """
        is_local = "://" not in _text(path)
        if is_local and "file" not in self._schemes:
            raise ConfigError(f"path={os.fspath(path)!r}: must be a URL, as s3://bucket/key")
        return is_local

    def _parsed(self, path: Any) -> Url:
        return parse_url(_text(path), self._schemes)

    def _url(self, path: Any) -> Url:
        """A path of Lightning as the URL of an object."""
        url = self._parsed(path)
        if not url.key.strip("/"):
            raise ConfigError(f"path={os.fspath(path)!r}: names no object, expected {url.base}/key")
        return url


class S3LightningCheckpoint(ObjectCheckpointIO):
    """The plugin of s3torchconnector by its name and arguments. Takes `s3://` URLs only, as that does.

    Args:
        region: Region of the bucket; found out when None.
        s3client_config: An `S3ClientConfig`, or a `StoreConfig`.
        endpoint: Where the store is; AWS, or the environment's, when None.
    """

    _schemes = ("s3",)

    def __init__(
        self,
        region: str | None = None,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        endpoint: str | None = None,
    ) -> None:
        super().__init__(config=s3client_config, region=region, endpoint_url=endpoint)
        self.region = region

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["region"], state["_config"])  # type: ignore[misc]  # as above

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:  # noqa: ARG002
        """As of `ObjectCheckpointIO`, but `storage_options` are taken and mean nothing, as with s3torchconnector."""
        super().save_checkpoint(checkpoint, path)


def _join(*, import_one: bool) -> None:
    """Makes the plugin a `CheckpointIO` of each package that is imported; of one that is installed, where none is."""
    imported = [module for module in _PACKAGES.values() if module in sys.modules]
    if not imported and import_one:
        installed = [module for name, module in _PACKAGES.items() if importlib.util.find_spec(name) is not None]
        if not installed:
            raise ConfigError("neither lightning nor pytorch_lightning is installed")
        imported = installed
    for module in imported:
        importlib.import_module(module).CheckpointIO.register(ObjectCheckpointIO)


def _text(path: Any) -> str:
    """A path of Lightning as a str, with all slashes of a URL.

    Strategies that shard make a Path of whatever they get, and a Path folds slashes.
    """
    text: str = os.fspath(path)
    return re.sub(r"^file:/(?!/)", "file:///", re.sub(r"^(s3|memory):/(?!/)", r"\1://", text))


def _check_removable(path: Any) -> None:
    """Refuses a folder of this machine that can be no checkpoint.

    Raises:
        ConfigError: It contains the current directory or the home directory, or is a path that fsspec changes.
    """
    text = os.fspath(path)
    if _MISREAD.search(text):
        raise ConfigError(
            f"path={text!r}: fsspec would expand or split it, and delete another path; nothing was deleted. Give an "
            "absolute path, or a URL such as file:///folder/name"
        )
    # What Lightning's plugin deletes.
    target = Path(LocalFileSystem._strip_protocol(text)).resolve()
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  raises nothing without a home
    if not text or any(kept.resolve().is_relative_to(target) for kept in (Path.cwd(), home)):
        raise ConfigError(f"path={text!r}: is {target}, which holds more than a checkpoint; nothing was deleted")


def _lightnings_own() -> Any:
    """Lightning's plugin for the files of this machine, of the package that is imported."""
    package = next(module for module in _PACKAGES.values() if module in sys.modules).rpartition(".")[0]
    return importlib.import_module(f"{package}.torch_io").TorchCheckpointIO()


def _is_weights_only_by_default() -> bool:
    """The default of Lightning's own plugin: False before 2.6, later as torch does by itself."""
    from torchobj.checkpoint.load import is_switched_on  # noqa: PLC0415  imports torch

    version = next(sys.modules[name].__version__ for name in _PACKAGES if name in sys.modules)
    is_old = tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < (2, 6)
    # The switch of torch.load, by its values; it only counts where `weights_only` is not given.
    return not is_old and not is_switched_on("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")


_join(import_one=False)
register(replace=False)
