"""The matmul ceiling: the rate of matrix products of a machine, which no training step can exceed.

    python -m SIDE --ceiling '{"dtype": "float32"}'

prints a `Ceiling` as one line of JSON. The side's framework multiplies large square matrices, with a thread
on each core.
"""

import math
from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from compare.spec.sections import ProductDtype

SMALLEST, LARGEST = 512, 8192
LONG_S = 0.05  # the time of a product that is large enough
READING_S, READINGS = 0.1, 3

Multiply = Callable[[int], float]
"""The seconds of a number of products, one after the other."""


class CeilingRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The products to measure."""

    dtype: ProductDtype = "float32"
    """See `Precision.product_dtype`."""
    platform: Literal["cpu", "gpu"] = "cpu"


class Ceiling(Struct, frozen=True, kw_only=True):
    """The highest measured rate."""

    flops_per_s: float
    """The rate of one GPU, or of the CPU with a thread on each core."""


def find_ceiling(request: CeilingRequest, prepare: Callable[[int], Multiply]) -> Ceiling:
    """Double the size of the products until one takes LONG_S, and return the best of READINGS readings.

    `prepare` returns a function that multiplies two matrices of a given size.
    """

    def measured(size: int) -> tuple[float, float]:
        """Seconds of one product, and FLOP/s of the best reading."""
        multiply = prepare(size)
        multiply(1)  # allocates, compiles, chooses a kernel
        once = max(multiply(1), 1e-9)
        products = math.ceil(READING_S / once)
        return once, products * 2 * size**3 / min(multiply(products) for _ in range(READINGS))

    size = SMALLEST
    once, flops_per_s = measured(size)
    while once < LONG_S and size < LARGEST:
        size *= 2
        once, flops_per_s = measured(size)
    return Ceiling(flops_per_s=flops_per_s)
