"""Runs Debian's nginx as the cheapest S3 server: objects are files, and signatures are not verified. `objects` defines
their content.

One process serves all endpoints of the lab, each on its own port: plain, TLS, with a latency, with a tail, with a rate
limit per connection, and the API of Google Cloud Storage, whose metadata are files and whose checksums are headers. A
latency is `ngx.sleep` of the lua module, which costs almost no CPU and blocks no worker.
"""

import base64
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.lab.location import Location
from benchmarks.lab.objects import Family, pieces
from tests.servers.certificates import make_certificates
from tests.servers.install import cache_directory

PACKAGES = ("nginx", "libnginx-mod-http-lua")
BUCKET = "bench"
_MODULES = ("ndk_http_module.so", "ngx_http_lua_module.so")
_MODULE_FOLDERS = ("/usr/lib/nginx/modules", "/usr/lib64/nginx/modules", "/usr/local/lib/nginx/modules")
_START_LIMIT_S = 10.0
# nginx cannot choose a free port and report it, so another process may take the port that was free a moment ago.
_PORT_ATTEMPTS = 5
# Nine in ten requests take 0.6 to 1.6 times the median.
_TAIL_SIGMA = 0.3
# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_METADATA, _CHECKSUMS = "metadata", "checksums.map"
_TIME = "2026-01-01T00:00:00.000Z"

_Name = TypeVar("_Name")


@dataclass(frozen=True)
class Endpoint:
    """The settings of one port."""

    tls: bool = False
    latency_ms: int = 0
    """Before each response."""
    tail: bool = False
    """The latency is the median of a lognormal distribution; one request in a hundred waits 0.1 to 0.6 s instead."""
    rate: str | None = None
    """nginx's `limit_rate` per connection: `80m` is 80 MiB/s."""
    gcs: bool = False
    """By the JSON API of Google Cloud Storage, and its XML API."""


PLAIN = Endpoint()
TLS = Endpoint(tls=True)
LATENCY = Endpoint(latency_ms=20)
TAIL = Endpoint(latency_ms=20, tail=True)
LIMITED = Endpoint(latency_ms=20, rate="80m")
GCS = Endpoint(gcs=True)
GCS_LATENCY = Endpoint(latency_ms=20, gcs=True)


def _find() -> tuple[str, list[Path]] | None:
    """Returns the program and its lua modules."""
    binary = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    for folder in map(Path, _MODULE_FOLDERS):
        modules = [folder / name for name in _MODULES]
        if binary is not None and all(module.exists() for module in modules):
            return binary, modules
    return None


def _install() -> tuple[str, list[Path]]:
    """Returns nginx with lua; installs Debian's packages if it is missing and permissions allow."""
    found = _find()
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]):
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        found = _find()
    if found is None:
        raise SystemExit(f"the lab needs nginx with its lua module; on Debian: apt-get install {' '.join(PACKAGES)}")
    return found


def objects_folder(families: Sequence[Family]) -> Path:
    """Returns the folder of buckets with every object of `families`. It is kept between runs."""
    root = cache_directory() / "lab" / "objects-1"
    for family in families:
        for index, name in enumerate(family.names()):
            path = root / BUCKET / name
            if family.is_stored(path):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{os.getpid()}")
            with partial.open("wb") as file:
                file.writelines(family.pieces(index))
            partial.replace(path)
    return root


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _sleep_lua(endpoint: Endpoint) -> str:
    if not endpoint.latency_ms and not endpoint.tail:
        return ""
    if not endpoint.tail:
        return f"access_by_lua_block {{ ngx.sleep({endpoint.latency_ms / 1000}) }}"
    # A normal deviate by Box and Muller.
    return f"""access_by_lua_block {{
            if math.random() < 0.01 then
                ngx.sleep(0.1 + 0.5 * math.random())
            else
                local normal = math.sqrt(-2 * math.log(1 - math.random())) * math.cos(2 * math.pi * math.random())
                ngx.sleep({endpoint.latency_ms / 1000} * math.exp({_TAIL_SIGMA} * normal))
            end
        }}"""


def _crc32c(index: int, size: int) -> str:
    """Returns the checksum of an object as the API has it."""
    # Part of google-cloud-storage, which the other benchmarks do not need.
    import google_crc32c

    checksum = google_crc32c.Checksum()
    for piece in pieces(index, size):
        checksum.update(bytes(piece))
    return base64.b64encode(checksum.digest()).decode()


def _prepare_gcs(directory: Path, families: Sequence[Family]) -> None:
    """Writes the metadata of the objects of `families`."""
    checksums = []
    for family in families:
        (directory / _METADATA / BUCKET / family.name).mkdir(parents=True, exist_ok=True)
        for index, name in enumerate(family.names()):
            crc32c = _crc32c(index, family.size)
            checksums.append(f"/{BUCKET}/{name} crc32c={crc32c};\n")
            resource = {
                "kind": "storage#object",
                "bucket": BUCKET,
                "name": name,
                "generation": "1",
                "metageneration": "1",
                "storageClass": "STANDARD",
                "contentType": "application/octet-stream",
                "size": str(family.size),
                "crc32c": crc32c,
                "etag": "CAE=",
                "timeCreated": _TIME,
                "updated": _TIME,
            }
            (directory / _METADATA / BUCKET / name).write_text(json.dumps(resource))
    (directory / _CHECKSUMS).write_text("".join(checksums))


def _gcs_maps(directory: Path) -> str:
    """Returns the directives that look up an object's checksum."""
    return f"""
    map_hash_max_size 65536;
    map_hash_bucket_size 128;
    map $uri $crc32c {{ include {directory}/{_CHECKSUMS}; }}"""


def _gcs_locations(directory: Path, sleep: str) -> str:
    """Returns the locations of a server; `sleep` delays a response."""
    identity = json.dumps(
        {"kind": "storage#bucket", "name": BUCKET, "locationType": "region", "storageClass": "STANDARD"}
    )
    # Listings are empty: gcsfs asks for one beside an object's metadata.
    empty = json.dumps({"kind": "storage#objects"})
    # An empty value adds no header.
    headers = """
            add_header x-goog-generation 1;
            add_header x-goog-metageneration 1;
            add_header x-goog-storage-class STANDARD;
            add_header x-goog-stored-content-encoding identity;
            add_header x-goog-stored-content-length $sent_http_content_length;
            add_header x-goog-hash $crc32c;"""
    return f"""
        location /storage/v1/b/ {{
            if ($arg_alt != media) {{ rewrite ^/storage/v1/b/([^/]+)/o/(.+)$ /-/metadata/$1/$2 last; }}
            rewrite ^/storage/v1/b/([^/]+)/o/(.+)$ /$1/$2 break; {headers} {sleep}
        }}
        location /download/storage/v1/b/ {{
            rewrite ^/download/storage/v1/b/([^/]+)/o/(.+)$ /$1/$2 break; {headers} {sleep}
        }}
        location /-/metadata/ {{
            internal;
            alias {directory}/{_METADATA}/;
            default_type application/json; {sleep}
        }}
        location = /storage/v1/b/{BUCKET} {{ default_type application/json; return 200 '{identity}'; }}
        location = /storage/v1/b/{BUCKET}/o {{ default_type application/json; return 200 '{empty}'; }}
        location / {{ {headers} {sleep} }}"""


def _server(endpoint: Endpoint, port: int, directory: Path) -> str:
    tls = ""
    if endpoint.tls:
        # As S3 does: TLS 1.2 and 1.3; nginx's default are records of 16 KiB.
        tls = f"""
        ssl_certificate {directory}/server.pem;
        ssl_certificate_key {directory}/server-key.pem;
        ssl_protocols TLSv1.2 TLSv1.3;"""
    rate = ""
    if endpoint.rate is not None:
        # nginx sends a chunk and then waits as long as the limit requires. Its default chunk of 2 MiB would send a
        # quarter of a part at once.
        rate = f"""
        limit_rate {endpoint.rate};
        sendfile_max_chunk 256k;"""
    sleep = _sleep_lua(endpoint)
    locations = _gcs_locations(directory, sleep) if endpoint.gcs else f"location / {{ {sleep} }}"
    return f"""
    server {{
        listen 127.0.0.1:{port}{" ssl" if endpoint.tls else ""} reuseport backlog=4096;{tls}{rate}
        {locations}
    }}"""


def _config(modules: Sequence[Path], folder: Path, endpoints: dict[Endpoint, int], directory: Path) -> str:
    load = "\n".join(f"load_module {module};" for module in modules)
    servers = "".join(_server(endpoint, port, directory) for endpoint, port in endpoints.items())
    maps = _gcs_maps(directory) if any(endpoint.gcs for endpoint in endpoints) else ""
    temporary = "\n".join(
        f"    {name}_temp_path {directory}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""{load}
{"user root;" if os.geteuid() == 0 else ""}
daemon off;
worker_processes 2;
worker_rlimit_nofile 32768;
pid {directory}/nginx.pid;
error_log {directory}/error.log warn;
events {{ worker_connections 4096; }}
http {{
{temporary}
    init_worker_by_lua_block {{ math.randomseed(ngx.worker.id() + 1) }}
    default_type application/octet-stream;
    access_log off;
    root {folder};
    open_file_cache max=8192 inactive=1h;
    open_file_cache_valid 1h;
    sendfile on;
    # Without tcp_nopush: with it the tail of an answer of 110 KiB is held back for 40 ms where windows are small.
    tcp_nopush off;
    tcp_nodelay on;
    keepalive_requests 1000000000;
    keepalive_timeout 75;{maps}
{servers}
}}
"""


def _die_with_parent() -> None:
    """Sends SIGTERM, which nginx's master forwards to its workers: SIGKILL would leave them running."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def _started(process: subprocess.Popen[bytes], ports: Sequence[int]) -> bool:
    deadline_s = time.monotonic() + _START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        if all(_answers(port) for port in ports):
            return True
        time.sleep(0.01)
    return False


@contextlib.contextmanager
def running(families: Sequence[Family], endpoints: Sequence[Endpoint]) -> Iterator[dict[Endpoint, Location]]:
    """Runs nginx with the objects of `families`; yields the location of each endpoint."""
    binary, modules = _install()
    folder = objects_folder(families)
    with tempfile.TemporaryDirectory(prefix="torchobj-nginx-") as name:
        directory = Path(name)
        certificates = make_certificates(directory, "bench.localhost")
        if any(endpoint.gcs for endpoint in endpoints):
            _prepare_gcs(directory, families)
        for _ in range(_PORT_ATTEMPTS):
            ports = {endpoint: _free_port() for endpoint in endpoints}
            (directory / "nginx.conf").write_text(_config(modules, folder, ports, directory))
            command = [binary, "-p", name, "-c", "nginx.conf", "-e", f"{name}/error.log"]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  no other thread runs yet
            )
            try:
                if _started(process, list(ports.values())):
                    ca_file = str(certificates.ca_file)
                    yield {endpoint: _location(endpoint, port, ca_file) for endpoint, port in ports.items()}
                    return
            finally:
                process.terminate()
                process.wait()
        raise SystemExit(f"nginx did not start:\n{(directory / 'error.log').read_text()[-4000:]}")


@contextlib.contextmanager
def named(
    families: Sequence[Family], endpoints: Mapping[_Name, Endpoint], chosen: Container[_Name]
) -> Iterator[dict[_Name, Location]]:
    """Runs nginx with the `chosen` ones of `endpoints`, if there are any; yields their locations by name."""
    wanted = {name: endpoint for name, endpoint in endpoints.items() if name in chosen}
    if not wanted:
        yield {}
        return
    with running(families, list(wanted.values())) as found:
        yield {name: found[endpoint] for name, endpoint in wanted.items()}


def _location(endpoint: Endpoint, port: int, ca_file: str) -> Location:
    scheme = "https" if endpoint.tls else "http"
    return Location(
        bucket=BUCKET,
        endpoint_url=f"{scheme}://127.0.0.1:{port}",
        region="us-east-1",
        access_key="bench",
        secret_key="bench",
        ca_file=ca_file if endpoint.tls else None,
        scheme="gs" if endpoint.gcs else "s3",
    )
