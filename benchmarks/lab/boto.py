"""Makes the boto3 client of a location, for preparing the lab, for rivals and for tests. Sends no request."""

from typing import Any

from benchmarks.lab.location import Location


def boto_client(location: Location, **settings: Any) -> Any:
    """Creates an S3 client; `settings` are botocore's. Missing credentials come from the environment."""
    # A rival's process imports only what it measures.
    import boto3
    from botocore.config import Config

    style = {"addressing_style": "auto" if location.endpoint_url is None else "path"}
    return boto3.session.Session().client(
        "s3",
        endpoint_url=location.endpoint_url,
        region_name=location.region,
        aws_access_key_id=location.access_key,
        aws_secret_access_key=location.secret_key,
        verify=location.ca_file,
        config=Config(s3=style, **settings),
    )
