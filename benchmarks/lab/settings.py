"""Makes torchobj's configuration and obstore's store of a location, on S3 or Google Cloud Storage. Sends no request."""

from typing import Any

from benchmarks.lab.location import Location


def store_config(location: Location) -> Any:
    """Returns torchobj's configuration of a location."""
    # A rival's process imports only what it measures.
    import torchobj

    if location.scheme == "gs":
        # Without credentials, as no client of the lab has any for Google.
        gcs = torchobj.GCSOptions(endpoint_url=location.endpoint_url, anonymous=location.endpoint_url is not None)
        return torchobj.StoreConfig(gcs=gcs, ca_bundle=location.ca_file)
    s3 = torchobj.S3Options(endpoint_url=location.endpoint_url, region=location.region)
    return torchobj.StoreConfig(s3=s3, ca_bundle=location.ca_file)


def _token() -> dict[str, Any]:
    return {"token": "bench", "expires_at": None}


def obstore_store(location: Location) -> Any:
    """Returns obstore's store of a location. For Google it reads and writes by the XML API."""
    from obstore.store import GCSStore, S3Store

    options = {"allow_http": True}
    if location.scheme == "gs":
        if location.endpoint_url is None:
            return GCSStore(location.bucket, client_options=options)
        # `skip_signature` applies to its reads only; for its writes it gets a token, which it keeps.
        anonymous = {"skip_signature": True, "credential_provider": _token}
        return GCSStore(location.bucket, client_options=options, base_url=location.endpoint_url, **anonymous)
    if location.endpoint_url is None:
        return S3Store(location.bucket, region=location.region, client_options=options)
    path_style = {"endpoint": location.endpoint_url, "virtual_hosted_style_request": False}
    return S3Store(location.bucket, region=location.region, client_options=options, **path_style)
