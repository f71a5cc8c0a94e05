"""Samples of tar shards of any format, in pieces of any size, equal those of webdataset and tarfile."""

import os
import shutil
import subprocess
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import tar_shards
from tests.support.tar_shards import expected, make, members, plain, read, walk

cuts = st.lists(st.integers(0, 1 << 20), max_size=6)


def is_as_webdataset(found, error, reference, failed):
    """Compares samples up to the first one that webdataset does not read."""
    good = [plain(sample) for *_, sample in found if isinstance(sample, dict)]
    if not failed:
        assert error is None
        assert good == reference
        assert len(good) == len(found)
        return
    # Duplicates end webdataset's reading of the shard, and only the sample here. After an error, webdataset drops a
    # sample that is complete if the body of the next member is missing.
    assert error is not None or len(good) < len(found)
    assert good[: len(reference)] == reference


@pytest.mark.parametrize("form", tar_shards.FORMATS)
@settings(max_examples=80)
@given(members=members, cuts=cuts)
def test_samples_of_tarfile_equal_those_of_webdataset(form, members, cuts):
    shard = make(members, form)
    found, error = read(shard, cuts)
    is_as_webdataset(found, error, *expected(shard))


@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
@settings(max_examples=12)
@given(members=members, cuts=cuts)
def test_samples_of_gnu_tar_equal_those_of_webdataset(tmp_path_factory, form, members, cuts):
    folder = tmp_path_factory.mktemp("shard")
    names = []
    for name, kind, body in members:
        path = os.fsencode(folder) + b"/" + os.fsencode(name.lstrip("/"))
        if b"/../" in path or os.path.lexists(path) or path.endswith((b"/", b"/.", b"/..")):
            continue
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            match kind:
                case tarfile.DIRTYPE:
                    os.mkdir(path)
                case tarfile.SYMTYPE:
                    os.symlink("target", path)
                case tarfile.LNKTYPE if names:
                    os.link(os.fsencode(folder) + b"/" + names[0], path)
                case tarfile.FIFOTYPE:
                    os.mkfifo(path)
                case _:
                    with open(path, "wb") as file:
                        file.write(body)
        except OSError:
            continue  # Not a name of a file.
        names.append(os.fsencode(name.lstrip("/")))
    file = folder.with_suffix(".tar")
    listed = b"\0".join(b"./" + name if name.startswith(b"-") else name for name in names)
    command = ["tar", "-c", "-f", file, f"--format={form}", "-C", folder, "--null", "--no-recursion", "-T", "-"]
    # It leaves out names that the format cannot hold, and fails then.
    subprocess.run(command, input=listed, capture_output=True, check=False)
    shard = file.read_bytes()
    shutil.rmtree(folder)
    found, error = read(shard, cuts)
    is_as_webdataset(found, error, *expected(shard))


@settings(max_examples=150)
@given(members=members, form=st.sampled_from(list(tar_shards.FORMATS)), cuts=cuts, end=st.integers(0, 1 << 20))
def test_a_shard_that_ends_in_the_middle_is_an_error_as_in_tarfile(members, form, cuts, end):
    whole = make(members, form)
    used = len(whole.rstrip(b"\0"))
    shard = whole[: end % (used + 1)]
    reference, failed = expected(shard)
    found, error = read(shard, cuts)
    # tarfile takes the start of a header for the end of the archive.
    if error is not None and "of a header" in str(error):
        good = [plain(sample) for *_, sample in found if isinstance(sample, dict)]
        assert reference[: len(good)] == good or len(good) < len(found)
    else:
        is_as_webdataset(found, error, reference, failed)


@settings(max_examples=80)
@given(members=members, form=st.sampled_from(list(tar_shards.FORMATS)))
def test_an_index_has_the_samples_of_a_reader(members, form):
    shard = make(members, form)
    found, error = read(shard)
    assert error is None
    if any(isinstance(sample, Exception) for *_, sample in found):
        with pytest.raises(tar_shards.TarError, match="with the extension|is not UTF-8"):
            walk(shard)
        return
    names = "".join(key + "".join(sample) for _, _, key, sample in found)
    if names.encode("utf-8", "replace") != names.encode("utf-8", "surrogateescape"):
        with pytest.raises(tar_shards.TarError, match="is not UTF-8, which an index cannot hold"):
            walk(shard)
        return
    rows, _ = walk(shard)
    assert rows == [(begin, end, key, plain(sample)) for begin, end, key, sample in found]


@settings(max_examples=60)
@given(members=members, blocks=st.integers(0, 2), cuts=cuts)
def test_one_end_block_or_two_or_none_end_a_shard(members, blocks, cuts):
    shard = make([*members, ("last.x", tarfile.REGTYPE, b"!" * 512)])
    shard = shard.rstrip(b"\0") + bytes(512 * blocks)
    assert len(shard) % 512 == 0
    found, error = read(shard, cuts)
    is_as_webdataset(found, error, *expected(shard))
