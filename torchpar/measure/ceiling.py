"""PyTorch's best rate of matrix products on this machine: `python -m torchpar --ceiling JSON`."""

import torch

from compare.side.ceiling import Ceiling, CeilingRequest, Multiply, find_ceiling
from compare.system.facts import cores
from torchpar.launch import require_gpus
from torchpar.run import now


def measure(request: CeilingRequest) -> Ceiling:
    """The ceiling of one GPU, or of the CPU; MissingDevicesError: no GPU."""
    if request.platform == "gpu":
        require_gpus(1)
    torch.set_num_threads(cores())
    torch.set_float32_matmul_precision("high" if request.dtype == "tf32" else "highest")
    device = torch.device("cuda" if request.platform == "gpu" else "cpu")
    dtype = torch.float32 if request.dtype == "tf32" else getattr(torch, request.dtype)
    return find_ceiling(request, lambda size: _prepared(size, dtype, device))


def _prepared(size: int, dtype: torch.dtype, device: torch.device) -> Multiply:
    torch.manual_seed(0)
    x, w = (torch.randn(size, size, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    w /= size**0.5  # so that the product of products stays as large as x

    def multiply(products: int) -> float:
        y, begun = x, now(device)
        for _ in range(products):
            y = y @ w  # each takes the last one's result, so that none can be left out
        return now(device) - begun

    return multiply
