"""Checks the layers of imports, where `unsafe` is allowed, the size of modules, and the cost of importing."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = sorted((ROOT / "torchobj").rglob("*.py"))
RUST = sorted(path for path in (ROOT / "rust").rglob("*.rs") if "/src/" in str(path))

#: The layers from the bottom: a module imports only from modules above it in this list.
LAYERS = [
    ["exceptions", "stateful"],
    ["config.checks", "config.explicit_fields", "urls"],
    ["config.credentials"],
    ["config.provider_options"],
    ["config.options", "config.gcs_options"],
    ["config.store"],
    ["config.config_file", "config.s3_client"],
    ["config.resolve"],
    ["config"],
    ["_torchobj"],
    ["_shutdown", "checkpoint.memory", "memory"],
    ["buffers", "conditions", "decode", "object_info"],
    ["reads", "files.attributes", "files.patterns", "files.results"],
    ["files.streams", "files.transfers", "checkpoint.archive"],
    ["checkpoint.files"],
    ["files.store_methods", "checkpoint.s3_checkpoint"],
    ["store"],
    [
        "checkpoint.keys",
        "checkpoint.server",
    ],
    ["manifest_pages"],
    ["manifest_file", "tar_index_file"],
    ["manifest", "tar_index_table", "tar_members"],
    ["parquet_files", "shard_urls"],
    ["parquet_schema", "tar_index_build", "tar_writer"],
    ["shard_writer", "tar_index"],
    ["packing"],
    [
        "checkpoint.device_memory",
        "checkpoint.entries",
        "checkpoint.ranks",
    ],
    ["checkpoint.digest", "checkpoint.pickling", "checkpoint.plan", "checkpoint.records"],
    ["checkpoint.load", "checkpoint.save"],
    ["datasets.descriptors", "datasets.worker_process"],
    [
        "datasets.decoders",
        "datasets.errors",
        "datasets.reductions",
        "datasets.shared_table",
        "datasets.ragged",
        "datasets.reader_constructor",
        "datasets.sample_ranks",
        "datasets.sharding",
        "datasets.tar_samples",
        "datasets.lookahead_warning",
    ],
    [
        "datasets.manifest_broadcast",
        "datasets.shared_values",
        "datasets.prefetch_source",
        "datasets.table_files",
        "datasets.table_rows",
    ],
    ["datasets.batch_memory", "datasets.listing", "datasets.ref_reader"],
    ["datasets.read_ahead", "datasets.base"],
    ["datasets.passes", "datasets.shard_ranges", "datasets.shuffle_buffer"],
    ["datasets.mixture"],
    ["datasets.stream"],
    ["datasets.map", "datasets.iterable", "datasets.objects", "datasets.arranged_listing", "datasets.parquet"],
    ["datasets.labels"],
    ["datasets.groups", "datasets.image_folder", "datasets.table", "datasets.tar_map", "datasets.tar_stream"],
    ["datasets.ordered_samples"],
    ["datasets.member_passes"],
    ["datasets.interleave"],
    ["datasets.one_provider"],
    ["checkpoint.dcp.limits"],
    [
        "checkpoint.dcp.foreign",
        "checkpoint.dcp.manifest",
        "checkpoint.dcp.metadata",
        "checkpoint.dcp.checkpoint_dir",
        "checkpoint.dcp.prefix",
    ],
    ["checkpoint.dcp.attempt", "checkpoint.dcp.item_file"],
    ["checkpoint.dcp.contents", "checkpoint.dcp.sweeping", "checkpoint.dcp.save_items"],
    ["checkpoint.dcp.writer"],
    ["checkpoint.dcp.load_items"],
    ["checkpoint.dcp.reader"],
    ["dcp"],
    [
        "loader.announcement_check",
        "loader.sample_objects",
        "loader.unwrap",
        "loader.packed_state",
        "loader.permutation",
        "loader.stats",
    ],
    ["loader.sampler_state"],
    ["loader.tracked_dataset"],
    ["collate"],
    ["loader.packed_batch"],
    ["loader.iterable_state", "loader.report", "loader.sampler"],
    ["loader.iterator"],
    ["loader.lookahead"],
    ["loader.batch_sampler"],
    ["loader.lookahead_mixin"],
    ["loader._attach", "loader.loader"],
    ["loader.transformers_callback"],
    ["fsspec.concurrency", "fsspec.expansion", "fsspec.files", "fsspec.instances", "fsspec.passed_credentials"],
    ["fsspec.s3fs_options", "fsspec.copies", "fsspec.listings"],
    ["fsspec.gcsfs_options", "fsspec.many_objects", "fsspec.transfers"],
    ["fsspec.file_system"],
    ["fsspec.registry"],
    ["fsspec", "wds"],
    ["lightning"],
    ["checkpoint.commit_format", "checkpoint.handle", "checkpoint.rng"],
    ["checkpoint.commits", "checkpoint.retention"],
    ["checkpoint.leftovers", "checkpoint.staging", "checkpoint.state"],
    ["checkpoint.restoring"],
    ["checkpoint.state_shards"],
    ["checkpoint.save_step"],
    ["checkpoint.manager"],
    ["cli.output"],
    ["cli.checks", "cli.content_types", "cli.errors"],
    ["cli.options", "cli.targets", "cli.credential_sources"],
    ["cli.bars", "cli.url_argument", "cli.machine_checks", "cli.store_checks"],
    ["cli.progress"],
    ["cli.bench_levels", "cli.bucket_copy", "cli.objects", "cli.listing", "cli.removing", "cli.transfer_plan"],
    ["cli.comparison"],
    ["cli.transfer_run"],
    ["cli.moving"],
    ["cli.transfers"],
    [
        "cli.bench",
        "cli.checkpoints",
        "cli.completion",
        "cli.doctor",
        "cli.indexes",
        "cli.manifests",
        "cli.packing",
        "cli.syncing",
        "cli.uploads",
    ],
    ["cli.program"],
    ["cli"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

#: Where unsafe is allowed: memory, and system calls around a fork.
UNSAFE = re.compile(r"torchobj-core/src/(arena/|buffer/|fork/mod\.rs)|torchobj-python/src/buffer/")


def module_of(path):
    return ".".join(path.relative_to(ROOT / "torchobj").with_suffix("").parts)


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torchobj":
            inner = node.module.removeprefix("torchobj").lstrip(".")
            for alias in node.names:
                full = f"{inner}.{alias.name}".lstrip(".")
                yield full if full in LEVEL else inner
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix("torchobj.") for alias in node.names if alias.name.startswith("torchobj.")
            )


@pytest.mark.parametrize("path", [path for path in PYTHON if path.name != "__init__.py"], ids=module_of)
def test_modules_import_only_from_lower_layers(path):
    mine = LEVEL[module_of(path)]
    for name in imports_of(path):
        assert name in LEVEL, f"{name} has no layer"
        assert LEVEL[name] < mine or (LEVEL[name] == mine and name == "urls"), f"{module_of(path)} imports {name}"


def crates_under(crate):
    """Returns the names of the crates that `crate` depends on."""
    done = subprocess.run(
        ["cargo", "tree", "--locked", "--edges", "normal", "--prefix", "none", "-p", crate],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.split()[0] for line in done.stdout.splitlines() if line}


def dependents_of(crate: str) -> set[str]:
    """Returns the names of the crates that depend on `crate` directly."""
    command = ["cargo", "tree", "--locked", "--edges", "normal", "--prefix", "none", "--depth", "1", "--invert", crate]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines() if line} - {crate}


def test_the_core_depends_on_no_python_no_http_and_no_cloud():
    names = crates_under("torchobj-core")
    forbidden = re.compile(r"pyo3|hyper|http|rustls|reqwest|aws|google|torchobj-store|torchobj-python")
    assert not [name for name in names if forbidden.search(name)]
    assert "tokio" in names


def test_the_store_depends_on_no_python():
    names = crates_under("torchobj-store")
    assert not [name for name in names if name.startswith("pyo3")]
    # A single TLS and a single HTTP stack: the SDK's older ones are disabled features.
    assert not names & {"ring", "native-tls", "openssl"}


def test_only_the_crates_of_google_cloud_use_another_http_client():
    google = {"google-cloud-auth", "google-cloud-gax-internal"}
    assert dependents_of("reqwest") == google
    assert dependents_of("tonic") <= {"google-cloud-gax-internal", "google-cloud-storage", "tonic-prost"}
    # hyper supports HTTP/2 because tonic enables it; `http/` has its own HTTP/1.1.
    assert dependents_of("h2") == {"google-cloud-gax-internal", "hyper", "tonic"}


def test_unsafe_is_confined_to_its_modules_and_has_a_safety_comment():
    for path in RUST:
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if re.search(r"\bunsafe\b(?!_)", line.split("//")[0]) and "unsafe_code" not in line:
                assert UNSAFE.search(str(path)), f"{path}:{number + 1}"
                if "unsafe fn" not in line:
                    above = "\n".join(lines[max(0, number - 6) : number + 1])
                    assert "SAFETY" in above, f"{path}:{number + 1}"


def size_of(path):
    lines = path.read_text().splitlines()
    if path.suffix == ".rs":
        tests = [number for number, line in enumerate(lines) if line.startswith("#[cfg(test)]")]
        return tests[0] if tests else len(lines)
    return len(lines)


@pytest.mark.parametrize("path", [*PYTHON, *RUST], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_is_too_large_and_each_starts_with_a_description(path):
    assert size_of(path) <= 600
    first = path.read_text().split("\n", 1)[0]
    assert first.startswith('"""' if path.suffix == ".py" else "//! "), first
    assert not re.search(r"utils|helpers|common", path.name)


def test_importing_and_using_a_store_imports_no_torch():
    script = (
        "import sys, torchobj; s = torchobj.Store('memory://x'); s.put('k', b'v'); s.get_many(['k']);"
        "f = torchobj.open('memory://x/y', 'wb'); f.write(b'z'); f.close(); torchobj.open('memory://x/y').read();"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'torch'; dir(torchobj);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
