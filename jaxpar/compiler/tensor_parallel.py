"""Tensor parallelism by the compiler: constrain both ends of a split region; XLA does Megatron's split.

    region       input        split inside            output       communication that XLA inserts
    attention    (B, T, C)    heads                   (B, T, C)    all-reduce after `out`
    MLP          (B, T, C)    inner features          (B, T, C)    all-reduce after `down`
    head         (B, T, C)    vocabulary of logits    loss         all-reduces of (B, T)

Inside a region every operation is by head or by feature, so nothing is sent. `out` and `down` multiply a
device's own features by the matching rows of the weight: their products are partial sums, which XLA adds. In
backward every device has a part of the gradient of the region's input: XLA adds the parts.

With sequence parallelism T of (B, T, C) is split between regions. XLA then gathers T before a region and
reduce-scatters it after the region; on a CPU it all-reduces and takes a slice. Gradients of norms and of the
biases of `out` and `down` are then partial sums over tp, which XLA adds in the backward loop.

The table of axes (`compare.spec.axes`) places the parameters. This file constrains the activations alone.

Legend: B batch, T position, C n_embd, V vocabulary, H heads, K heads of keys, G queries of one key, D
head_dim, E experts.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from compare.spec.axes import CP, TP
from compare.spec.experiment import Experiment
from jaxpar.derivatives import matmul
from jaxpar.functional import cross_entropy
from jaxpar.hooks import Hooks

AXIS = TP
B = P.UNCONSTRAINED  # data parallelism splits the batch
POSITION_DIM, HIDDEN_DIM, INNER_DIM = 1, 2, -1
"""Split dims: T of (B, T, C); H of (B, T, H, D); the last dim of (B, T, 4C) or of experts (B, T, E, 4C)."""
HEADS_DIM = 3
"""H of the fused q, k and v (B, T, 3, H, D). Grouped queries split K of (B, T, K, G + 2, D) instead."""


def split_layers(hooks: Hooks, experiment: Experiment) -> None:
    """Set hooks that constrain activations at both ends of each split region."""
    between = POSITION_DIM if experiment.layout.sequence_parallel else None
    ends = (
        (hooks.qkv, None, HEADS_DIM if experiment.model.group == 1 else HEADS_DIM - 1),
        (hooks.out, HIDDEN_DIM, between),
        (hooks.up, None, INNER_DIM),
        (hooks.down, INNER_DIM, between),
    )
    for linear, of_input, of_output in ends:
        # At qkv and up the input becomes full. Under sequence parallelism XLA all-gathers T for it. Backward
        # all-reduces the gradient, or reduce-scatters T. At out and down nothing is sent.
        linear.before = partial(constrain, split=of_input)
        linear.matmul = matmul  # dim by dim: XLA would gather a split dim that is merged with another
        # At out and down each device has a partial sum. XLA all-reduces it, or reduce-scatters T. At qkv and
        # up nothing is sent.
        linear.after = partial(constrain, split=of_output)
    # The routing weights and the input of the head: as the input of a region.
    hooks.before_mix = hooks.before_logits = constrain
    # Each device looks up the tokens of its rows of the table. XLA adds the vectors by an all-reduce. Under
    # sequence parallelism XLA on a CPU gathers the table instead.
    hooks.after_embedding = partial(constrain, split=between)
    hooks.vocabulary = jnp.arange  # global ids: the model masks the logits of a padded vocabulary
    # Logits stay split over V. XLA all-reduces the maximum, the sum and the target's logit, each (B, T).
    hooks.cross_entropy = lambda logits_BTV, targets_BT: cross_entropy(
        constrain(logits_BTV, split=2), targets_BT
    )


def pin_heads(compute: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """compute(q, k, v, ...) with q, k and v (B, T, H, D) split by heads alone.

    cuDNN's kernel demands equal shardings of the three, and a loop over blocks keeps them.
    """
    qkv = (lax.with_sharding_constraint(x, P(B, None, AXIS, None)) for x in arrays[:3])
    return compute(*qkv, *arrays[3:])


def constrain(x: jax.Array, *, split: int | None = None) -> jax.Array:
    """Constrain x (B, T, ...): tp splits the dim `split`, or no dim if it is None; cp splits T first."""
    split_dim = None if split is None else split % x.ndim
    axes = [((CP,) if dim == POSITION_DIM else ()) + (AXIS,) * (dim == split_dim) for dim in range(x.ndim)]
    return lax.with_sharding_constraint(x, P(B, *axes[1:]))
