"""Datasets over objects: `map` and `iterable`, and `objects` for samples made of several; what they list (`listing`),
how ranks agree on it (`rendezvous`), what DataLoader workers know (`workers`), where objects are read (`source`), what
is done about a sample that cannot be made (`errors`), the readers to choose from (`readers`), raw batches (`ragged`).
"""
