"""`torchobj.ImageFolder`: classes, order, images and errors of torchvision's, on local copies of the same files."""

import copy
import io
import logging
import pickle

import numpy
import PIL.Image
import pytest
import torch
from torch.utils.data import Subset, random_split

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX, often
from tests.support.prefetching import Taken, all_free
from torchobj import decode
from torchobj.warn_once import PROCESS

#: Names for which the order of keys and that of os.walk differ, nested folders, upper case, hidden files, other files.
NAMES = [
    "a/x.jpg", "a/b/y.png", "a/b-c/z.png", "a/b/c/w.PNG", "a/z.jpg", "a/.hidden.png", "a/notes.txt", "a/a b é.jpeg",
    "a-b/1.bmp", "a-b/2.JPG", "B/1.tiff", "B/10.png", "B/2.png", "B/.git/3.png", "a.b/0.webp", "é/1.png", "中/1.png",
    ".hidden/1.png", "cover.png", "a/archive.jpg.gz", "a0/100%25.png", "a0/#?.png",
]  # fmt: skip


def picture(number, form="PNG"):
    pixels = numpy.random.default_rng(number).integers(0, 256, (6, 5, 3), dtype=numpy.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, form)
    return file.getvalue()


BODIES = {name: picture(number) for number, name in enumerate(NAMES)}


@pytest.fixture(scope="module", autouse=True)
def imported():
    """What takes more than a second is imported by the process that runs these tests, not by each that collects them."""
    global torchvision, ToTensor
    import torchvision
    from torchvision.transforms import ToTensor


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "train"
    for name, body in BODIES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)
    return folder


@pytest.fixture(scope="module")
def url():
    store = torchobj.Store("memory://image-folder")
    for name, body in {**BODIES, "../training/a/1.png": picture(1)}.items():
        store.put(f"train/{name}".replace("train/../", ""), body)
    return "memory://image-folder/train/"


def names_of(dataset, root):
    return [(path.removeprefix(str(root)).strip("/"), target) for path, target in dataset.samples]


def assert_same(ours, theirs, url, root):
    assert (ours.classes, ours.class_to_idx) == (theirs.classes, theirs.class_to_idx)
    assert names_of(ours, url) == names_of(theirs, root)
    assert ours.targets == theirs.targets
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("slash", ["", "/"])
def test_classes_order_and_images_are_torchvisions(local, url, slash):
    theirs = torchvision.datasets.ImageFolder(local)
    for ours_url in (url.removesuffix("/"), f"file://{local}"):
        ours = torchobj.ImageFolder(ours_url + slash)
        assert_same(ours, theirs, ours_url, local)
        for index in range(len(theirs)):
            (mine, target), (its, its_target) = ours[index], theirs[index]
            assert (mine.mode, mine.size, mine.tobytes(), target) == ("RGB", its.size, its.tobytes(), its_target)
        assert torch.equal(torchobj.ImageFolder(ours_url, ToTensor())[-1][0], ToTensor()(theirs[len(theirs) - 1][0]))


@pytest.mark.parametrize("settings", [
    {"is_valid_file": lambda path: "1" in path.rpartition("/")[2] or "x" in path, "allow_empty": True},
    {"is_valid_file": lambda path: True},
], ids=["some", "all"])  # fmt: skip
def test_files_are_selected_as_by_torchvision(local, url, settings):
    ours, theirs = torchobj.ImageFolder(url, **settings), torchvision.datasets.ImageFolder(local, **settings)
    assert_same(ours, theirs, url, local)


@pytest.mark.parametrize("extensions", [".png", (".png", ".jpg")])
def test_extensions_select_as_those_of_torchvision(local, url, extensions):
    theirs = torchvision.datasets.DatasetFolder(local, str, extensions, allow_empty=True)
    ours = torchobj.ImageFolder(url, extensions=extensions, allow_empty=True)
    assert_same(ours, theirs, url, local)
    chosen = [name.upper() for name in ([extensions] if isinstance(extensions, str) else extensions)]
    assert torchobj.ImageFolder(url, extensions=chosen, allow_empty=True).samples == ours.samples


def test_a_thousand_random_names_come_in_torchvisions_order(tmp_path):
    random, store = numpy.random.default_rng(7), torchobj.Store("memory://image-folder-random")
    parts = ["a", "b", "a-", "a.", "a b", "A", "a0", "é", "-", "_a", "~", "ab", "a,b"]
    names = {
        "/".join([*random.choice(parts, random.integers(1, 4)), f"{random.choice(parts)}.png"]) for _ in range(1000)
    }
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        store.put(name, b"")
    ours, theirs = torchobj.ImageFolder("memory://image-folder-random/"), torchvision.datasets.ImageFolder(tmp_path)
    assert_same(ours, theirs, "memory://image-folder-random/", tmp_path)


class Merged:
    """Two folders as one class, numbers that do not follow the names, and other folders left out."""

    def find_classes(self, directory):
        assert directory == self.root
        return ["latin", "other"], {"B": 7, "a": 0, "é": 7, "a/b": 3}


class Chosen:
    def find_classes(self, directory):
        names, _ = super().find_classes(directory)
        chosen = [name for name in reversed(names) if name.startswith(("a", "B"))]
        return chosen, {name: number for number, name in enumerate(chosen)}


class Filtered:
    """Samples of `make_dataset` that are filtered, reordered and repeated, with other targets."""

    def make_dataset(self, directory, class_to_idx, extensions=None, is_valid_file=None, allow_empty=False):
        ends = (".png",) if extensions else extensions
        every = torchvision.datasets.folder.make_dataset if isinstance(self, torchvision.datasets.ImageFolder) else (
            super().make_dataset
        )  # fmt: skip
        found = every(directory, class_to_idx, ends, is_valid_file, allow_empty=True)
        return [(path, target + 0.5) for path, target in found[::-2] + found[:3]]


@pytest.mark.parametrize("override", [Merged, Chosen, Filtered])
@pytest.mark.parametrize("settings", [{}, {"is_valid_file": lambda path: path.endswith("ng")}], ids=["", "is_valid"])
def test_a_subclass_overrides_classes_and_samples_as_that_of_torchvision(local, url, override, settings):
    settings = {**settings, "allow_empty": True}
    theirs = type("Theirs", (override, torchvision.datasets.ImageFolder), {})(str(local), **settings)
    ours = type("Ours", (override, torchobj.ImageFolder), {})(url, **settings)
    assert_same(ours, theirs, url, local)
    assert [target for _, target in ours] == theirs.targets
    for index in (0, 3, -1):
        assert (ours[index][0].tobytes(), ours[index][1]) == (theirs[index][0].tobytes(), theirs[index][1])
    assert ours.find_classes(ours.root) == (ours.classes, ours.class_to_idx)
    assert ours.make_dataset(url, ours.class_to_idx, extensions=".png", allow_empty=True) == [
        (path.replace(str(local), url.rstrip("/")), target)
        for path, target in theirs.make_dataset(local, ours.class_to_idx, ".png", None, allow_empty=True)
    ]


class Elsewhere(torchobj.ImageFolder):
    @staticmethod
    def find_classes(directory):
        return ["x"], {"x": 4}

    @staticmethod
    def make_dataset(directory, class_to_idx, **settings):
        assert sorted(settings) == ["allow_empty", "extensions", "is_valid_file"]
        return [
            ("memory://image-folder/train/B/1.tiff", class_to_idx["x"]),
            ("memory://image-folder-other/1.png", None),
        ]


@pytest.mark.parametrize(("method", "workers"), often(2, [(None, 0), ("fork", 2), ("forkserver", 1)]))
def test_an_override_may_name_objects_of_other_buckets(url, method, workers):
    torchobj.Store("memory://image-folder-other").put("1.png", picture(99))
    dataset = Elsewhere(url, loader=bytes)
    expected = [(BODIES["B/1.tiff"], 4), (picture(99), None)]
    loader = torchobj.DataLoader(
        dataset, batch_size=None, num_workers=workers, multiprocessing_context=method if workers else None
    )
    with Taken() as taken:
        assert list(map(tuple, loader)) == list(dataset) == expected
    assert taken.announced == 2
    assert dataset.samples == [("memory://image-folder/train/B/1.tiff", 4), ("memory://image-folder-other/1.png", None)]


@pytest.mark.parametrize("classes", [["é", "a"], ("B", "a-b", "a")])
def test_an_argument_chooses_and_orders_the_classes(local, url, classes):
    class Theirs(torchvision.datasets.ImageFolder):
        def find_classes(self, directory):
            return list(classes), {name: number for number, name in enumerate(classes)}

    ours = torchobj.ImageFolder(url, classes=classes)
    assert_same(ours, Theirs(local), url, local)
    assert [target for _, target in ours] == ours.targets
    with pytest.raises(FileNotFoundError, match="in the classes absent; pass allow_empty=True"):
        len(torchobj.ImageFolder(url, classes=["a", "absent"]))
    allowed = torchobj.ImageFolder(url, classes=["absent", "a"], allow_empty=True)
    assert (allowed.classes, set(allowed.targets)) == (["absent", "a"], {1})


def test_attributes_are_those_of_torchvision(local, url):
    def both(**settings):
        return torchobj.ImageFolder(url, **settings), torchvision.datasets.ImageFolder(str(local), **settings)

    ours, theirs = both()
    assert (ours.root, theirs.root) == (url, str(local))
    assert (ours.extensions, ours.transforms) == (theirs.extensions, theirs.transforms)
    ours, theirs = both(is_valid_file=lambda path: True, transform=str, target_transform=float)
    assert ours.extensions is theirs.extensions is None
    assert (ours.transforms.transform, ours.transforms.target_transform) == (str, float)
    assert ours.transforms(1, 2) == theirs.transforms(1, 2) == ("1", 2.0)
    assert torchobj.ImageFolder(url, extensions=".png").extensions == ".png"
    assert ours.targets + ours.targets == theirs.targets + theirs.targets
    assert [None, *theirs.targets] == [None] + ours.targets  # noqa: RUF005  the operator is tested
    assert isinstance(ours.samples + ours.imgs, list) and len(ours.samples + [1]) == len(theirs) + 1  # noqa: RUF005
    with pytest.raises(TypeError):
        ours.targets + (1,)  # noqa: RUF005


@pytest.mark.parametrize("name", ["samples", "imgs"])
def test_assigned_samples_replace_those_of_the_dataset(local, url, name):
    ours, theirs = torchobj.ImageFolder(url), torchvision.datasets.ImageFolder(local)
    shared, before = copy.copy(ours), list(ours.samples)
    for dataset in (ours, theirs):
        setattr(dataset, name if dataset is ours else "samples", [(path, target * 10) for path, target in
                                                                  dataset.samples[::-3] + dataset.samples[:2]])  # fmt: skip
    assert names_of(ours, url) == names_of(theirs, local)
    assert (len(ours), ours.classes) == (len(theirs), theirs.classes)
    expected = [(image.tobytes(), target) for image, target in theirs]
    assert [(image.tobytes(), target) for image, target in ours] == expected
    assert ours.targets == [target for _, target in theirs.samples]
    copied = pickle.loads(pickle.dumps(ours))
    assert (copied.samples, copied.imgs, shared.samples) == (ours.samples, ours.samples, before)
    loader = torchobj.DataLoader(ours, batch_size=None, num_workers=2, multiprocessing_context="fork")
    with Taken() as taken:
        assert [(image.tobytes(), target) for image, target in loader] == expected
    assert (taken.announced, taken.misses) == (len(expected), 0)
    ours.samples = []
    assert (len(ours), list(ours.targets), numpy.asarray(ours.targets).dtype) == (0, [], numpy.int64)


def test_assigned_targets_are_an_attribute_as_with_torchvision(local, url):
    ours, theirs = torchobj.ImageFolder(url), torchvision.datasets.ImageFolder(local)
    for dataset in (ours, theirs):
        dataset.targets = [5] * len(dataset)
        dataset.classes, dataset.class_to_idx = ["five"], {"five": 5}
    assert (ours.targets, ours.classes, ours.class_to_idx) == (theirs.targets, theirs.classes, theirs.class_to_idx)
    assert (ours[-1][1], ours.samples[-1][1]) == (theirs[-1][1], theirs.samples[-1][1])


def test_assigned_samples_have_the_version_of_the_listing():
    store = torchobj.Store("memory://image-folder-assigned")
    for name in ("a/1.png", "a/2.png"):
        store.put(name, picture(1))
    dataset = torchobj.ImageFolder("memory://image-folder-assigned", loader=bytes)
    dataset.samples = dataset.samples[1:]
    store.put("a/2.png", picture(2))
    with pytest.raises(torchobj.exceptions.ObjectChangedError):
        dataset[0]


@pytest.mark.parametrize(
    "samples", [["a.png"], [("a.png", 1)], [("s3://bucket/a.png",)], [("s3://bucket/", 1)], [(1, 2)]]
)
def test_samples_without_the_url_of_an_object_are_refused(url, samples):
    dataset = torchobj.ImageFolder(url)
    with pytest.raises(torchobj.exceptions.ConfigError, match=r"a\.png|bucket|1, 2"):
        dataset.samples = samples
    assert len(dataset) == len(torchobj.ImageFolder(url))


def test_the_methods_refuse_what_torchvisions_do_and_other_folders(url):
    dataset = torchobj.ImageFolder(url)
    assert dataset.find_classes(f"{url}a")[0] == ["b", "b-c"]
    assert dataset.make_dataset(f"{url}a/", {"b-c": 1}, ".png") == [(f"{url}a/b-c/z.png", 1)]
    for arguments in (
        (url, {}, ".png"), (url, {"a": 0}), (url, {"a": 0}, ".png", bool), ("memory://other/", {"a": 0}, ".png")
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match=r"class_to_idx=\{\}|extensions and is_valid_file|directory='memory://other/'"
        ):
            dataset.make_dataset(*arguments)


def digests(loader):
    return [
        (image.sum().item(), int(target))
        for images, targets in loader
        for image, target in zip(images, targets, strict=True)
    ]


def shuffled(kind, dataset, **settings):
    torch.manual_seed(11)
    return digests(kind(dataset, batch_size=4, shuffle=True, **settings))


@pytest.mark.providers("s3", GCS_IN_MATRIX)
@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_a_shuffled_epoch_equals_torchvisions_and_every_read_is_announced(bucket, local, method):
    for name, body in BODIES.items():
        bucket.write(f"data/train/{name}", body)
    settings = {} if method is None else {"num_workers": 2, "multiprocessing_context": method}
    expected = shuffled(torch.utils.data.DataLoader, torchvision.datasets.ImageFolder(local, ToTensor()))
    dataset = torchobj.ImageFolder(f"{bucket.url}/data/train", ToTensor(), config=bucket.config)
    with Taken() as taken:
        assert shuffled(torchobj.DataLoader, dataset, **settings) == expected
    assert (taken.misses, taken.announced, taken.objects) == (0, len(expected), len(expected))
    assert all_free()


@pytest.mark.parametrize(("method", "workers"), often(1, [("fork", 2), ("forkserver", 1), ("forkserver", 2)]))
def test_workers_do_not_list(url, method, workers, caplog):
    dataset = torchobj.ImageFolder(url, loader=decode.image)
    assert "not listed yet" in repr(dataset)
    part = Subset(dataset, range(10))
    loader = torchobj.DataLoader(part, batch_size=5, num_workers=workers, multiprocessing_context=method)
    with caplog.at_level(logging.WARNING, "torchobj"), Taken() as taken:
        assert sum(len(targets) for _, targets in loader) == 10
    assert (caplog.messages, taken.misses) == ([], 0)


def test_parts_of_it_are_announced(local, url):
    ours, theirs = (kind(root, ToTensor()) for kind, root in (
        (torchobj.ImageFolder, url), (torchvision.datasets.ImageFolder, local)))  # fmt: skip
    for part in (lambda it: Subset(it, [3, 1, 1]), lambda it: random_split(it, [5, len(it) - 5], torch.Generator())[0]):
        with Taken() as taken:
            found = digests(torchobj.DataLoader(part(ours), batch_size=2, num_workers=1))
        assert found == digests(torch.utils.data.DataLoader(part(theirs), batch_size=2))
        assert (taken.misses, taken.announced) == (0, len(found))


def test_targets_are_transformed_and_images_can_be_tensors(url):
    dataset = torchobj.ImageFolder(url, lambda image: image.float(), lambda target: target + 100, decode.image)
    image, target = dataset[0]
    assert (image.shape, image.dtype, target) == ((3, 6, 5), torch.float32, 100)


def test_attributes_are_sequences_like_lists(url):
    dataset = torchobj.ImageFolder(url)
    samples, targets = dataset.samples, dataset.targets
    every = list(samples)
    assert samples == every and every == samples and samples == dataset.imgs and (samples != every) is False
    assert samples != every[:-1] and samples != [*every[:-1], None] and samples != 5
    assert (samples[0], samples[-1], samples[2:5], samples[::-1]) == (every[0], every[-1], every[2:5], every[::-1])
    assert every[3] in samples and samples.index(every[3]) == 3 and targets.count(1) == 4
    for wrong in (len(every), -len(every) - 1):
        with pytest.raises(IndexError):
            samples[wrong]
    with pytest.raises(TypeError):
        hash(samples)
    assert targets == [target for _, target in every] == list(targets) == numpy.array(targets).tolist()
    assert torch.tensor(targets).tolist() == torch.as_tensor(numpy.asarray(targets)).tolist() == list(targets)
    assert repr(targets) == "[0, 1, 1, ...]"
    assert repr(targets[:2]) == "[0, 1]"


def test_copies_and_pickles_keep_the_listing(url):
    dataset = torchobj.ImageFolder(url)
    assert "not listed yet" in repr(pickle.loads(pickle.dumps(dataset)))
    every = list(dataset.samples)
    for copied in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert f"{len(NAMES)} objects" in repr(copied)
        assert (copied.samples, copied[2][1]) == (every, dataset[2][1])


def test_a_class_without_images_is_torchvisions_error_unless_allowed():
    store = torchobj.Store("memory://image-folder-empty")
    for name in ("a/1.png", "b/notes.txt", "c/2.png", "d/deep/x.csv"):
        store.put(name, b"")
    empty = torchobj.ImageFolder("memory://image-folder-empty")
    for use in (len, lambda it: it.classes, lambda it: it[0], lambda it: it.samples):
        with pytest.raises(FileNotFoundError, match=r"memory://image-folder-empty/: no object with one of the extensions "
                           r"\.jpg, .* in the classes b, d; pass allow_empty=True"):  # fmt: skip
            use(empty)
    with pytest.raises(
        torchobj.exceptions.ObjectNotFoundError, match="no object that is_valid_file accepts in the classes a"
    ):
        len(torchobj.ImageFolder("memory://image-folder-empty", is_valid_file=lambda url: "2" in url))
    allowed = torchobj.ImageFolder("memory://image-folder-empty", allow_empty=True)
    assert (allowed.classes, allowed.targets) == (["a", "b", "c", "d"], [0, 2])
    assert allowed.class_to_idx["d"] == 3


@pytest.mark.filterwarnings("ignore")
def test_a_folder_without_classes_is_torchvisions_error():
    torchobj.Store("memory://image-folder-flat").put("1.png", b"")
    for name in ("memory://image-folder-flat", "memory://image-folder-none/train"):
        with pytest.raises(FileNotFoundError, match=rf"^{name}/: no class folders"):
            len(torchobj.ImageFolder(name).classes)


@pytest.fixture
def damaged():
    store = torchobj.Store("memory://image-folder-damaged")
    for name in ("a/1.png", "a/2.png", "b/3.png"):
        store.put(name, b"no image" if name == "a/2.png" else picture(1))
    return "memory://image-folder-damaged/"


@pytest.mark.parametrize("loader", [decode.pil, decode.image])
def test_an_image_that_cannot_be_decoded_is_named(damaged, loader):
    with pytest.raises(PIL.UnidentifiedImageError) as raised:
        torchobj.ImageFolder(damaged, loader=loader)[1]
    assert raised.value.__notes__ == [f"in build of sample 1, {damaged}a/2.png"]
    for workers in (0, 1):
        loaded = torchobj.DataLoader(torchobj.ImageFolder(damaged, ToTensor(), loader=decode.pil), num_workers=workers)
        with pytest.raises(PIL.UnidentifiedImageError) as raised:
            list(loaded)
        assert f"{damaged}a/2.png" in str(raised.value) + "".join(getattr(raised.value, "__notes__", []))


def test_an_image_that_cannot_be_decoded_is_replaced_and_logged_with_its_url(damaged, caplog, monkeypatch):
    monkeypatch.setattr(PROCESS, "_once", {})
    dataset = torchobj.ImageFolder(damaged, on_error="replace")
    assert [target for _, target in dataset] == [0, 1, 1]
    assert dataset.failed_samples == 1
    assert f"sample 1, {damaged}a/2.png, was replaced" in caplog.text
    dataset = torchobj.ImageFolder(damaged, on_error=lambda index, url, error: (index, url, type(error)))
    assert dataset[1] == (1, f"{damaged}a/2.png", PIL.UnidentifiedImageError)


def test_an_image_that_was_replaced_after_the_listing_is_an_error():
    store = torchobj.Store("memory://image-folder-changed")
    store.put("a/1.png", picture(1))
    dataset = torchobj.ImageFolder("memory://image-folder-changed", loader=bytes)
    assert dataset[0] == (picture(1), 0)
    store.put("a/1.png", picture(2))
    with pytest.raises(torchobj.exceptions.ObjectChangedError):
        dataset[0]


@pytest.mark.parametrize(("settings", "message"), [
    ({"loader": "pil"}, "loader='pil': must be callable"),
    ({"transform": 3}, "transform=3: must be callable, or None"),
    ({"classes": "a"}, "classes='a': must be a list of different names"),
    ({"classes": ["a", "a"]}, "must be a list of different names"),
    ({"classes": []}, "must be a list of different names"),
    ({"extensions": []}, r"extensions=\[\]: must be a string or a list"),
    ({"extensions": ".png", "is_valid_file": bool}, "extensions and is_valid_file: pass only one"),
    ({"on_error": "skip"}, "use 'replace'"),
    ({"config": {}}, "config=<class 'dict'>: must be a StoreConfig"),
])  # fmt: skip
def test_wrong_arguments_are_refused_at_once(settings, message):
    with pytest.raises(torchobj.exceptions.ConfigError, match=message):
        torchobj.ImageFolder("memory://image-folder/train", **settings)
