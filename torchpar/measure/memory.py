"""Memory of one step, and of what stays between two: on a GPU beside the allocator's own figure."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from compare.contract.memory_profile import Class
from compare.host.facts import MemoryUse, process_memory
from torchpar.measure.storages import StorageMode
from torchpar.parallel_model import local

CPU_METHOD = "bytes of all tensors alive at once (weights, gradients, optimizer, buckets, activations)"
GPU_METHOD = "torch.cuda.max_memory_allocated"
PROFILE_METHOD = (
    "every storage that an operator reads or writes, from its making to its end, position by operator; "
    "kernels' scratch memory is not seen"
)


@contextmanager
def watch_memory(
    device: torch.device,
    held: Mapping[Class, Iterable[torch.Tensor]],
    *,
    elsewhere: Iterable[torch.Tensor] = (),
    module: nn.Module | None = None,
) -> Generator[StorageMode]:
    """Follow the memory, in bytes, of operations inside. `held`: tensors of any shape by their class."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with StorageMode(held, elsewhere=elsewhere, module=module, device=device.type) as mode:
        yield mode


def allocator_peak(device: torch.device) -> int:
    """The most that a GPU's allocator gave out since `watch_memory` began; 0 on a CPU, which has none."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def memory_in_use(device: torch.device) -> MemoryUse:
    """Bytes in use: the allocator's on a GPU, this process's RAM on a CPU."""
    if device.type != "cuda":
        return process_memory()
    return MemoryUse(now=torch.cuda.memory_allocated(device), peak=torch.cuda.max_memory_allocated(device))


def resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors of any shape, each storage once."""
    storages = (_storage(local(tensor)) for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
