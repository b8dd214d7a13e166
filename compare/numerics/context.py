"""Positions of a sequence on each device of context parallelism.

Under a causal mask contiguous chunks give the first device the least work and the last device the most.
Zigzag cuts the sequence into 2 n chunks for n devices. Device r has chunks r and 2 n - 1 - r, so all devices
have equal work.

Source: zigzag as in Llama 3's context parallelism (arXiv 2407.21783, section 3.3.2).
"""

import functools

import numpy as np

from compare.spec.experiment import Layout


@functools.lru_cache(maxsize=64)
def order_of_positions(length: int, layout: Layout) -> np.ndarray:
    """Positions of a sequence, ordered by device, int64 (T,). Each device has an equal, contiguous part."""
    positions_T = np.arange(length)
    if layout.zigzag:
        chunks_2nt = positions_T.reshape(2 * layout.cp, -1)
        order = [chunk for rank in range(layout.cp) for chunk in (rank, 2 * layout.cp - 1 - rank)]
        positions_T = chunks_2nt[order].reshape(-1)
    positions_T.flags.writeable = False
    return positions_T
