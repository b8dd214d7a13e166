"""Which positions of a sequence a device of context parallelism has.

Contiguous parts leave the first device little to do under a causal mask, and the last one most. In zigzag the
sequence is cut into twice as many chunks, and device r of n has chunks r and 2 n - 1 - r: all have as much.

Source: zigzag as in Llama 3's context parallelism (arXiv 2407.21783, section 3.3.2).
"""

import functools

import numpy as np

from compare.spec.experiment import Layout


@functools.lru_cache(maxsize=64)
def order_of_positions(length: int, layout: Layout) -> np.ndarray:
    """The T positions of a sequence in the order of the devices that have them, int64 (T,).

    Each device's are an equal part of it, one after the other.
    """
    positions_T = np.arange(length)
    if layout.zigzag:
        chunks_2nt = positions_T.reshape(2 * layout.cp, -1)
        order = [chunk for rank in range(layout.cp) for chunk in (rank, 2 * layout.cp - 1 - rank)]
        positions_T = chunks_2nt[order].reshape(-1)
    positions_T.flags.writeable = False
    return positions_T
