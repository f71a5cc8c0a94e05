"""Reads objects in a process with a low limit on open files and other open files. Prints how many were open."""

import os
import resource
import sys

import torchobj

endpoint, bucket, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
options = torchobj.S3Options(endpoint_url=endpoint, profile="strict")
config = torchobj.StoreConfig(s3=options, max_in_flight=64, max_attempts=1)
others = [open(os.devnull) for _ in range(20)]  # held open meanwhile
store = torchobj.Store(f"s3://{bucket}", config=config)
bodies = store.get_many([f"k{index:03}" for index in range(count)])
assert all(bytes(body) == f"body {index}".encode() for index, body in enumerate(bodies))
print(len(os.listdir("/proc/self/fd")) - len(others))
