"""S3 servers for the tests, on loopback: `strict` (ours), moto and versitygw.

`python -m tests.servers serve <kind>` runs one until its stdin ends; `launch.start` starts it from Python; `install`
builds versitygw. Users do not install any of this.
"""
