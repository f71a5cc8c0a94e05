"""A server of S3 listings of any length, which are computed: it stores no keys. Serves ListObjectsV2 only."""

import bisect
import contextlib
import hashlib
import multiprocessing
import socket
import urllib.parse
from collections.abc import Iterator

_HEAD = '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
_PAGE_KEYS = 1000


class Keys:
    """Keys of 24 bytes in order, `numbered` without ETags or `random` with them, by index."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count = kind, count
        self._step = (1 << 96) // count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> str:
        if self.kind == "numbered":
            return f"train/{index:014}.jpg"
        # Random digits, in order: the gap before each key is random.
        return f"{index * self._step + hash((index, 7)) % self._step:024x}"

    def entry(self, index: int) -> str:
        """The element of a listing."""
        key, size = self[index], 100_000 + index * 7919 % 60_000
        etag = ""
        if self.kind != "numbered":
            etag = f"<ETag>&quot;{hashlib.md5(key.encode()).hexdigest()}&quot;</ETag>"
        return f"<Contents><Key>{key}</Key>{etag}<Size>{size}</Size></Contents>"


def _page(keys: Keys, query: dict[str, str]) -> bytes:
    prefix, after = query.get("prefix", ""), query.get("start-after", "")
    begin = bisect.bisect_left(keys, prefix)
    if after:
        begin = max(begin, bisect.bisect_right(keys, after))
    if "continuation-token" in query:
        begin = int(query["continuation-token"])
    end = min(begin + int(query.get("max-keys", _PAGE_KEYS)), len(keys))
    if prefix:
        end = min(end, bisect.bisect_left(keys, f"{prefix}\uffff"))
    more = end < len(keys) and keys[end].startswith(prefix)
    token = f"<NextContinuationToken>{end}</NextContinuationToken>" if more else ""
    entries = "".join(map(keys.entry, range(begin, end)))
    return f"{_HEAD}<IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>".encode()


def _serve(listener: socket.socket, keys: Keys) -> None:
    while True:
        connection, _ = listener.accept()
        multiprocessing.get_context("fork").Process(target=_answer, args=(connection, keys), daemon=False).start()
        connection.close()


def _answer(connection: socket.socket, keys: Keys) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    file = connection.makefile("rb")
    while line := file.readline():
        target = line.split()[1].decode()
        while file.readline().strip():
            pass
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(target).query))
        body = _page(keys, query)
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


@contextlib.contextmanager
def server(kind: str, count: int) -> Iterator[str]:
    """Serves a bucket of `count` keys. Yields the endpoint URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = multiprocessing.get_context("fork").Process(target=_serve, args=(listener, Keys(kind, count)))
        process.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.terminate()
            process.join()
