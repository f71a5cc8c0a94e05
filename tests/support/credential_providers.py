"""Credential providers for the tests. They log each call to a file and read their behaviour from another file."""

import dataclasses
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from torchobj.config.credentials import S3Credentials

CANARY = "canary8SECRET"


class Scripted:
    """Returns valid keys of a server, unless `behave` selects another behaviour."""

    def __init__(self, folder: Path, access_key: str, secret_key: str) -> None:
        self.folder, self.keys = folder, (access_key, secret_key)
        self.behave("return")

    def behave(self, behaviour: str) -> None:
        """Sets the behaviour of later calls, and of those that `block` until it is another one; see `__call__`."""
        (self.folder / "new").write_text(behaviour)
        (self.folder / "new").replace(self.folder / "behaviour")

    def calls(self) -> list[int]:
        """Returns the process ID of each call so far."""
        noted = self.folder / "calls"
        return [int(line) for line in noted.read_text().split()] if noted.exists() else []

    def __call__(self) -> Any:
        with (self.folder / "calls").open("a") as noted:
            noted.write(f"{os.getpid()}\n")
        access_key, secret_key = self.keys
        result = {"access_key_id": access_key, "secret_access_key": secret_key, "token": None, "expires_at": None}
        while (behaviour := (self.folder / "behaviour").read_text()) == "block":
            time.sleep(0.01)
        behaviour, _, argument = behaviour.partition(" ")
        if behaviour == "raise":
            raise ValueError(f"no network at {argument}")
        if behaviour == "expire":
            result["expires_at"] = datetime.now(UTC) + timedelta(seconds=float(argument))
        if behaviour == "unknown":
            result |= {"access_key_id": "AKIAUNKNOWN", "secret_access_key": CANARY, "token": CANARY}
        return result


class Asynchronous(Scripted):
    """A `Scripted` provider whose call is a coroutine."""

    async def __call__(self) -> Any:
        return super().__call__()


def fixed() -> S3Credentials:
    """Returns keys that no server accepts."""
    return {"access_key_id": "AKIAUNKNOWN", "secret_access_key": CANARY, "expires_at": None}


@dataclasses.dataclass(frozen=True)
class FixedToken:
    """Returns a token of a GCS server, which does not expire. Equal instances share connections."""

    token: str = dataclasses.field(repr=False)

    def __call__(self) -> Any:
        return {"token": self.token, "expires_at": None}


def refused_token() -> Any:
    """Returns a token that no server accepts."""
    return {"token": CANARY, "expires_at": None}
