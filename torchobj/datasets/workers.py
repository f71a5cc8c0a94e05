"""DataLoader workers: whether this process is one, and whether a pickle is for a process that is being spawned."""

import multiprocessing.context

import torch.utils.data


def in_worker() -> bool:
    """Whether this process is a DataLoader worker."""
    return torch.utils.data.get_worker_info() is not None


def is_for_a_new_process() -> bool:
    """Whether what is being pickled now goes to a process that is being spawned, as DataLoader workers are."""
    return multiprocessing.context.get_spawning_popen() is not None
