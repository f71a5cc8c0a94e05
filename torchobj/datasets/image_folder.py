"""`ImageFolder`: images in folders that are named after their classes, as torchvision's dataset of this name."""

import bisect
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
from typing_extensions import override

from torchobj import decode
from torchobj._torchobj import ObjectReader, ObjectRef
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.config.checks import check
from torchobj.datasets.arranged_listing import ArrangedListing, Arrangement
from torchobj.datasets.errors import OnError
from torchobj.datasets.objects import ObjectDataset, batch_reader_of
from torchobj.exceptions import ConfigError, ObjectNotFoundError
from torchobj.manifest import Manifest

__all__ = ["IMG_EXTENSIONS", "ImageFolder"]

#: The extensions of torchvision.
IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

_Item = TypeVar("_Item")


class _Classes(NamedTuple):
    """The names of the classes in their order, and the number of samples up to the end of each."""

    names: list[str]
    ends: list[int]

    def target(self, index: int) -> int:
        return bisect.bisect_right(self.ends, index)

    def counts(self) -> list[int]:
        return [end - begin for begin, end in itertools.pairwise([0, *self.ends])]

    def targets(self) -> Iterator[int]:
        return itertools.chain.from_iterable(map(itertools.repeat, range(len(self.names)), self.counts()))


class _LazyList(Sequence[_Item]):
    """A sequence like a list, whose items are computed when they are accessed."""

    def __init__(self, arrangement: Arrangement[_Classes]) -> None:
        self._arrangement = arrangement

    def _item(self, index: int) -> _Item:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._arrangement.manifest)

    @overload
    def __getitem__(self, index: int) -> _Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Item]: ...
    def __getitem__(self, index: int | slice) -> _Item | list[_Item]:
        # The range checks the index, and counts negative ones from the end.
        chosen = range(len(self))[index]
        return self._item(chosen) if isinstance(chosen, int) else [self._item(number) for number in chosen]

    def __iter__(self) -> Iterator[_Item]:
        return map(self._item, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, _LazyList)):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = [repr(item) for item in self[:3]]
        return f"[{', '.join([*shown, '...'] if len(self) > 3 else shown)}]"


class _Targets(_LazyList[int]):
    """The class of each sample."""

    @override
    def _item(self, index: int) -> int:
        return self._arrangement.details.target(index)

    @override
    def __iter__(self) -> Iterator[int]:
        return self._arrangement.details.targets()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:  # noqa: FBT001  numpy's arguments
        if copy is False:
            raise ValueError("the targets are computed: an array of them is a copy")
        classes = self._arrangement.details
        return np.repeat(np.arange(len(classes.names)), classes.counts()).astype(dtype or np.int64, copy=False)


class _Samples(_LazyList[tuple[str, int]]):
    """URL and class of each sample."""

    @override
    def _item(self, index: int) -> tuple[str, int]:
        return self._arrangement.manifest.url(index), self._arrangement.details.target(index)


class _Arrange:
    """Finds the classes and their images, in torchvision's order."""

    def __init__(
        self, extensions: tuple[str, ...] | None, is_valid_file: Callable[[str], bool] | None, *, allow_empty: bool
    ) -> None:
        self.extensions, self.is_valid_file, self.allow_empty = extensions, is_valid_file, allow_empty

    def __call__(self, url: str, names: Iterable[str], manifest: Manifest) -> tuple["array[int]", _Classes]:
        folders: dict[str, array[int]] = {}
        for index, name in enumerate(names):
            folder, slash, file = name.rpartition("/")
            if not slash:
                continue  # It is in no folder.
            images = folders.get(folder)
            if images is None:
                images = folders[folder] = array("q")
            if self._is_image(file, manifest, index):
                images.append(index)
        order, classes = array("q"), _Classes([], [])
        # The order of os.walk, sorted: all files of a folder before those of its subfolders. Files of a folder are in
        # the order of their names already.
        for folder in sorted(folders, key=lambda folder: (folder.partition("/")[0], folder)):
            name = folder.partition("/")[0]
            if classes.names[-1:] != [name]:
                classes.names.append(name)
                classes.ends.append(len(order))
            order += folders[folder]
            classes.ends[-1] = len(order)
        self._check(url, classes)
        return order, classes

    def _is_image(self, file: str, manifest: Manifest, index: int) -> bool:
        if self.is_valid_file is not None:
            return self.is_valid_file(manifest.url(index))
        return file.lower().endswith(self.extensions or IMG_EXTENSIONS)

    def _check(self, url: str, classes: _Classes) -> None:
        if not classes.names:
            raise ObjectNotFoundError(
                f"{url}: no class folders: images have keys such as {url}class/image.jpg, and no object has "
                "a key of this form"
            )
        empty = [name for name, count in zip(classes.names, classes.counts(), strict=True) if count == 0]
        if empty and not self.allow_empty:
            wanted = "that is_valid_file accepts"
            if self.is_valid_file is None:
                wanted = f"with one of the extensions {', '.join(self.extensions or IMG_EXTENSIONS)}"
            raise ObjectNotFoundError(
                f"{url}: no object {wanted} in the classes {', '.join(empty)}; pass allow_empty=True to keep "
                "classes without images"
            )


class ImageFolder(ObjectDataset[tuple[Any, Any]]):
    """Images in folders that are named after their classes, `folder/class/…/name.jpg`, as torchvision's `ImageFolder`.

    Classes, their numbers and the order of samples are torchvision's for the same files. A sample is the pair of image
    and class number. The folder is listed once, at the first use; workers share the listing, and under
    torch.distributed rank 0 lists for all ranks. An object that has changed since is an error.

    A bucket has no folders, only keys: a class exists if an object is in its folder. Empty objects whose key ends with
    a slash, with which some programs mark folders, do not count.

    Args:
        url: URL of the folder of the class folders, of any scheme.
        transform: Converts an image, such as torchvision's `ToTensor()`. None: no conversion.
        target_transform: Converts a class number. None: no conversion.
        loader: Decodes the `ObjectReader` of an image: a function of `torchobj.decode`, or one that uses the reader as
            a file. The default returns Pillow images of mode RGB, `torchobj.decode.image` tensors of bytes.
        extensions: Extensions of images, in any case. None: those of torchvision, `IMG_EXTENSIONS`.
        is_valid_file: Called with the URL of each object instead; returns whether it is an image.
        allow_empty: Whether a class may have no images.
        region, endpoint_url: Override those of `config`.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        on_error: Action for a sample that cannot be read, decoded or transformed: as for `ObjectDataset`.

    Attributes:
        classes: Names of the classes, sorted.
        class_to_idx: The number of each class by its name.
        samples, imgs: URL and class number of each sample.
        targets: Class number of each sample. `samples` and `targets` are sequences whose items are computed when they
            are accessed, and are equal to lists of these items.
        failed_samples: Number of samples that failed, in this process and its DataLoader workers.

    Raises:
        ConfigError: An argument is invalid. No request is sent here.
        ObjectNotFoundError: At the first use: there are no class folders, or classes without images. It is a
            `FileNotFoundError`, as torchvision's.

    Example:
        >>> import io, PIL.Image, torchobj
        >>> store = torchobj.Store("memory://animals")
        >>> for number, name in enumerate(("dog/1.png", "cat/1.png", "cat/more/2.PNG", "readme.txt")):
        ...     file = io.BytesIO()
        ...     PIL.Image.new("L", (4, 3), number).save(file, "PNG")
        ...     _ = store.put(f"train/{name}", file.getvalue())
        >>> dataset = torchobj.ImageFolder("memory://animals/train/", loader=torchobj.decode.image)
        >>> dataset.classes, dataset.samples[1], list(dataset.targets)
        (['cat', 'dog'], ('memory://animals/train/cat/more/2.PNG', 0), [0, 0, 1])
        >>> loader = torchobj.DataLoader(dataset, batch_size=3)
        >>> [(images.shape, targets) for images, targets in loader]
        [(torch.Size([3, 3, 3, 4]), tensor([0, 0, 1]))]
    """

    def __init__(  # noqa: PLR0917  torchvision's arguments
        self,
        url: str,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        loader: Callable[[ObjectReader], Any] = decode.pil,
        extensions: str | Sequence[str] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,  # noqa: FBT001, FBT002  torchvision's argument
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
        on_error: OnError = "raise",
    ) -> None:
        check("loader", loader, "callable", ok=callable(loader))
        given = {"transform": transform, "target_transform": target_transform, "is_valid_file": is_valid_file}
        for name, value in given.items():
            check(name, value, "callable, or None", ok=value is None or callable(value))
        chosen = (extensions,) if isinstance(extensions, str) else extensions
        is_names = chosen is None or (bool(chosen) and all(isinstance(name, str) for name in chosen))
        check("extensions", extensions, "a string or a list of strings, or None", ok=is_names)
        if chosen is not None and is_valid_file is not None:
            raise ConfigError("extensions and is_valid_file: pass only one of them")
        settings = store_config(config, region, endpoint_url, url=url)
        super().__init__(config=settings, on_error=on_error)
        self.transform, self.target_transform, self.loader = transform, target_transform, loader
        lower = None if chosen is None else tuple(name.lower() for name in chosen)
        arrange = _Arrange(lower, is_valid_file, allow_empty=allow_empty)
        self._images: ArrangedListing[_Classes] = ArrangedListing(url, settings, arrange)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._images!r}, on_error={batch_reader_of(self).on_error!r}>"

    @property
    def classes(self) -> list[str]:
        """Names of the classes, sorted."""
        return list(self._images.found().details.names)

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The number of each class by its name."""
        return {name: number for number, name in enumerate(self._images.found().details.names)}

    @property
    def samples(self) -> Sequence[tuple[str, int]]:
        """URL and class number of each sample."""
        return _Samples(self._images.found())

    @property
    def imgs(self) -> Sequence[tuple[str, int]]:
        """The same as `samples`."""
        return self.samples

    @property
    def targets(self) -> Sequence[int]:
        """Class number of each sample."""
        return _Targets(self._images.found())

    def __len__(self) -> int:
        return len(self._images.found().manifest)

    @override
    def _torchobj_prepare(self) -> None:
        self._images.found()

    @override
    def objects_at(self, index: int) -> Sequence[ObjectRef]:
        return [self._images.found().ref(index)]

    @override
    def build(self, index: int, readers: Sequence[ObjectReader]) -> tuple[Any, Any]:
        image, target = self.loader(readers[0]), self._images.found().details.target(index)
        return (
            image if self.transform is None else self.transform(image),
            target if self.target_transform is None else self.target_transform(target),
        )
