"""The one line by which a started server says where it is. Leaves starting it to the servers, reading it to `launch`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field

REGION = "us-east-1"


@dataclass(frozen=True)
class Announcement:
    """Where a server is and how to sign requests to it; `control` and `ca_file` are None where it has none."""

    endpoint: str
    access_key: str
    secret_key: str
    region: str = REGION
    control: str | None = None
    pid: int = field(default_factory=os.getpid)
    ca_file: str | None = None

    def print(self) -> None:
        """Prints it as JSON on one line; nothing else may go to stdout."""
        print(json.dumps(asdict(self)), flush=True)


def parse(line: str) -> Announcement:
    return Announcement(**json.loads(line))
