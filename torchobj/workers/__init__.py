"""The processes of a rank, the trainer and its DataLoader workers, and what they share.

`process` tells which one this is. `descriptors` passes memory between them, `shared_values` has counters of a dataset
and `shared_table` its Arrow table. `memory_budget` bounds what is read ahead, and `batch_memory` has the tensors of
batches. `context` sets context variables.
"""
