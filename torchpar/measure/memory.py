"""Peak memory of one step: on the GPU the allocator's own figure, on the CPU the tensors alive at once."""

import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compare.contract.host.facts import MemoryUse, process_memory
from torchpar.parallel_model import local

CPU_METHOD = "bytes of all tensors alive at once (weights, gradients, optimizer, buckets, activations)"
GPU_METHOD = "torch.cuda.max_memory_allocated"


class StorageMode(TorchDispatchMode):
    """Follows every storage that an operator reads or writes, from its first sight to its end.

    A kernel's own scratch memory is not seen. PyTorch's MemTracker would do the same, but
    refuses modules that run twice in a step, as accumulation does.

    Args:
        resident: tensors that are there already, the optimizer's among them.
        transient: tensors whose storage is resized while this runs, which no operator shows.
        elsewhere: tensors that are not on the device, and do not count.

    Attributes:
        peak: the most bytes alive at once.
    """

    def __init__(
        self,
        resident: Iterable[torch.Tensor],
        transient: Iterable[torch.Tensor] = (),
        elsewhere: Iterable[torch.Tensor] = (),
    ):
        super().__init__()
        self._elsewhere = {storage._cdata: storage for storage in map(_storage, elsewhere)}
        self._alive: dict[int, tuple[weakref.ref, int]] = {}
        self._current = self.peak = 0
        self._transient = {storage._cdata: storage for storage in map(_storage, transient)}
        self._transient_bytes = 0
        for tensor in resident:
            self._see(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor first: what it makes of the operator comes back here
        result = func(*args, **(kwargs or {}))
        self._transient_bytes = sum(storage.nbytes() for storage in self._transient.values())
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = _storage(tensor)
        key = storage._cdata
        if key in self._elsewhere:
            return
        if key in self._alive or key in self._transient:
            self.peak = max(self.peak, self._current + self._transient_bytes)
            return
        size = storage.nbytes()

        def gone(_: weakref.ref) -> None:
            del self._alive[key]
            self._current -= size

        self._alive[key] = (weakref.ref(storage, gone), size)
        self._current += size
        self.peak = max(self.peak, self._current + self._transient_bytes)


class PeakMemory:
    """The result of `track_peak`; `bytes` is valid after its end."""

    bytes = 0


@contextmanager
def track_peak(
    device: torch.device,
    resident: Iterable[torch.Tensor],
    transient: Iterable[torch.Tensor] = (),
    elsewhere: Iterable[torch.Tensor] = (),
) -> Generator[PeakMemory]:
    """Find the peak of what runs inside. The tensors are those of `StorageMode` (CPU only)."""
    peak = PeakMemory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
    else:
        with StorageMode(resident, transient, elsewhere) as mode:
            yield peak
        peak.bytes = mode.peak


def memory_in_use(device: torch.device) -> MemoryUse:
    """What the allocator gave out of a GPU; of a CPU what this process has in RAM."""
    if device.type != "cuda":
        return process_memory()
    return MemoryUse(now=torch.cuda.memory_allocated(device), peak=torch.cuda.max_memory_allocated(device))


def resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind some tensors, each storage once."""
    storages = (_storage(local(tensor)) for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
