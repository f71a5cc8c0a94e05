"""The command line: `python -m tests.servers serve <kind>` and `... install`. Each module does its own work."""

from __future__ import annotations

import argparse

from tests.strict.s3 import DEFAULT_BASE_DOMAIN

from .install import BINARIES, EMULATORS, InstallFailed, install


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.servers", description="S3 and GCS servers for tests, on loopback."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="build the binaries that are missing, and print their paths")
    serve = commands.add_parser("serve", help="start a server, print its endpoint as JSON, serve until stdin ends")
    kinds = serve.add_subparsers(dest="kind", required=True)
    strict = kinds.add_parser("strict", help="verifies every request, injects scripted faults")
    strict.add_argument("--tls", action="store_true", help="use TLS, with a certificate created for this run")
    strict.add_argument(
        "--base-domain",
        default=DEFAULT_BASE_DOMAIN,
        help="base domain of virtual-hosted-style requests (default %(default)s)",
    )
    gcs = kinds.add_parser("strict-gcs", help="the same for the JSON API of Google Cloud Storage")
    gcs.add_argument("--tls", action="store_true", help="use TLS, with a certificate created for this run")
    kinds.add_parser("moto", help="moto's S3, with keep-alive connections")
    kinds.add_parser("versitygw", help="versitygw over its own temporary directory")
    kinds.add_parser("fake-gcs-server", help="fake-gcs-server, an emulator of GCS's JSON API, with objects in memory")
    for kind, program in EMULATORS.items():
        kinds.add_parser(kind, help=f"{kind} {program.version}, an emulator, which is installed first if it is missing")
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    try:
        if arguments.command == "install":
            for kind in BINARIES:
                print(install(kind))
        # Import each server's module only when it is used: moto takes a second.
        elif arguments.kind == "strict":
            from .strict_server import serve_s3

            serve_s3(base_domain=arguments.base_domain, tls=arguments.tls)
        elif arguments.kind == "strict-gcs":
            from .strict_server import serve_gcs

            serve_gcs(tls=arguments.tls)
        elif arguments.kind == "moto":
            from . import moto_server

            moto_server.serve()
        elif arguments.kind == "versitygw":
            from . import versitygw

            versitygw.serve()
        elif arguments.kind == "fake-gcs-server":
            from . import fake_gcs_server

            fake_gcs_server.serve()
        elif arguments.kind in EMULATORS:
            from . import emulators

            emulators.serve(arguments.kind)
    except InstallFailed as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
