"""Dropout with equal masks in every engine and layout.

The mask is a function of the element's identity, not a draw from a stream. So framework, layout, order of
microbatches and recomputation do not change it. The bits of an element are Threefry-2x32 with 20 rounds
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), of

    key        of the sequence: from the seed, the step, and the number of the sequence in the step
    counter    the site (a layer, and a place in it), and the number of the element in the sequence

The key of a sequence is two words. They are part of the batch and are split over devices as its tokens are.
Four neighbours in the last dim share the 64 bits of one counter. An element is dropped if its 16 bits are
below `threshold`, so the rate is a multiple of 2^-16. The other elements are divided by the true share of
elements that stay. Keys are made here, in NumPy; each side makes masks in its framework.

Legend: A accumulated passes, B sequences of a pass.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from compare.spec.checks import BITS, threshold

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
ROUNDS = 20
OUTSIDE = 0
"""Layer number of sites outside of layers; layers count from 1."""

Words = tuple[np.ndarray, np.ndarray]


class DropoutSite(IntEnum):
    """Dropout sites in nanoGPT's order."""

    EMBEDDING = 0
    ATTENTION = 1
    """Weights of attention (B, H, T, S)."""
    ATTENTION_OUT = 2
    MLP_OUT = 3


def site_number(layer: Any, site: DropoutSite) -> Any:
    """The first word of a counter. `layer` is a number or an array of numbers, from 1, or `OUTSIDE`."""
    return layer * len(DropoutSite) + site


def kept_scale(rate: float) -> float:
    """Factor of the elements that stay: one over their share."""
    return 2**BITS / (2**BITS - threshold(rate))


def sequence_keys(seed: int, step: int, passes: int, sequences: int) -> np.ndarray:
    """The keys of all sequences of a step's global batch: uint32 (A passes, B sequences, 2)."""
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    number_AB = np.arange(passes * sequences, dtype=np.uint32).reshape(passes, sequences)
    return np.stack(threefry(key, np.uint32(step & 0xFFFFFFFF), number_AB), axis=-1)


def threefry(key: np.ndarray | Sequence[np.ndarray], first: ArrayLike, second: ArrayLike) -> Words:
    """Threefry-2x32: two words of random bits for each pair of counter words, all uint32."""
    keys = [np.asarray(key[0], np.uint32), np.asarray(key[1], np.uint32)]
    keys.append(keys[0] ^ keys[1] ^ np.uint32(PARITY))
    counters = (np.asarray(word, np.uint32) for word in (first, second))
    x, y, _ = np.broadcast_arrays(*counters, keys[0])
    with np.errstate(over="ignore"):
        x, y = x + keys[0], y + keys[1]
        for block in range(ROUNDS // 4):
            for rotation in ROTATIONS[block % 2]:
                x = x + y
                y = (y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))
                y = y ^ x
            x = x + keys[(block + 1) % 3]
            y = y + keys[(block + 2) % 3] + np.uint32(block + 1)
    return x, y
