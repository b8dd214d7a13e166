"""Data parallelism by PyTorch: DistributedDataParallel.

It buckets the gradients, all-reduces each bucket during backward, and divides by the number of ranks.
"""

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel


def synchronize_gradients(
    module: nn.Module, *, bucket_size_mb: float, group: ProcessGroup | None, keeps_buckets: bool
) -> DistributedDataParallel:
    """Wrap a module so that backward averages its gradients over the replicas, and waits for them.

    With `keeps_buckets` DDP does not rebuild its buckets after the first step. In a pipeline it would count
    the backwards without synchronization too, and fail in the second step.
    """
    mebibytes = bucket_size_mb * 1e6 / 2**20  # DDP's "MB" is 2^20 bytes
    return DistributedDataParallel(
        module,
        process_group=group,
        bucket_cap_mb=mebibytes,
        gradient_as_bucket_view=True,
        find_unused_parameters=keeps_buckets,
    )
