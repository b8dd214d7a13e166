"""PyTorch's best rate of matrix products on this machine: `python -m torchpar --ceiling JSON`."""

import time

import torch

from compare.contract.ceiling import Ceiling, CeilingRequest, Multiply, find_ceiling
from compare.host.facts import MissingDevicesError

DTYPES = {
    "float64": torch.float64,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def measure(request: CeilingRequest) -> Ceiling:
    """Measure the ceiling of one GPU, or of the CPU with `request.threads` threads.

    Raises:
        MissingDevicesError: no GPU, where one was asked for.
    """
    if request.platform == "gpu" and not torch.cuda.is_available():
        raise MissingDevicesError("platform gpu: PyTorch sees no GPU; use platform cpu")
    if request.threads:
        torch.set_num_threads(request.threads)
    torch.set_float32_matmul_precision("high" if request.dtype == "tf32" else "highest")
    device = torch.device("cuda" if request.platform == "gpu" else "cpu")
    return find_ceiling(request, lambda size: _prepared(size, DTYPES[request.dtype], device))


def _prepared(size: int, dtype: torch.dtype, device: torch.device) -> Multiply:
    torch.manual_seed(0)
    x, w = (torch.randn(size, size, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    w /= size**0.5  # so that the product of products stays as large as x

    def multiply(products: int) -> float:
        y = x
        begun = _now(device)
        for _ in range(products):
            y = y @ w  # each takes the last one's result, so that none can be left out
        return _now(device) - begun

    return multiply


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
