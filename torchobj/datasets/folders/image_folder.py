"""`ImageFolder`: images in folders that are named after their classes, as torchvision's dataset of this name."""

import bisect
import dataclasses
import functools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
from typing_extensions import override

from torchobj import decode
from torchobj._torchobj import ObjectReader, ObjectRef
from torchobj.config import StoreConfig
from torchobj.config.checks import check, check_callable
from torchobj.datasets.failures import OnError
from torchobj.datasets.folders.folder import Arrangement, Folder
from torchobj.datasets.objects import ObjectDataset
from torchobj.exceptions import ConfigError, ObjectNotFoundError
from torchobj.urls import canonical_url

__all__ = ["IMG_EXTENSIONS", "ImageFolder"]

_Item = TypeVar("_Item")

#: The extensions of torchvision.
IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


@dataclasses.dataclass
class _Transforms:
    """Both transforms as one, as torchvision's `StandardTransform`."""

    transform: Callable[[Any], Any] | None
    target_transform: Callable[[Any], Any] | None

    def __call__(self, image: Any, target: Any) -> tuple[Any, Any]:
        return (
            image if self.transform is None else self.transform(image),
            target if self.target_transform is None else self.target_transform(target),
        )


class Labels(NamedTuple):
    """The classes, and the target of each sample."""

    classes: list[str]
    class_to_idx: dict[str, int]
    targets: Sequence[Any]


class _LazyList(Sequence[_Item]):
    """A sequence like a list, whose items are computed when they are accessed."""

    def __init__(self, objects: Arrangement, targets: Sequence[Any]) -> None:
        self._objects, self._targets = objects, targets

    def _item(self, index: int) -> _Item:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._targets)

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
        return len(self) == len(other) and all(one == another for one, another in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Iterable[_Item]) -> list[_Item]:
        return [*self, *other] if isinstance(other, (list, _LazyList)) else NotImplemented

    def __radd__(self, other: Iterable[_Item]) -> list[_Item]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        shown = [repr(item) for item in self[:3]]
        return f"[{', '.join([*shown, '...'] if len(self) > 3 else shown)}]"


class Targets(_LazyList[Any]):
    """The target of each sample."""

    @override
    def _item(self, index: int) -> Any:
        return self._targets[index]

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(self._targets)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:  # noqa: FBT001  numpy's arguments
        if copy is False:
            raise ValueError("the targets are computed: an array of them is a copy")
        return np.array(self._targets, dtype or (None if self._targets else np.int64))


class Samples(_LazyList[tuple[str, Any]]):
    """URL and target of each sample."""

    @override
    def _item(self, index: int) -> tuple[str, Any]:
        return self._objects.url(index), self._targets[index]


class ImageFolder(ObjectDataset[tuple[Any, Any]]):
    """Images in folders that are named after their classes, `folder/class/…/name.jpg`, as torchvision's `ImageFolder`.

    Classes, their numbers and the order of samples are torchvision's for the same files. A sample is the pair of image
    and class number. The folder is listed once, at the first use; workers share the listing, and under
    torch.distributed rank 0 lists for all ranks. An object that has changed since is an error.

    A bucket has no folders, only keys: a class exists if an object is in its folder. Empty objects whose key ends with
    a slash, with which some programs mark folders, do not count.

    A subclass may override `find_classes` and `make_dataset` as with torchvision's, for example to merge classes; both
    are called at the first use.

    Args:
        url: URL of the folder of the class folders, of any scheme.
        transform: Converts an image, such as torchvision's `ToTensor()`. None: no conversion.
        target_transform: Converts a class number. None: no conversion.
        loader: Decodes the `ObjectReader` of an image: a function of `torchobj.decode`, or one that uses the reader as
            a file. The default returns Pillow images of mode RGB, `torchobj.decode.image` tensors of bytes.
        extensions: Extensions of images, in any case. None: those of torchvision, `IMG_EXTENSIONS`.
        is_valid_file: Called with the URL of each object instead; returns whether it is an image.
        allow_empty: Whether a class may have no images.
        classes: Folders of the classes, in the order of their numbers; other folders are left out. None: all folders,
            sorted. Samples are in the order of the sorted folders in any case.
        config: Settings of the store.
        on_error: Action for a sample that cannot be read, decoded or transformed: as for `ObjectDataset`.

    Attributes:
        root: The URL.
        classes: Names of the classes.
        class_to_idx: The number of each class by its name.
        samples, imgs: URL and class number of each sample. Samples that are assigned replace those of the dataset.
        targets: Class number of each sample. Assigned ones are not those of the samples, as with torchvision's: assign
            `samples` to change these. `samples` and `targets` are sequences whose items are computed when they are
            accessed, and are equal to lists of these items.
        extensions: Extensions of images; None with `is_valid_file`.
        transforms: Both transforms as one callable; None if there are none.
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

    _arrangement: Arrangement | None = None

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
        classes: Sequence[str] | None = None,
        config: StoreConfig | None = None,
        on_error: OnError = "raise",
    ) -> None:
        check("loader", loader, "callable", ok=callable(loader))
        given = {"transform": transform, "target_transform": target_transform, "is_valid_file": is_valid_file}
        for name, value in given.items():
            check_callable(name, value)
        chosen = (extensions,) if isinstance(extensions, str) else extensions
        is_names = chosen is None or (bool(chosen) and all(isinstance(name, str) for name in chosen))
        check("extensions", extensions, "a string or a list of strings, or None", ok=is_names)
        if chosen is not None and is_valid_file is not None:
            raise ConfigError("extensions and is_valid_file: pass only one of them")
        is_list = isinstance(classes, Sequence) and not isinstance(classes, str)
        is_classes = is_list and all(isinstance(name, str) and name for name in classes or ())
        ok = classes is None or (is_classes and 0 < len(classes) == len({*classes}))
        check("classes", classes, "a list of different names of folders, or None", ok=ok)
        super().__init__(config=config, on_error=on_error)
        self._folder = Folder(url, config)
        self._listing = self._folder.listing
        self.root, self.loader = url, loader
        self.transform, self.target_transform = transform, target_transform
        has_transform = transform is not None or target_transform is not None
        self.transforms = _Transforms(transform, target_transform) if has_transform else None
        self.extensions = IMG_EXTENSIONS if extensions is None and is_valid_file is None else extensions
        self._is_valid_file, self._allow_empty, self._chosen = is_valid_file, allow_empty, classes
        #: Set by `_arranged`.
        self._labels = Labels([], {}, [])
        self._assigned_targets: Sequence[Any] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._listing!r}, on_error={self._torchobj.failures.on_error!r}>"

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        """The names of the classes, and the number of each. Called at the first use with `root`; can be overridden.

        Args:
            directory: `root`, or the URL of a folder in it.

        Returns:
            The argument `classes`, otherwise the folders in `directory`, sorted.

        Raises:
            ObjectNotFoundError: There are no folders.
            ConfigError: `directory` is not in `root`.
        """
        names = self._chosen
        if names is None:
            below = self._folder.names(self._folder_of(directory))
            names = sorted(
                {folder for folder, slash, _ in (name.partition("/") for _, name in below) if folder and slash}
            )
        if not names:
            raise ObjectNotFoundError(
                f"{self._folder.url}: no class folders: images have keys such as {self._folder.url}class/image.jpg, "
                f"and no object has a key of this form{self._listing.nearest()}"
            )
        return list(names), {name: number for number, name in enumerate(names)}

    def make_dataset(
        self,
        directory: str,
        class_to_idx: dict[str, int],
        extensions: str | Sequence[str] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,  # noqa: FBT001, FBT002  torchvision's argument
    ) -> list[tuple[str, int]]:
        """URL and target of each sample. Called at the first use with `root`; can be overridden.

        An override may return any URLs and targets. Objects that are not in `root` are read without a check of their
        version.

        Args:
            directory: `root`, or the URL of a folder in it.
            class_to_idx: The number of each class by the name of its folder in `directory`.
            extensions: Extensions of images, in any case.
            is_valid_file: Called with the URL of each object instead; returns whether it is an image.
            allow_empty: Whether a class may have no images.

        Raises:
            ObjectNotFoundError: A class has no images.
            ConfigError: `class_to_idx` is empty, not one of `extensions` and `is_valid_file` is given, or `directory`
                is not in `root`.
        """
        order, targets = self._found_in(directory, class_to_idx, extensions, is_valid_file, allow_empty=allow_empty)
        return list(Samples(self._folder.in_order(order), targets))

    def _folder_of(self, directory: str) -> str:
        """The part of the URL of a folder after `root`."""
        url = canonical_url(directory)
        folder = url if url.endswith("/") else f"{url}/"
        root = str(self._folder.url)
        check("directory", directory, f"{root} or the URL of a folder in it", ok=folder.startswith(root))
        return folder[len(root) :]

    def _found_in(
        self,
        directory: str,
        class_to_idx: dict[str, int],
        extensions: str | Sequence[str] | None,
        is_valid_file: Callable[[str], bool] | None,
        *,
        allow_empty: bool,
    ) -> tuple["array[int]", list[Any]]:
        """The images of classes as indices in the listing, in torchvision's order, and their targets."""
        check("class_to_idx", class_to_idx, "the number of one class or more, by its name", ok=bool(class_to_idx))
        if (extensions is None) == (is_valid_file is None):
            raise ConfigError("extensions and is_valid_file: pass one of them")
        ends = tuple(end.lower() for end in ([extensions] if isinstance(extensions, str) else extensions or ()))
        listed = self._listing.objects()

        def is_image(index: int, file: str) -> bool:
            return file.lower().endswith(ends) if is_valid_file is None else is_valid_file(listed.url(index))

        below = self._folder.names(self._folder_of(directory))
        order, targets, empty = _in_order(_images_by_folder(below, class_to_idx, is_image), class_to_idx)
        if empty and not allow_empty:
            wanted = "that is_valid_file accepts" if not ends else f"with one of the extensions {', '.join(ends)}"
            raise ObjectNotFoundError(
                f"{self._folder.url}: no object {wanted} in the classes {', '.join(empty)}; pass allow_empty=True to "
                "keep classes without images"
            )
        return order, targets

    def _found(self) -> Arrangement:
        """The objects, found at the first call. Every call ensures that the ranks of a job agree on the listing."""
        self._listing.objects()
        if self._arrangement is None:
            self._arrangement = self._arranged()
        return self._arrangement

    def _arranged(self) -> Arrangement:
        classes, class_to_idx = self.find_classes(self.root)
        if getattr(self.make_dataset, "__func__", None) is ImageFolder.make_dataset:
            order, targets = self._found_in(
                self.root, class_to_idx, self.extensions, self._is_valid_file, allow_empty=self._allow_empty
            )
            found = self._folder.in_order(order)
        else:
            samples = self.make_dataset(
                self.root,
                class_to_idx=class_to_idx,
                extensions=self.extensions,
                is_valid_file=self._is_valid_file,
                allow_empty=self._allow_empty,
            )
            found, targets = self._of_samples(samples)
        self._labels = Labels(classes, class_to_idx, targets)
        return found

    def _of_samples(self, samples: Iterable[Any]) -> tuple[Arrangement, list[Any]]:
        """The objects and targets of samples that the user has made."""
        pairs = list(samples)
        for pair in pairs:
            if not (isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[0], str)):
                check("samples", pair, "pairs of the URL of an object, and a target", ok=False)
        return self._folder.of_urls([canonical_url(url) for url, _ in pairs]), [target for _, target in pairs]

    def _found_labels(self) -> Labels:
        self._found()
        return self._labels

    @functools.cached_property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return self._found_labels().classes

    @functools.cached_property
    def class_to_idx(self) -> dict[str, int]:
        """The number of each class by its name."""
        return self._found_labels().class_to_idx

    @property
    def samples(self) -> Sequence[tuple[str, int]]:
        """URL and class number of each sample."""
        return Samples(self._found(), self._labels.targets)

    @samples.setter
    def samples(self, samples: Iterable[tuple[str, Any]]) -> None:
        labels = self._found_labels()
        self._arrangement, targets = self._of_samples(samples)
        self._labels = labels._replace(targets=targets)

    @property
    def imgs(self) -> Sequence[tuple[str, int]]:
        """The same as `samples`."""
        return self.samples

    @imgs.setter
    def imgs(self, samples: Iterable[tuple[str, Any]]) -> None:
        self.samples = samples

    @property
    def targets(self) -> Sequence[Any]:
        """Class number of each sample."""
        return (
            Targets(self._found(), self._labels.targets) if self._assigned_targets is None else self._assigned_targets
        )

    @targets.setter
    def targets(self, targets: Sequence[Any]) -> None:
        self._assigned_targets = targets

    def __len__(self) -> int:
        return len(self._found())

    @override
    def objects_at(self, index: int) -> Sequence[ObjectRef]:
        return [self._found().ref(index)]

    @override
    def build(self, index: int, readers: Sequence[ObjectReader]) -> tuple[Any, Any]:
        target = self._found_labels().targets[index]
        return _Transforms(self.transform, self.target_transform)(self.loader(readers[0]), target)


def _images_by_folder(
    names: Iterable[tuple[int, str]], class_to_idx: Mapping[str, int], is_image: Callable[[int, str], bool]
) -> dict[str, "array[int]"]:
    """The images of each folder that is a class, or in one."""
    folders: dict[str, array[int] | None] = {}
    for index, name in names:
        folder, _, file = name.rpartition("/")
        if folder not in folders:
            is_in_class = any(each in class_to_idx for each in _with_parents(folder))
            folders[folder] = array("q") if is_in_class else None
        images = folders[folder]
        if images is not None and is_image(index, file):
            images.append(index)
    return {folder: images for folder, images in folders.items() if images is not None}


def _with_parents(folder: str) -> Iterator[str]:
    """A folder and those that contain it."""
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]


def _in_order(
    folders: Mapping[str, "array[int]"], class_to_idx: Mapping[str, int]
) -> tuple["array[int]", list[Any], list[str]]:
    """The images in torchvision's order, with their targets, and the classes without images."""
    names, order, targets, empty = sorted(folders), array("q"), list[Any](), list[str]()
    for name in sorted(class_to_idx):
        begin, below = len(order), f"{name}/"
        # The order of os.walk, sorted: all files of a folder before those of its subfolders. Files of a folder are in
        # the order of their names already.
        order += folders.get(name, array("q"))
        for number in range(bisect.bisect_left(names, below), len(names)):
            if not names[number].startswith(below):
                break
            order += folders[names[number]]
        if len(order) == begin:
            empty.append(name)
        targets += [class_to_idx[name]] * (len(order) - begin)
    return order, targets, empty
