"""Tensor parallelism by the compiler: one table says which dims are split, and XLA does Megatron's split.

The parameters' placement follows from the table of axes (`compare.spec.axes`). Beyond it the code says where
activations live at both ends of a region of split work; docs/compilers.md says what XLA does without these
lines. It also says that padded logits do not count, where the vocabulary does not divide.

Legend: B batch, T position, C n_embd, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from compare.spec.axes import CP, TP
from compare.spec.experiment import Experiment
from jaxpar.derivatives import product
from jaxpar.functional import cross_entropy
from jaxpar.hooks import Hooks

AXIS = TP
B = P.UNCONSTRAINED  # the batch is data parallelism's affair
POSITION_DIM, HIDDEN_DIM, INNER_DIM = 1, 2, -1
"""Of (B, T, C); of the heads' (B, T, H, D); of the MLP's (B, T, 4C), and of experts' (B, T, E, 4C)."""
HEADS_DIM = 3
"""Of q, k and v: (B, T, 3, H, D); of groups of queries it is the one before, (B, T, K, G + 2, D)."""


def split_layers(hooks: Hooks, experiment: Experiment) -> None:
    """Constrain activations at both ends of a region of split work."""
    between = POSITION_DIM if experiment.layout.sequence_parallel else None
    ends = (
        (hooks.qkv, None, HEADS_DIM if experiment.model.group == 1 else HEADS_DIM - 1),
        (hooks.out, HIDDEN_DIM, between),
        (hooks.up, None, INNER_DIM),
        (hooks.down, INNER_DIM, between),
    )
    for linear, of_input, of_output in ends:
        linear.before = partial(constrain, split=of_input)
        linear.matmul = product  # dim by dim: merging a split dim with another would gather it
        linear.after = partial(constrain, split=of_output)
    hooks.before_mix = hooks.before_logits = constrain
    hooks.after_embedding = partial(constrain, split=between)
    hooks.vocabulary = jnp.arange
    hooks.cross_entropy = lambda logits_BTV, targets_BT: cross_entropy(
        constrain(logits_BTV, split=2), targets_BT
    )


def constrain(x: jax.Array, *, split: int | None = None) -> jax.Array:
    """Say that x (B, T, ...) is whole along tp, but for one dim, if any; cp splits T before that."""
    at = None if split is None else split % x.ndim
    axes = [((CP,) if dim == POSITION_DIM else ()) + (AXIS,) * (dim == at) for dim in range(x.ndim)]
    return lax.with_sharding_constraint(x, P(B, *axes[1:]))
