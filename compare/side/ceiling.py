"""The matmul ceiling: how fast a machine multiplies matrices, which no training step on it can exceed.

    python -m SIDE --ceiling '{"dtype": "float32"}'

prints a `Ceiling` as one line of JSON. It is measured in the side's own framework, with a thread on
each core, on square matrices so large that nothing but the products matters.
"""

import math
from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from compare.spec.sections import ProductDtype

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


class Ceiling(Struct, frozen=True, kw_only=True):
    """The fastest products that were measured."""

    flops_per_s: float
    """Of one GPU, or of the CPU with a thread on each core."""


def find_ceiling(request: CeilingRequest, prepare: Callable[[int], Multiply]) -> Ceiling:
    """Measure products of a size that takes long enough: the best of a few readings, in a second or two.

    `prepare` gives for a size the function that multiplies two matrices of it.
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
