"""A dataset without any object is an error at its first use, on every rank, unless that is allowed."""

import pickle
import re

import pytest
import torch.distributed as dist
import torch.utils.data

import torchobj
from tests.support.ranks import run_ranks
from torchobj.exceptions import ConfigError, ObjectNotFoundError

KINDS = pytest.mark.parametrize("kind", [torchobj.ObjectMapDataset, torchobj.ObjectIterableDataset])


def url_of(request, *keys):
    """The URL of a store of its own with these keys."""
    url = "memory://" + re.sub(r"\W+", "-", request.node.name)
    for key in keys:
        torchobj.Store(url).put(key, b"x")
    return url


USES = {
    "manifest": lambda samples: samples.manifest,
    "iter": list,
    "loader": lambda samples: list(torchobj.DataLoader(samples)),
    "loader with workers": lambda samples: list(torchobj.DataLoader(samples, num_workers=1)),
    "loader of torch": lambda samples: list(torch.utils.data.DataLoader(samples)),
    "pickle": lambda samples: list(pickle.loads(pickle.dumps(samples))),
}
MAP_USES = {
    "len": len,
    "item": lambda samples: samples[0],
    "shuffle": lambda samples: list(torch.utils.data.DataLoader(samples, shuffle=True)),
}


def use_spawned(samples):
    return list(torchobj.DataLoader(samples, num_workers=1, multiprocessing_context="spawn"))


@KINDS
@pytest.mark.parametrize(
    "use", [*USES.values(), pytest.param(use_spawned, marks=pytest.mark.matrix)], ids=[*USES, "spawn"]
)
def test_a_prefix_without_objects_is_an_error_at_each_use(kind, use, request):
    url = url_of(request, "train/images/a.png", "train/images/b.png", "train/masks/a.png", "validate/a.png")
    samples = kind(f"{url}/train/image/")
    for _ in range(2):
        with pytest.raises(ObjectNotFoundError, match=f"{url}/train/image/: no objects; check") as raised:
            use(samples)
    assert isinstance(raised.value, FileNotFoundError)
    nearest = f"the nearest keys are {url}/train/images/a.png, {url}/train/masks/a.png; pass allow_empty=True"
    assert nearest in str(raised.value)


@pytest.mark.parametrize("use", MAP_USES.values(), ids=MAP_USES)
def test_a_map_style_dataset_raises_instead_of_the_sampler(use, request):
    with pytest.raises(ObjectNotFoundError, match="no objects"):
        use(torchobj.ObjectMapDataset(f"{url_of(request, 'a')}/b/"))


@KINDS
@pytest.mark.parametrize(
    ("prefix", "filters", "nearest"),
    [
        ("train/", {"suffixes": ".jpg"}, "train/images/a.png, {url}/train/notes.txt"),
        ("train/", {"glob": "*.png"}, "train/images/a.png, {url}/train/notes.txt"),
        ("tain/", {}, "train/images/a.png, {url}/test.txt"),
        ("train/imagse/deep/er/", {}, "train/images/a.png, {url}/train/notes.txt"),
        ("trein", {}, "train/images/a.png, {url}/test.txt"),
    ],
)
def test_the_nearest_keys_are_those_of_the_next_folder_that_exists(kind, prefix, filters, nearest, request):
    url = url_of(request, "train/images/a.png", "train/notes.txt", "test.txt")
    with pytest.raises(ObjectNotFoundError) as raised:
        list(kind(f"{url}/{prefix}", **filters))
    assert f"the nearest keys are {url}/{nearest.format(url=url)}; pass" in str(raised.value)


@KINDS
def test_a_store_without_objects_is_named_and_is_listed_again_once_it_has_some(kind, request):
    url = url_of(request)
    samples = kind(f"{url}/train/")
    with pytest.raises(ObjectNotFoundError, match=f"{url} has no objects at all; pass allow_empty=True"):
        list(samples)
    url_of(request, "train/a")
    assert [reader.key for reader in samples] == ["train/a"]


@KINDS
def test_a_manifest_without_objects_is_an_error(kind, tmp_path):
    manifest = torchobj.Manifest.from_urls([])
    manifest.save(tmp_path / "file")
    for source in (manifest, tmp_path / "file"):
        with pytest.raises(ObjectNotFoundError, match="no objects; pass allow_empty=True"):
            list(kind.from_manifest(source))
        assert list(kind.from_manifest(source, allow_empty=True)) == []


@KINDS
def test_an_empty_dataset_is_allowed_on_request_and_with_a_share_or_names_of_none(kind, request, caplog):
    url = url_of(request, "train/a")
    assert list(kind(f"{url}/none/", allow_empty=True)) == []
    assert f"{url}/none/: no objects" in caplog.text
    assert list(kind.from_prefix(f"{url}/none/", allow_empty=True)) == []
    assert list(kind([])) == list(kind.from_objects([])) == []
    if kind is torchobj.ObjectIterableDataset:
        shares = [list(kind(f"{url}/train/", rank=rank, world_size=2)) for rank in range(2)]
        assert [len(share) for share in shares] == [1, 0]
    with pytest.raises(ConfigError, match="allow_empty='yes'"):
        kind(f"{url}/none/", allow_empty="yes")


@pytest.mark.providers("s3")
@pytest.mark.parametrize("kind", [torchobj.S3MapDataset, torchobj.S3IterableDataset])
def test_the_datasets_of_s3torchconnectors_names_may_be_empty(kind, bucket):
    bucket.write("train/a", b"x")
    url, options = f"{bucket.url}/tain/", {"config": bucket.config}
    assert list(kind(url, **options)) == list(kind.from_prefix(url, **options)) == []
    for make in (kind, kind.from_prefix):
        with pytest.raises(ObjectNotFoundError, match=f"the nearest keys are {bucket.url}/train/a; "):
            list(make(url, allow_empty=False, **options))


def test_groups_and_classes_of_an_empty_folder_are_errors_with_the_nearest_keys(request):
    url = url_of(request, "train/a.jpg", "train/a.json")
    fields = {"image": ".png", "meta": ".txt"}
    nearest = f"the nearest keys are {url}/train/a.jpg, {url}/train/a.json"
    with pytest.raises(ObjectNotFoundError, match=f"ends with one of .*; {nearest}; pass allow_empty=True"):
        len(torchobj.GroupDataset(f"{url}/train/", fields))
    with pytest.raises(ObjectNotFoundError, match=f"no class folders.*; the nearest keys are {url}/train/a.jpg"):
        len(torchobj.ImageFolder(f"{url}/none/"))
    for folder in ("train", "none"):
        allowed = torchobj.GroupDataset(f"{url}/{folder}", fields, allow_empty=True)
        assert (len(allowed), list(allowed)) == (0, [])


@pytest.mark.parametrize("pattern", ["{url}/tain/", "{url}/tain/*.tar", "{url}/train-*.tar"])
@pytest.mark.parametrize("kind", [torchobj.TarIterableDataset, torchobj.TarMapDataset, torchobj.ParquetIterableDataset])
def test_shards_that_do_not_exist_are_an_error_with_the_nearest_keys(kind, pattern, request):
    url = url_of(request, "train/notes.txt")
    with pytest.raises(ConfigError, match=f"the nearest keys are {url}/train/notes.txt"):
        list(kind(pattern.format(url=url)))


def test_a_mixture_raises_the_error_of_its_dataset(request):
    url = url_of(request, "train/a", "train/b")
    full, empty = (torchobj.ObjectMapDataset(f"{url}/{name}/") for name in ("train", "none"))
    with pytest.raises(ObjectNotFoundError, match="no objects"):
        len(torchobj.interleave([full, empty]))
    for kind in (torchobj.ObjectMapDataset, torchobj.ObjectIterableDataset):
        mixture = torchobj.interleave([torchobj.ObjectIterableDataset(f"{url}/train/"), kind(f"{url}/none/")])
        with pytest.raises(ObjectNotFoundError, match="no objects"):
            list(mixture)


def use_on_rank(rank, url, kind, is_manifest):
    dist.init_process_group("gloo")
    samples = kind.from_manifest(f"{url}/manifest") if is_manifest else kind(f"{url}/none/")
    errors = []
    for _ in range(2):
        try:
            list(samples)
        except ObjectNotFoundError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize(
    ("kind", "is_manifest"),
    [
        (torchobj.ObjectMapDataset, False),
        pytest.param(torchobj.ObjectIterableDataset, False, marks=pytest.mark.matrix),
        pytest.param(torchobj.ObjectMapDataset, True, marks=pytest.mark.matrix),
    ],
)
def test_every_rank_of_a_job_raises_the_same_error(kind, is_manifest, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a").write_bytes(b"x")
    torchobj.Manifest.from_urls([]).save(tmp_path / "manifest")
    results = run_ranks(use_on_rank, f"file://{tmp_path}", kind, is_manifest)
    assert [len(errors) for errors in results] == [2, 2]
    for errors in results:
        for error in errors:
            assert "no objects" in error
            assert is_manifest or f"file://{tmp_path}/train/a" in error
