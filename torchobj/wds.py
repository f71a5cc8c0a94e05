"""Makes webdataset read and write `s3://` and `gs://` with torchobj: `register`. Needs the extra `webdataset`.

webdataset looks up openers by scheme in a table of the process. Forked workers inherit it. For workers that are started
by spawn or forkserver, the stages that open URLs carry the registration: they are pickled with it, and unpickling them
registers. The table of `copyreg` does this for pickle, multiprocessing and cloudpickle; pipelines stay as they are.

The writers of webdataset close their file after an exception too. For files of torchobj, the `__exit__` of these
writers discards it instead, and so does `close` after a `write` that raised, so that an incomplete shard does not
appear. `close` does not learn of an exception of its caller between two calls of `write`.
"""

import copyreg
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from torchobj.config import StoreConfig, store_config
from torchobj.config.checks import check
from torchobj.exceptions import ConfigError
from torchobj.store.file_objects import ObjectWriter, open_reader

try:
    from webdataset import ShardWriter, TarWriter, gopen_schemes
    from webdataset.cache import FileCache, StreamingOpen
    from webdataset.filters import FilterFunction
except ImportError as error:
    raise ImportError(f"torchobj.wds needs webdataset ({error}): pip install 'torchobj[webdataset]'") from error

__all__ = ["register"]

#: Schemes that can be registered, with the names that webdataset may see.
_NAMES = {"s3": ("s3",), "gs": ("gs", "gcs")}

#: Stages of pipelines that open URLs, or contain functions that do, as `tarfile_to_samples` of `DataPipeline`s.
_STAGES = (StreamingOpen, FileCache, FilterFunction)


class _Opener(NamedTuple):
    """Opens URLs, as a handler in `gopen_schemes`."""

    config: StoreConfig | None

    def __call__(self, url: str, mode: str = "rb", bufsize: int = 8192, **_: Any) -> Any:  # noqa: ARG002  webdataset's
        if mode == "rb":
            return open_reader(url, self.config)
        if mode == "wb":
            return _ShardFile(url, config=self.config)
        raise ConfigError(f"mode={mode!r}: must be rb or wb to open {url}")


class _ShardFile(ObjectWriter):
    """A shard that a writer of webdataset writes. Once discarded, it accepts what the writer still writes."""

    _is_discarded = False
    _has_failed_write = False
    _has_partial_sample = False

    def note_write(self, *, failed: bool, partial: bool) -> None:
        """Keeps whether the last sample failed, and whether some sample was written in part."""
        self._has_failed_write = failed
        self._has_partial_sample |= failed and partial

    def is_to_discard(self) -> bool:
        """Whether a close is one after a failed sample: its exception propagates, or its tar is incomplete."""
        # A caller who handles the exception of a sample that was not begun, and goes on, gets the other samples.
        return self._has_partial_sample or (self._has_failed_write and sys.exception() is not None)

    def discard(self) -> None:
        self._is_discarded = True
        self.abort()

    def write(self, data: Any, /) -> int:
        """Writes data; nothing if the shard is discarded."""
        return len(data) if self._is_discarded else super().write(data)


def register(config: StoreConfig | None = None, schemes: tuple[str, ...] = ("s3", "gs")) -> None:
    """Makes webdataset open `s3://`, `gs://` and `gcs://` with torchobj, in this process and in DataLoader workers.

    `wds.WebDataset("s3://bucket/train-{000000..000099}.tar")` then reads each shard by parallel requests ahead of its
    position, in at most 32 MiB per worker. Workers may be started by fork, spawn or forkserver. `wds.ShardWriter` and
    `wds.TarWriter` send shards while they are written; a shard appears when the writer is closed, and does not appear
    if the `with` block of the writer raises, or if it is closed after a `write` that raised, as by `try` and `finally`.
    After other exceptions only a `with` block of the writer discards: `contextlib.closing(writer)` and `finally` call
    `close`, which creates the shard with the samples until then. Another call replaces the configuration.

    Args:
        config: Settings of the store.
        schemes: `s3`, or `gs`, or both. webdataset reads `gs://` with gsutil otherwise; `gs` includes `gcs`.

    Raises:
        ConfigError: An argument is invalid.

    Example:
        ```python
        import torchobj.wds, webdataset

        torchobj.wds.register()
        dataset = webdataset.WebDataset("s3://bucket/train-{000000..000099}.tar", shardshuffle=100)
        loader = torch.utils.data.DataLoader(dataset.shuffle(1000).decode("torch"), num_workers=4)
        ```
    """
    ok = isinstance(schemes, tuple) and set(schemes) <= _NAMES.keys()
    check("schemes", schemes, "a tuple of s3 and gs", ok=ok)
    store_config(config)
    for scheme in schemes:
        for name in _NAMES[scheme]:
            gopen_schemes[name] = _Opener(config)
    for stage in _STAGES:
        copyreg.pickle(stage, _reduce_stage)
    for writer, name, original, replaced in _METHODS:
        if getattr(writer, name) is original:
            setattr(writer, name, replaced)


def _registered() -> dict[str, _Opener]:
    return {name: opener for name, opener in gopen_schemes.items() if isinstance(opener, _Opener)}


def _reduce_stage(stage: Any) -> tuple[Any, ...]:
    """Pickles a stage with the registration of this process."""
    _, (kind, *arguments), *state = stage.__reduce_ex__(2)
    return _stage, (_registered(), kind, *arguments), *state


def _stage(openers: dict[str, _Opener], kind: Any, *arguments: Any) -> Any:
    """Registers in a process that has not, and makes the stage without its state."""
    for scheme, opener in openers.items():
        if scheme in _NAMES and scheme not in _registered():
            register(opener.config, (scheme,))
    return kind.__new__(kind, *arguments)


def _file_of(writer: Any) -> _ShardFile | None:
    """The open shard of a writer; None if it is not a file of torchobj."""
    tar = writer.tarstream if isinstance(writer, ShardWriter) else writer
    file = getattr(tar, "own_fileobj", None)
    return file if isinstance(file, _ShardFile) else None


def _discard(writer: Any, file: _ShardFile) -> None:
    file.discard()
    # A callback for shards that are complete.
    writer.post = None


def _leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    """The `__exit__` of a writer that discards the open shard after an exception."""

    def leave(writer: Any, exc_type: Any = None, exc: Any = None, traceback: Any = None) -> Any:
        file = _file_of(writer)
        if exc_type is not None and file is not None:
            _discard(writer, file)
        return original(writer, exc_type, exc, traceback)

    return leave


def _closing(original: Callable[..., Any]) -> Callable[..., Any]:
    """The `close` of a writer, or its `finish`, that discards the open shard after a sample that failed."""

    def close(writer: Any) -> Any:
        file = _file_of(writer)
        is_handled = sys.exception() is None
        is_discarded = file is not None and file.is_to_discard() and not file.closed
        if file is not None and is_discarded:
            _discard(writer, file)
        result = original(writer)
        if file is not None and is_discarded and is_handled:
            raise ValueError(f"{file.url}: not created: a sample was written in part; write the shard again")
        return result

    return close


def _writing(original: Callable[..., Any]) -> Callable[..., Any]:
    """The `write` of a `TarWriter` that notes in its file whether it failed."""

    def write(writer: Any, sample: Any) -> Any:
        file, offset, is_written = _file_of(writer), writer.tarstream.offset, False
        try:
            result = original(writer, sample)
            is_written = True
        finally:
            if file is not None:
                file.note_write(failed=not is_written, partial=writer.tarstream.offset != offset)
        return result

    return write


#: Methods of writers, as webdataset has them and as `register` replaces them.
_METHODS: list[tuple[Any, str, Any, Any]] = [
    (writer, name, getattr(writer, name), replaced(getattr(writer, name)))
    for writer, name, replaced in (
        (TarWriter, "__exit__", _leaving),
        (TarWriter, "close", _closing),
        (TarWriter, "write", _writing),
        (ShardWriter, "__exit__", _leaving),
        (ShardWriter, "finish", _closing),
    )
]
