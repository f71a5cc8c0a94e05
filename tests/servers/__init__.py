"""Servers for the tests, on loopback: `strict`, moto and versitygw for S3, `strict-gcs` and fake-gcs-server for GCS.

`python -m tests.servers serve <kind>` runs one until its stdin ends; `launch.start` starts it from Python; `install`
builds versitygw and fake-gcs-server. Users do not install any of this.
"""
