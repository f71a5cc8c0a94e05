"""The S3 servers that tests run against, on loopback: `strict` (ours), moto and versitygw.

`python -m tests.servers serve <kind>` runs one until its stdin ends; `launch.start` does so from Python; `install`
gets versitygw. Nothing here is part of what users install.
"""
