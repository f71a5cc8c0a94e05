"""Runs the strict server as a process: announces it, configures TLS, stops it. `strict` serves."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from pathlib import Path

from .announcement import Announcement
from .certificates import make_certificates
from .lifetime import until_stdin_ends
from .strict.accounts import ACCESS_KEY, SECRET_KEY
from .strict.server import HOST, serve


def serve_strict(*, base_domain: str, tls: bool) -> None:
    """Serves until stdin ends; with TLS, using a certificate created for this run."""
    with tempfile.TemporaryDirectory(prefix="torchobj-strict-") as directory:
        context: ssl.SSLContext | None = None
        ca_file: str | None = None
        if tls:
            certificates = make_certificates(Path(directory), base_domain)
            context, ca_file = certificates.server_context(), str(certificates.ca_file)

        def announce(port: int, control_port: int) -> None:
            Announcement(
                f"{'https' if tls else 'http'}://{HOST}:{port}",
                ACCESS_KEY,
                SECRET_KEY,
                control=f"http://{HOST}:{control_port}/_control",
                ca_file=ca_file,
            ).print()

        asyncio.run(serve(announce, until_stdin_ends, base_domain=base_domain, tls=context))
