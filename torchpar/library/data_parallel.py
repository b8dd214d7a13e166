"""Data parallelism by PyTorch: DistributedDataParallel.

Every rank has the whole module and its own rows of the batch. DDP puts gradients into buckets. In the last
backward of a step it all-reduces a bucket as soon as the bucket is full, while backward computes earlier
layers. The sum is divided by the number of ranks: the mean over all rows. Earlier passes run in DDP's
`no_sync`, and only add up gradients (`train.forward_backward`).
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
