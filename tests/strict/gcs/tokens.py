"""Bearer tokens and when they expire. `access` checks those of requests, `metadata_server` issues new ones."""

from __future__ import annotations

# With all characters that a token may have (RFC 6750, 2.1), to detect clients that mangle them.
TOKEN = "ya29.strict-test_token~0123+/abc="


class Tokens:
    """All valid tokens, each with the time at which it expires (Unix epoch, by the server's clock), or None."""

    def __init__(self) -> None:
        self._expires_s: dict[str, float | None] = {}
        self.reset()

    def reset(self) -> None:
        """Revokes all tokens but the initial one."""
        self._expires_s = {TOKEN: None}

    def add(self, token: str, expires_s: float | None) -> None:
        self._expires_s[token] = expires_s

    def revoke(self, token: str) -> bool:
        """Returns whether the token was known."""
        return self._expires_s.pop(token, 0) != 0

    def is_valid(self, token: str, now_s: float) -> bool:
        if token not in self._expires_s:
            return False
        expires_s = self._expires_s[token]
        return expires_s is None or now_s < expires_s
