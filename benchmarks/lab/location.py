"""Where a bucket is, and the environment that clients need to reach it. Starts nothing."""

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

# Buckets outside this machine's environment need no proxy, no profile and no private certificates.
_UNSET = (
    "AWS_PROFILE",
    "AWS_CA_BUNDLE",
    "SSL_CERT_DIR",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
)


@dataclass(frozen=True)
class Location:
    """A bucket, a prefix in it, and how to reach it. Fields that are None come from the environment."""

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    access_key: str | None = None
    secret_key: str | None = None
    ca_file: str | None = None
    scheme: str = "s3"
    """Or "gs": the JSON and XML API of Google Cloud Storage, in the lab without credentials."""

    @classmethod
    def from_url(cls, url: str) -> "Location":
        """`s3://bucket/prefix/`, reached with the settings of the environment."""
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc:
            raise SystemExit(f"--url {url}: must be s3://bucket/prefix/")
        prefix = parts.path.lstrip("/")
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        return cls(parts.netloc, f"{prefix.rstrip('/')}/" if prefix else "", endpoint, region)

    @property
    def near(self) -> bool:
        """Whether the server is on this machine, where latency is zero and few concurrent requests are fastest."""
        return (urlsplit(self.endpoint_url or "").hostname or "") in ("127.0.0.1", "localhost")

    @property
    def tls(self) -> bool:
        """Whether it is reached over TLS."""
        return self.endpoint_url is None or self.endpoint_url.startswith("https://")

    def key(self, name: str) -> str:
        """Returns the full key of an object of the benchmark."""
        return self.prefix + name

    def url(self, name: str) -> str:
        """Returns the URL of an object of the benchmark."""
        return f"{self.scheme}://{self.bucket}/{self.key(name)}"

    def enter(self) -> None:
        """Sets this process's environment for clients that read credentials from it."""
        if self.access_key is None or self.secret_key is None:
            return
        for name in _UNSET:
            os.environ.pop(name, None)
        os.environ["AWS_ACCESS_KEY_ID"] = self.access_key
        os.environ["AWS_SECRET_ACCESS_KEY"] = self.secret_key
        os.environ["AWS_REGION"] = os.environ["AWS_DEFAULT_REGION"] = self.region or "us-east-1"
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
        os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
        if self.ca_file is not None:
            # OpenSSL and rustls-native-certs read the system certificates from here.
            os.environ["SSL_CERT_FILE"] = self.ca_file
