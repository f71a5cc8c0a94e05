"""Checkpoints as objects: files to write and read them with (`files`), and the class of s3torchconnector (`s3`)."""
