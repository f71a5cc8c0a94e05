"""The line in which a started server prints its endpoint. Servers print it; `launch` reads it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field

REGION = "us-east-1"


@dataclass(frozen=True)
class Announcement:
    """A server's endpoint and the credentials to sign with; `control`, `ca_file` and `token` are None if it has none.

    token: a bearer token of GCS.
    """

    endpoint: str
    access_key: str
    secret_key: str
    region: str = REGION
    control: str | None = None
    pid: int = field(default_factory=os.getpid)
    ca_file: str | None = None
    token: str | None = None

    def print(self) -> None:
        """Prints the announcement as JSON on one line; nothing else may go to stdout."""
        print(json.dumps(asdict(self)), flush=True)


def parse(line: str) -> Announcement:
    return Announcement(**json.loads(line))
