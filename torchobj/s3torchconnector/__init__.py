"""The names and signatures of s3torchconnector: `names`, `datasets`, and those of its modules `dcp` and `lightning`.

Their arguments are converted to a `StoreConfig` in `client_config`.
"""
