"""Runs the strict server as a process: announces it, configures TLS, stops it. `strict` serves."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from pathlib import Path

from tests.strict.accounts import ACCESS_KEY, SECRET_KEY
from tests.strict.protocol import Protocol
from tests.strict.s3 import DEFAULT_BASE_DOMAIN, S3
from tests.strict.server import HOST, serve

from .announcement import Announcement
from .lifetime import until_stdin_ends


def serve_s3(*, base_domain: str, tls: bool) -> None:
    """Serves S3 until stdin ends; `base_domain` is that of virtual-hosted-style requests."""
    _serve(S3(base_domain), tls=tls, base_domain=base_domain, token=None)


def serve_gcs(*, tls: bool) -> None:
    """Serves the JSON API of GCS until stdin ends."""
    # The start of the other server does not wait for this import, nor for that of the certificates.
    from tests.strict.gcs.protocol import Gcs
    from tests.strict.gcs.tokens import TOKEN

    _serve(Gcs(), tls=tls, base_domain=DEFAULT_BASE_DOMAIN, token=TOKEN)


def _serve(protocol: Protocol, *, tls: bool, base_domain: str, token: str | None) -> None:
    """Serves until stdin ends; with TLS, using a certificate created for this run."""
    with tempfile.TemporaryDirectory(prefix="torchobj-strict-") as directory:
        context: ssl.SSLContext | None = None
        ca_file: str | None = None
        if tls:
            from .certificates import make_certificates

            certificates = make_certificates(Path(directory), base_domain)
            context, ca_file = certificates.server_context(), str(certificates.ca_file)

        def announce(port: int, control_port: int) -> None:
            Announcement(
                f"{'https' if tls else 'http'}://{HOST}:{port}",
                ACCESS_KEY,
                SECRET_KEY,
                control=f"http://{HOST}:{control_port}/_control",
                ca_file=ca_file,
                token=token,
            ).print()

        asyncio.run(serve(protocol, announce, until_stdin_ends, tls=context))
