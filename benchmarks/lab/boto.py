"""boto3 for a place: one way to make its client, for what prepares, for rivals and for tests. Asks nothing itself."""

from typing import Any

from benchmarks.lab.place import Place


def boto_client(place: Place, **settings: Any) -> Any:
    """A client of S3; `settings` are botocore's. Credentials that the place does not have are the environment's."""
    # A rival's process imports what it measures, and no more.
    import boto3
    from botocore.config import Config

    style = {"addressing_style": "auto" if place.endpoint_url is None else "path"}
    return boto3.session.Session().client(
        "s3",
        endpoint_url=place.endpoint_url,
        region_name=place.region,
        aws_access_key_id=place.access_key,
        aws_secret_access_key=place.secret_key,
        verify=place.ca_file,
        config=Config(s3=style, **settings),
    )
