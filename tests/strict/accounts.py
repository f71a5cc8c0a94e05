"""The accounts that may sign requests: one permanent key and scripted temporary ones. `signature` verifies."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import S3Error

ACCESS_KEY = "AKIATORCHOBJTESTS000"
# Contains / and +, as many real secrets do, to detect clients that mangle them.
SECRET_KEY = "torchobj/tests+secret/EXAMPLEKEYEXAMPLEKEY"
OWNER_ID = "111122223333"


@dataclass(frozen=True)
class Account:
    """A key pair; temporary credentials have `token` and `expires_s` (Unix epoch, by the server's clock)."""

    access_key: str
    secret_key: str
    token: str | None = None
    expires_s: float | None = None


class Accounts:
    """All accounts, by access key."""

    def __init__(self) -> None:
        self._by_access_key: dict[str, Account] = {}
        self.reset()

    def reset(self) -> None:
        self._by_access_key = {ACCESS_KEY: Account(ACCESS_KEY, SECRET_KEY)}

    def add(self, account: Account) -> None:
        """Adds an account, or replaces the one of the same access key."""
        self._by_access_key[account.access_key] = account

    def authorise(self, access_key: str, token: str | None, now_s: float) -> Account:
        """Returns the account of a request; raises S3Error if the key is unknown or its token wrong or expired."""
        account = self._by_access_key.get(access_key)
        if account is None:
            raise S3Error("InvalidAccessKeyId", details={"AWSAccessKeyId": access_key})
        if token != account.token:
            raise S3Error("InvalidToken", details={"Token-0": token or ""})
        if account.expires_s is not None and now_s >= account.expires_s:
            raise S3Error("ExpiredToken", details={"Token-0": token or ""})
        return account
