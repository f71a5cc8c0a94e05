"""Runs Debian's nginx as the cheapest S3 server: objects are files, and signatures are not verified. `objects` defines
their content. It also terminates TLS for another server of the lab.

One process serves all endpoints of the lab, each on its own port: plain, TLS, with a latency, with a tail, and with a
rate limit per connection. A latency is `ngx.sleep` of the lua module, which costs almost no CPU and blocks no worker.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.lab.location import Location, lab_location
from benchmarks.lab.objects import Family
from benchmarks.lab.progress import progress
from tests.servers.certificates import make_certificates
from tests.servers.install import cache_directory
from tests.servers.lifetime import die_with_parent

BUCKET = "bench"
_MODULES = ("ndk_http_module.so", "ngx_http_lua_module.so")
_MODULE_FOLDERS = ("/usr/lib/nginx/modules", "/usr/lib64/nginx/modules", "/usr/local/lib/nginx/modules")
_INSTALL = "apt-get install -y --no-install-recommends nginx libnginx-mod-http-lua"
_START_LIMIT_S = 10.0
# nginx cannot choose a free port and report it, so another process may take the port that was free a moment ago.
_PORT_ATTEMPTS = 5
# Nine in ten requests take 0.6 to 1.6 times the median.
_TAIL_SIGMA = 0.3


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
    upstream_port: int | None = None
    """Of a server that answers in place of files."""


PLAIN = Endpoint()
TLS = Endpoint(tls=True)
LATENCY = Endpoint(latency_ms=20)
TAIL = Endpoint(latency_ms=20, tail=True)
LIMITED = Endpoint(latency_ms=20, rate="80m")


def _found() -> tuple[str, list[Path]] | None:
    """Returns the program and its lua modules."""
    binary = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    for folder in map(Path, _MODULE_FOLDERS):
        modules = [folder / name for name in _MODULES]
        if binary is not None and all(module.exists() for module in modules):
            return binary, modules
    return None


def _installed() -> tuple[str, list[Path]]:
    """Returns nginx with lua, from Debian's packages if it is missing and this is root."""
    if (found := _found()) is not None:
        return found
    if os.geteuid() == 0 and shutil.which("apt-get"):
        with progress(_INSTALL), contextlib.suppress(subprocess.SubprocessError):
            script = f"apt-get update && DEBIAN_FRONTEND=noninteractive {_INSTALL}"
            subprocess.run(["/bin/sh", "-c", script], check=True, stdout=subprocess.DEVNULL, timeout=600.0)
    if (found := _found()) is None:
        raise SystemExit(f"the lab needs nginx with its lua module; on Debian: {_INSTALL}")
    return found


def objects_folder(families: Sequence[Family]) -> Path:
    """Returns the folder of buckets with every object of `families`, in the page cache. It is kept between runs."""
    root = cache_directory() / "lab" / "objects-1"
    for family in families:
        paths = {index: root / BUCKET / name for index, name in enumerate(family.names())}
        missing = {index: path for index, path in paths.items() if not family.is_stored(path)}
        for index in paths.keys() - missing.keys():
            # Otherwise the first client would wait for the disk.
            with paths[index].open("rb") as file, Path(os.devnull).open("wb") as sink:
                shutil.copyfileobj(file, sink, 1 << 20)
        if not missing:
            continue
        with progress(f"writing {len(missing)} objects of {family.name}"):
            for index, path in missing.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_name(f"{path.name}.{os.getpid()}")
                with partial.open("wb") as file:
                    file.writelines(family.pieces(index))
                partial.replace(path)
    return root


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    upstream, answer = "", _sleep_lua(endpoint)
    if endpoint.upstream_port is not None:
        upstream = f"""
    upstream port{port} {{
        server 127.0.0.1:{endpoint.upstream_port};
        keepalive 256;
    }}"""
        # Passed on as it arrives: what a client does not read is not sent by the server either.
        answer = f"""
            proxy_pass http://port{port};
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $http_host;
            proxy_buffering off;
            proxy_buffer_size 256k;
            proxy_buffers 4 256k;
            proxy_request_buffering off;
            client_max_body_size 0;"""
    return f"""{upstream}
    server {{
        listen 127.0.0.1:{port}{" ssl" if endpoint.tls else ""} reuseport backlog=4096;{tls}{rate}
        location / {{ {answer} }}
    }}"""


def _config(modules: Sequence[Path], folder: Path, endpoints: dict[Endpoint, int], directory: Path) -> str:
    load = "\n".join(f"load_module {module};" for module in modules)
    servers = "".join(_server(endpoint, port, directory) for endpoint, port in endpoints.items())
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
    keepalive_timeout 75;
{servers}
}}
"""


def _started(process: subprocess.Popen[bytes], ports: Sequence[int]) -> bool:
    deadline_s = time.monotonic() + _START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            for port in ports:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return True
        time.sleep(0.01)
    return False


@contextlib.contextmanager
def running(families: Sequence[Family], endpoints: Collection[Endpoint]) -> Iterator[dict[Endpoint, Location]]:
    """Runs nginx with the objects of `families`, if there is an endpoint; yields the location of each."""
    if not endpoints:
        yield {}
        return
    binary, modules = _installed()
    folder = objects_folder(families)
    with tempfile.TemporaryDirectory(prefix="torchobj-nginx-") as name:
        directory = Path(name)
        certificates = make_certificates(directory, "bench.localhost")
        for _ in range(_PORT_ATTEMPTS):
            ports = {endpoint: _free_port() for endpoint in endpoints}
            (directory / "nginx.conf").write_text(_config(modules, folder, ports, directory))
            command = [binary, "-p", name, "-c", "nginx.conf", "-e", f"{name}/error.log"]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                # Its master forwards SIGTERM to its workers: SIGKILL would leave them running.
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509  no other thread runs yet
            )
            try:
                if _started(process, list(ports.values())):
                    ca_file = str(certificates.ca_file)
                    yield {each: lab_location(BUCKET, ports[each], ca_file if each.tls else None) for each in ports}
                    return
            finally:
                process.terminate()
                process.wait(_START_LIMIT_S)
        raise SystemExit(f"nginx did not start:\n{(directory / 'error.log').read_text()[-4000:]}")
