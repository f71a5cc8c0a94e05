"""Where a bucket is, and how each client reaches it: environment, configuration, clients. Starts nothing."""

import os
from dataclasses import dataclass
from typing import Any
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
    counts: bool = False
    """Whether the server is `lab.origin`, which counts requests."""
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

    # A rival's process imports only what it measures.

    def config(self, **settings: Any) -> Any:
        """Returns torchobj's configuration, with other `settings` of it."""
        import torchobj

        if self.scheme == "gs":
            # Without credentials, as no client of the lab has any for Google.
            gcs = torchobj.GCSOptions(endpoint_url=self.endpoint_url, anonymous=self.endpoint_url is not None)
            return torchobj.StoreConfig(gcs=gcs, ca_bundle=self.ca_file, **settings)
        s3 = torchobj.S3Options(endpoint_url=self.endpoint_url, region=self.region)
        return torchobj.StoreConfig(s3=s3, ca_bundle=self.ca_file, **settings)

    def store(self) -> Any:
        """Returns torchobj's store of the bucket."""
        import torchobj

        return torchobj.Store(f"{self.scheme}://{self.bucket}", config=self.config())

    def obstore(self) -> Any:
        """Returns obstore's store of the bucket. For Google it reads and writes by the XML API."""
        from obstore.store import GCSStore, S3Store

        options = {"allow_http": True}
        if self.scheme == "gs":
            if self.endpoint_url is None:
                return GCSStore(self.bucket, client_options=options)
            # `skip_signature` applies to its reads only; for its writes it gets a token, which it keeps.
            anonymous = {"skip_signature": True, "credential_provider": _token}
            return GCSStore(self.bucket, client_options=options, base_url=self.endpoint_url, **anonymous)
        if self.endpoint_url is None:
            return S3Store(self.bucket, region=self.region, client_options=options)
        path_style = {"endpoint": self.endpoint_url, "virtual_hosted_style_request": False}
        return S3Store(self.bucket, region=self.region, client_options=options, **path_style)

    def boto3(self, **settings: Any) -> Any:
        """Returns boto3's client; `settings` are botocore's. Missing credentials come from the environment."""
        import boto3
        from botocore.config import Config

        style = {"addressing_style": "auto" if self.endpoint_url is None else "path"}
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            verify=self.ca_file,
            config=Config(s3=style, **settings),
        )

    def s3torchconnector(self) -> dict[str, Any]:
        """Returns the arguments of s3torchconnector's classes."""
        from s3torchconnector import S3ClientConfig

        config = S3ClientConfig(force_path_style=self.endpoint_url is not None)
        return {"region": self.region or "us-east-1", "endpoint": self.endpoint_url, "s3client_config": config}


def _token() -> dict[str, Any]:
    return {"token": "bench", "expires_at": None}


def lab_location(bucket: str, port: int, ca_file: str | None = None, **more: Any) -> Location:
    """A bucket of a server on this machine that verifies no signatures, with TLS if there is a `ca_file`."""
    url = f"{'http' if ca_file is None else 'https'}://127.0.0.1:{port}"
    return Location(bucket, "", url, "us-east-1", "bench", "bench", ca_file, **more)
