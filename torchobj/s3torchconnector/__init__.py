"""The names and signatures of s3torchconnector: `names`, `datasets`, and those of its module `dcp`.

Those of `s3torchconnector.lightning` are in `torchobj.lightning`.
"""
