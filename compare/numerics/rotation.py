"""RoPE: queries and keys are rotated by their positions (RoFormer, arXiv 2104.09864).

Feature i of a head's first half and feature i of its second half are a pair, as in Llama and nanochat. A
rotation by the angle of position t turns (a, b) into (a cos - b sin, b cos + a sin). So a query's product
with a key depends on their distance. Both frameworks use these numbers, from NumPy in float64.
"""

import numpy as np

from compare.spec.experiment import Model


def turns(model: Model) -> np.ndarray:
    """Cosine and sine of each position's angles: float64 (2, T, D / 2)."""
    pairs = model.n_embd // model.n_head // 2
    angle_TD = np.outer(np.arange(model.block_size), model.rope_base ** (-np.arange(pairs) / pairs))
    return np.stack([np.cos(angle_TD), np.sin(angle_TD)])
