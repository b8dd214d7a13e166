"""RoPE: queries and keys are turned by their positions (RoFormer, arXiv 2104.09864).

Feature i of a head's first half and feature i of its second are a pair, as in Llama and nanochat. Turned by
the angle of its position t, (a, b) becomes (a cos - b sin, b cos + a sin): a query's product with a key then
depends on how far apart they are. NumPy's numbers in float64 are both frameworks'.
"""

import numpy as np

from compare.spec.experiment import Model


def turns(model: Model) -> np.ndarray:
    """Cosine and sine of each position's angles: float64 (2, T, D / 2)."""
    pairs = model.n_embd // model.n_head // 2
    angle_TD = np.outer(np.arange(model.block_size), model.rope_base ** (-np.arange(pairs) / pairs))
    return np.stack([np.cos(angle_TD), np.sin(angle_TD)])
