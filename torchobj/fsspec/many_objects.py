"""Contents of many objects in one call: `cat`, `cat_ranges`, `pipe`. fsspec's defaults read and write in a loop."""

from collections.abc import Mapping, Sequence
from typing import Any

import fsspec as package  # type: ignore[import-untyped]

from torchobj._torchobj import ObjectRef
from torchobj.exceptions import ConfigError, ObjectNotFoundError, RangeError
from torchobj.fsspec.expansion import expanded
from torchobj.fsspec.s3fs_options import check_current, written_attributes
from torchobj.store import reads
from torchobj.store.concurrency import concurrently

__all__ = ["ManyObjects"]


class ManyObjects(package.AbstractFileSystem):  # type: ignore[misc]
    """Reads and writes the contents of objects, for a file system that has `_locate` and `_config`."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Bytes `start:end` of an object, with the semantics of slices."""
        check_current(kwargs)
        content: bytes = self.cat_ranges([path], start, end, on_error="raise")[0]
        return content

    def cat_ranges(
        self,
        paths: Sequence[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Reads ranges of objects concurrently, in one call without the GIL.

        Args:
            paths: The object of each range.
            starts, ends: First byte and end of each range, with the semantics of slices; or one value for all. A
                negative value, other than a start without an end, takes a HEAD request for each object.
            max_gap: Must be None.
            on_error: `return` puts exceptions in place of ranges that cannot be read; `raise` raises the first one.

        Returns:
            The bytes of each range, in order.

        Raises:
            ConfigError: The numbers of paths, starts and ends differ.
        """
        check_current(kwargs)
        if max_gap is not None:
            raise NotImplementedError(f"max_gap={max_gap!r}: must be None")
        if on_error not in ("raise", "return"):
            raise ConfigError(f"on_error={on_error!r}: must be raise or return")
        starts = _one_each("starts", starts, len(paths))
        ends = _one_each("ends", ends, len(paths))
        results: list[Any] = [b""] * len(paths)
        sizes = self._sizes_for(zip(paths, starts, ends, strict=True))
        refs, numbers = [], []
        for number, (path, start, end) in enumerate(zip(paths, starts, ends, strict=True)):
            size = sizes.get(path, 0)
            if isinstance(size, Exception):
                results[number] = size
                continue
            if path in sizes:
                start, end, _step = slice(start, end).indices(size)  # noqa: PLW2901  counted from the start now
            if end is None or end > (start or 0):
                refs.append(self._ref(path, start, end))
                numbers.append(number)
        for number, result in zip(numbers, self._read(refs, stops=on_error == "raise"), strict=True):
            results[number] = result
        if on_error == "raise":
            _raise_first(results)
        return results

    def _sizes_for(self, ranges: Any) -> dict[str, int | Exception]:
        """Sizes of the objects whose ranges are counted from the end."""
        counted = {
            path for path, start, end in ranges if (start is not None and start < 0) or (end is not None and end < 0)
        }
        return {
            path: info if isinstance(info, Exception) else info.size or 0
            for path, info in concurrently(self._head, counted)
        }

    def _head(self, path: str) -> Any:
        store, key = self._locate(path)
        return store.head(key)

    def _ref(self, path: str, start: int | None = None, end: int | None = None) -> ObjectRef:
        store, key = self._locate(path)
        if not key:
            raise ObjectNotFoundError(f"{self.unstrip_protocol(path)}: is a bucket, not an object")
        return ObjectRef(f"{store.url}/{key}", start, end)

    def _read(self, refs: list[ObjectRef], *, stops: bool) -> list[Any]:
        """The bytes of each reference, or its error. A range after the end of its object is empty, as of a slice.

        stops: Whether to raise the first error, unless it is of such a range.
        """
        read: list[Any]
        try:
            read = [*reads.get_many(refs, config=self._config, return_errors=not stops)]
        except RangeError:
            read = [*reads.get_many(refs, config=self._config, return_errors=True)]
        for number, result in enumerate(read):
            # Each buffer is freed when its bytes are copied.
            if isinstance(result, RangeError):
                read[number] = b""
            elif not isinstance(result, Exception):
                read[number] = bytes(result)
            del result
        return read

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        """Reads objects concurrently, in one call without the GIL.

        Args:
            path: An object or glob, or a list of them; folders that a glob selects are left out.
            recursive: Whether paths can be folders, whose objects are read.
            on_error: `raise` raises the first error, `omit` leaves out objects that cannot be read, and `return` puts
                exceptions in their place.
            kwargs: `start` and `end` of the range to read from each.

        Returns:
            The bytes of a single object; otherwise a dict of paths and bytes.
        """
        if on_error not in ("raise", "omit", "return"):
            raise ConfigError(f"on_error={on_error!r}: must be raise, omit or return")
        check_current(kwargs)
        start, end = kwargs.pop("start", None), kwargs.pop("end", None)
        kinds = expanded(self, path, recursive=recursive)
        names = [name for name, kind in kinds.items() if kind != "directory"]
        is_one = isinstance(path, str) and names == [self._strip_protocol(path)]
        contents = self.cat_ranges(names, start, end, on_error="raise" if on_error == "raise" else "return")
        if is_one:
            if isinstance(contents[0], Exception) and on_error == "return":
                raise contents[0]
            return contents[0]
        found = dict(zip(names, contents, strict=True))
        if on_error == "omit":
            found = {name: content for name, content in found.items() if not isinstance(content, Exception)}
        return found

    def pipe(self, path: Any, value: Any = None, **kwargs: Any) -> None:
        """Writes objects concurrently.

        Args:
            path: An object, or a dict of objects and contents.
            value: The content, if `path` is a single object.
            kwargs: As for `pipe_file`, for each.

        Raises:
            StoreError: The first error; objects whose writes did not start by then are not written.
        """
        if isinstance(path, str):
            path = {path: value}
        elif not isinstance(path, Mapping):
            raise ConfigError(f"path as {type(path)}: must be a str, or a dict of paths and contents")
        for _, outcome in concurrently(lambda item: self.pipe_file(*item, **kwargs), path.items()):
            if isinstance(outcome, Exception):
                raise outcome

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        """Writes an object. With `mode="create"` the store refuses to replace an existing one.

        Other arguments are those of `Store.put`, such as `overwrite`, `if_version` and `content_type`, also by the
        names of s3fs, such as `ContentType`.
        """
        store, key = self._locate(path)
        created = {"overwrite": False} if mode == "create" else {}
        store.put(key, value, **{**written_attributes(kwargs), **created})


def _one_each(name: str, values: Any, count: int) -> Sequence[int | None]:
    if values is None or isinstance(values, int):
        return [values] * count
    if len(values) != count:
        raise ConfigError(f"{name} has {len(values)} values for {count} paths")
    of_each: Sequence[int | None] = values
    return of_each


def _raise_first(results: Sequence[Any]) -> None:
    for result in results:
        if isinstance(result, Exception):
            raise result
