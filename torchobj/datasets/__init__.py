"""Datasets over objects: `map` and `iterable`, what they list (`listing`), how ranks agree on it (`rendezvous`), what
DataLoader workers know (`workers`), what is done about a sample that cannot be made (`errors`), the readers to choose
from (`readers`), raw batches (`ragged`).
"""
