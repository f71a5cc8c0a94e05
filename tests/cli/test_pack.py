"""`torchobj pack`: shards contain the objects, and are the same however often and wherever they are packed."""

import io
import re
import signal
import tarfile

import pytest

import torchobj
from tests.support.interrupting import HELD_BACK_S
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.prefetching import eventually
from torchobj import exceptions
from torchobj.shards import index_file, packing
from torchobj.urls import parse_url

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

SAMPLES = 25


@pytest.fixture
def filled(bucket):
    """Writes 25 samples of 2 objects below `in/`."""
    store = torchobj.Store(bucket.url, config=bucket.config)
    for number in range(SAMPLES):
        store.put(f"in/{number % 3}/{number:04d}.jpg", bytes([number]) * (number * 100))
        store.put(f"in/{number % 3}/{number:04d}.cls", str(number).encode())
    return bucket


def shards(bucket, prefix="out/"):
    return [key for key in bucket.keys() if key.startswith(prefix) and key.endswith(".tar")]


def contents(bucket, prefix="out/"):
    """The shards, by key."""
    return {key: bucket.body(key) for key in shards(bucket, prefix)}


def members(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {info.name: archive.extractfile(info).read() for info in archive.getmembers()}


def arguments(bucket, *options, out="out", count=10):
    return "pack", f"{bucket.url}/in/", f"{bucket.url}/{out}/s-%02d.tar", "--maxcount", count, *options


def test_shards_contain_the_objects_in_key_order_with_an_index_of_each(cli, filled):
    [done] = cli.records(*arguments(filled))
    assert {name: done[name] for name in ("shards", "samples", "files", "complete", "left_out", "failed")} == {
        "shards": 3,
        "samples": 25,
        "files": 50,
        "complete": 0,
        "left_out": 0,
        "failed": 0,
    }
    found = contents(filled)
    assert list(found) == ["out/s-00.tar", "out/s-01.tar", "out/s-02.tar"]
    together = [(name, data) for shard in found.values() for name, data in members(shard).items()]
    keys = sorted(key for key in filled.keys() if key.startswith("in/"))
    assert together == [(key.removeprefix("in/"), filled.body(key)) for key in keys]
    index = index_file.read(filled.body("out/s-01.tar.index.parquet"), "index")
    assert index.shards == (("s-01.tar", len(found["out/s-01.tar"]), filled.version("out/s-01.tar")),)
    assert index.members.num_rows == 20


def test_the_shards_are_those_of_a_shard_writer(cli, filled):
    cli.lines(*arguments(filled))
    with torchobj.ShardWriter("memory://cli-pack/s-%02d.tar", maxcount=10, index=False) as writer:
        for stem in sorted({key.removesuffix(".jpg") for key in filled.keys() if key.endswith(".jpg")}):
            fields = {field: filled.body(f"{stem}.{field}") for field in ("cls", "jpg")}
            writer.write({"__key__": stem.removeprefix("in/"), **fields})
    store = torchobj.Store("memory://cli-pack")
    assert list(contents(filled).values()) == [bytes(store.get(info.key)) for info in store.list()]


def test_a_repeated_command_skips_complete_shards(cli, filled, control):
    cli.lines(*arguments(filled))
    before = {key: filled.version(key) for key in contents(filled)}
    filled.remove("out/s-01.tar")
    filled.remove("out/s-02.tar.index.parquet")
    control.clear_requests()
    [done] = cli.records(*arguments(filled))
    assert (done["shards"], done["complete"]) == (2, 1)
    if filled.url.startswith("s3"):
        assert {key: filled.version(key) for key in contents(filled)} == before
    [done] = cli.records(*arguments(filled))
    assert (done["shards"], done["complete"], done["bytes"]) == (0, 3, 0)


def test_changed_objects_and_other_limits_are_packed_again(cli, filled):
    cli.lines(*arguments(filled))
    filled.write("in/2/0023.cls", b"changed")
    [done] = cli.records(*arguments(filled))
    assert (done["shards"], done["complete"]) == (1, 2)
    assert members(contents(filled)["out/s-02.tar"])["2/0023.cls"] == b"changed"
    [done] = cli.records(*arguments(filled, count=9))
    assert (done["shards"], done["complete"]) == (3, 0)


@pytest.mark.parametrize("with_manifest", [False, True])
def test_hosts_write_the_same_shards_as_one(cli, filled, tmp_path, with_manifest):
    file = tmp_path / "in.parquet"
    cli.lines("manifest", "build", f"{filled.url}/in/", file)
    options = ["--manifest", file] if with_manifest else []
    cli.lines(*arguments(filled, out="one", count=4))
    done = [cli.records(*arguments(filled, "--shard", f"{host}/2", *options, count=4))[0] for host in (1, 0)]
    assert [host["shards"] for host in done] == [3, 4]
    one, several = contents(filled, "one/"), contents(filled)
    assert list(one.values()) == list(several.values())
    assert len(one) == 7
    [checked] = cli.records(*arguments(filled, "--check", *options, count=4))
    assert {name: checked[name] for name in ("action", "shards", "complete", "failed")} == {
        "action": "checked",
        "shards": 7,
        "complete": 7,
        "failed": 0,
    }
    [line] = cli.lines(*arguments(filled, "--check", *options, count=4))
    assert line.startswith("checked 7 shards, in ") and line.endswith(": 7 complete")


def test_an_interrupted_command_leaves_whole_shards_and_continues(cli, filled, control):
    cli.lines(*arguments(filled, out="one", count=2))
    # The objects of six shards are read, the others are not.
    control.faults({"operation": "GetObject", "skip": 24, "action": {"delay_first_byte_s": HELD_BACK_S}})
    process = cli.start(*arguments(filled, "--parallel", 1, count=2))
    assert eventually(lambda: len(shards(filled)) >= 3 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    control.clear_faults()
    partial, one = contents(filled), contents(filled, "one/")
    assert 3 <= len(partial) < 13
    assert all(data == one[key.replace("out/", "one/")] for key, data in partial.items())
    assert not filled.uploads()
    [done] = cli.records(*arguments(filled, count=2))
    assert done["shards"] + done["complete"] == 13
    assert done["complete"] >= len(partial) - 1
    assert list(contents(filled).values()) == list(one.values())


def test_a_failed_read_fails_its_shard_only(cli, filled, control):
    operation = {"operation": "GetObject", "key": "in/0/0003.jpg", "action": {"status": 403, "code": "AccessDenied"}}
    control.faults(operation)
    done = cli.run(*arguments(filled))
    assert done.exit_code == 1
    assert "0003.jpg" in done.stderr
    assert "packed 2 shards: 15 samples" in done.stdout and "1 failed" in done.stdout
    assert list(contents(filled)) == ["out/s-01.tar", "out/s-02.tar"]
    control.clear_faults()
    cli.lines(*arguments(filled))
    assert len(contents(filled)) == 3


def test_an_object_that_has_changed_since_the_manifest_fails(cli, filled, tmp_path):
    file = tmp_path / "in.parquet"
    cli.lines("manifest", "build", f"{filled.url}/in/", file)
    filled.write("in/0/0003.jpg", b"other")
    done = cli.run(*arguments(filled, "--manifest", file))
    assert done.exit_code == 1 and "in/0/0003.jpg" in done.stderr
    assert list(contents(filled)) == ["out/s-01.tar", "out/s-02.tar"]


def test_a_check_writes_nothing_and_names_what_is_missing(cli, filled):
    cli.lines(*arguments(filled))
    filled.write("out/s-01.tar", b"truncated")
    done = cli.run(*arguments(filled, "--check"))
    assert done.exit_code == 1
    assert "s-01.tar: is missing, or does not contain the objects of the plan" in done.stderr
    assert done.stdout.startswith("checked 3 shards") and done.stdout.endswith(": 2 complete; 1 failed\n")
    assert filled.body("out/s-01.tar") == b"truncated"


def test_a_dry_run_prints_the_shards(cli, filled):
    planned = cli.records(*arguments(filled, "--dry-run", "--shard", "0/2"))
    assert [(record["url"].rpartition("/")[2], record["samples"]) for record in planned] == [
        ("s-00.tar", 10),
        ("s-02.tar", 5),
    ]
    assert cli.lines(*arguments(filled, "--dry-run"))[0].startswith("would pack ")
    assert contents(filled) == {}


def test_large_objects_are_streamed(cli, bucket, monkeypatch):
    monkeypatch.setattr(packing, "_LARGE_BYTES", 2 << 20)
    monkeypatch.setattr(packing, "_ROUND_BYTES", 1 << 20)
    data = {f"{name}.bin": bytes([number]) * (number << 19) for number, name in enumerate("abcdefgh")}
    for name, body in data.items():
        bucket.write(f"in/{name}", body)
    cli.lines(*arguments(bucket))
    assert members(bucket.body("out/s-00.tar")) == data


def test_wildcards_select_objects_also_beside_the_shards(cli, filled):
    for _ in range(2):
        cli.lines("pack", f"{filled.url}/in/**/*.cls", f"{filled.url}/in/%d.tar")
    assert next(iter(members(filled.body("in/0.tar")))) == "0/0000.cls"
    assert len(members(filled.body("in/0.tar"))) == SAMPLES


def test_objects_without_an_extension_are_left_out_and_named(cli, filled):
    filled.write("in/README", b"")
    filled.write("in/.hidden", b"")
    done = cli.run(*arguments(filled))
    assert done.exit_code == 0
    assert "2 objects are left out, whose names have no extension or begin with a dot" in done.stderr
    assert "in/.hidden" in done.stderr


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({0: "{url}/none/"}, "no objects; check the prefix"),
        ({1: "{url}/out/s.tar"}, "one number, such as"),
        ({1: "{url}/in/s-%d.tar"}, "is below .*in/, so that the next listing would contain the shards"),
        ({1: "{url}/out/s-%d.tar.gz"}, r"must end in \.tar"),
    ],
)
def test_invalid_arguments_are_errors(cli, filled, changed, reason):
    named = [f"{filled.url}/in/", f"{filled.url}/out/s-%d.tar"]
    for position, text in changed.items():
        named[position] = text.format(url=filled.url)
    message = cli.error("pack", *named)
    assert re.search(reason, message), message


@pytest.mark.parametrize("options", [("--maxcount", "0"), ("--maxsize", "0"), ("--shard", "2/2"), ("--shard", "x"),
                                     ("--shard", "٠/٢")])  # fmt: skip
def test_invalid_options_are_refused(cli, filled, options):
    assert cli.run(*arguments(filled), *options).exit_code == 2


def test_a_prefix_of_objects_without_extension_is_an_error(cli, bucket):
    bucket.write("in/a", b"")
    assert "no samples; 1 object is left out" in cli.error(*arguments(bucket))


def test_two_objects_of_one_field_are_an_error(cli, filled):
    filled.write("in/0/0003.JPG", b"")
    message = cli.error(*arguments(filled))
    assert "0003.JPG" in message and "0003.jpg" in message and "are the same field 'jpg'" in message
    assert contents(filled) == {}


def test_shards_after_those_of_the_plan_are_an_error(cli, filled):
    cli.lines(*arguments(filled, count=5))
    assert "s-03.tar: exists, but the plan has 3 shards" in cli.error(*arguments(filled))


def test_a_manifest_of_another_prefix_or_without_sizes_is_refused(cli, filled, tmp_path):
    file = tmp_path / "other.parquet"
    filled.write("other/a.txt", b"")
    cli.lines("manifest", "build", f"{filled.url}/other/", file)
    assert "other/a.txt: is not below" in cli.error(*arguments(filled, "--manifest", file))
    torchobj.Manifest.from_urls([f"{filled.url}/in/a.txt"]).save(file)
    assert "has no size in the manifest" in cli.error(*arguments(filled, "--manifest", file))


def test_local_files_are_packed_into_a_bucket_and_into_a_folder(cli, bucket, tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "in" / name).write_text(name)
    cli.lines("pack", tmp_path / "in", f"{bucket.url}/out/%d.tar")
    (tmp_path / "out").mkdir()
    for complete in (0, 1):
        [done] = cli.records("pack", tmp_path / "in", tmp_path / "out" / "%d.tar")
        assert done["complete"] == complete
    assert members(bucket.body("out/0.tar")) == {"a.txt": b"a.txt", "b.txt": b"b.txt"}
    assert (tmp_path / "out" / "0.tar").read_bytes() == bucket.body("out/0.tar")


def test_names_of_a_folder_between_those_of_a_sample_do_not_divide_it(bucket):
    for name in ("a.cls", "a.d/x.txt", "a.jpg", "a.jpg.d/y.txt", "a.z"):
        bucket.write(f"in/{name}", b"")
    manifest = torchobj.Manifest.from_prefix(f"{bucket.url}/in/", config=bucket.config)
    folder = parse_url(f"{bucket.url}/in/")
    for objects in (manifest, shuffled(manifest, bucket)):
        plan = packing.plan_shards(objects, folder, f"{bucket.url}/out/%d.tar", maxcount=1, maxsize=1e9)
        assert [[plan.name(index) for index in shard.objects] for shard in plan.shards] == [
            ["a.d/x.txt"],
            ["a.jpg.d/y.txt"],
            ["a.cls", "a.jpg", "a.z"],
        ]
    with pytest.raises(exceptions.ConfigError, match="maxcount=0"):
        packing.plan_shards(manifest, folder, f"{bucket.url}/out/%d.tar", maxcount=0, maxsize=1e9)


def shuffled(manifest, bucket):
    """The objects in reverse order."""
    builder = torchobj._torchobj.ManifestBuilder()
    for index in reversed(range(len(manifest))):
        builder.add(manifest.bases(), manifest.columns(index, index + 1))
    return torchobj.Manifest(bytes(builder.finish()))


@pytest.mark.parametrize("linked", ["source", "shards", "below"])
def test_shards_that_a_symbolic_link_leads_into_the_folder_are_refused(cli, tmp_path, linked):
    source, link = tmp_path / "in", tmp_path / "link"
    source.mkdir()
    (source / "a.txt").write_bytes(b"1")
    link.symlink_to(source)
    prefix, out = (link, source) if linked == "source" else (source, link)
    if linked == "below":
        out = tmp_path / "out"
        out.mkdir()
        (source / "sub").symlink_to(out)
    assert "is below" in cli.error("pack", prefix, f"{out}/s-%02d.tar")
    with pytest.raises(exceptions.ConfigError, match="is below"):
        packing.pack(f"file://{prefix}", f"file://{out}/s-%02d.tar")
    cli.lines("pack", prefix, f"{tmp_path}/elsewhere/s-%02d.tar")
    assert sorted(path.name for path in (tmp_path / "elsewhere").glob("*.tar")) == ["s-00.tar"]
