"""The matmul ceiling: how fast a machine multiplies matrices, which no training step on it can exceed.

    python -m SIDE --ceiling '{"dtype": "float32"}'

prints a `Ceiling` as one line of JSON. It is measured in the side's own framework, with the threads that a
run would have, on square matrices so large that nothing but the products matters.
"""

import math
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from compare.contract.request import decode_request
from compare.host.facts import cores
from compare.spec.experiment import ExperimentError

ProductDtype = Literal["float64", "float32", "tf32", "bfloat16", "float16"]
SMALLEST, LARGEST = 512, 8192
LONG_S = 0.05  # a product that takes this long is large enough
READING_S, READINGS = 0.1, 3

Multiply = Callable[[int], float]
"""A number of products, one after the other -> the seconds that they took together."""


class CeilingRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a side is asked to measure."""

    dtype: ProductDtype = "float32"
    """Of the products: see `Precision.product_dtype`."""
    platform: Literal["cpu", "gpu"] = "cpu"
    threads: int = 0
    """CPU threads that multiply; 0 for one on each core."""
    sizes: tuple[Annotated[int, Meta(ge=1, le=LARGEST)], ...] = ()
    """Rows and columns of further matrices to multiply, each by itself."""


class Ceiling(Struct, frozen=True, kw_only=True):
    """The fastest products that were measured."""

    flops_per_s: float
    """Of one GPU, or of the CPU with so many threads."""
    by_size: dict[int, float] = {}
    """FLOP/s of products of the sizes that were asked for."""


def read_ceiling_request(text: str) -> CeilingRequest:
    """The request from JSON, with its threads counted. Raises ExperimentError for any other text."""
    request = decode_request(text, CeilingRequest, source=f"--ceiling {text}")
    most = 0 if request.platform == "gpu" else cores()
    if not 0 <= request.threads <= most:
        raise ExperimentError(f"--ceiling: threads = {request.threads}: there are {most}; give 0 for all")
    return msgspec.structs.replace(request, threads=request.threads or most)


def find_ceiling(request: CeilingRequest, prepare: Callable[[int], Multiply]) -> Ceiling:
    """Measure products of a size that takes long enough: the best of a few readings, in about a second.

    `prepare` gives for a size the function that multiplies two matrices of it.
    """
    size = SMALLEST
    multiply, once = _first(prepare, size)
    while once < LONG_S and size < LARGEST:
        size *= 2
        multiply, once = _first(prepare, size)
    by_size = {other: _best(*_first(prepare, other), other) for other in request.sizes}
    return Ceiling(flops_per_s=_best(multiply, once, size), by_size=by_size)


def _first(prepare: Callable[[int], Multiply], size: int) -> tuple[Multiply, float]:
    """What multiplies matrices of a size, and the seconds that a product took."""
    multiply = prepare(size)
    multiply(1)  # allocates, compiles, chooses a kernel
    return multiply, max(multiply(1), 1e-9)


def _best(multiply: Multiply, once: float, size: int) -> float:
    """FLOP/s of the best of a few readings; one product takes `once` seconds."""
    products = math.ceil(READING_S / once)
    return products * 2 * size**3 / min(multiply(products) for _ in range(READINGS))
