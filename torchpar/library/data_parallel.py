"""Data parallelism by PyTorch: DistributedDataParallel.

It buckets the gradients, all-reduces each bucket during backward, and divides by the number of ranks.
"""

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel


def synchronize_gradients(
    module: nn.Module,
    *,
    bucket_size_mb: float = 25.0,
    group: ProcessGroup | None = None,
    keeps_buckets: bool = False,
) -> DistributedDataParallel:
    """Wrap a module so that backward leaves the mean of its gradients over the replicas: it waits for them.

    With `keeps_buckets` DDP does not put parameters into other buckets after the first step. In a pipeline it
    would then count the backwards that it is told not to synchronise too, and fail in the second step.
    """
    mebibytes = bucket_size_mb * 1e6 / 2**20  # DDP's "MB" is 2^20 bytes
    return DistributedDataParallel(
        module,
        process_group=group,
        bucket_cap_mb=mebibytes,
        gradient_as_bucket_view=True,
        find_unused_parameters=keeps_buckets,
    )
